"""Kernels of grouped products: the rows of many experts, each group times its own packed matrix, in one launch.

A table row is five int64: kind, data, scale, zero of a packed matrix (as `PackedMatrix.source`) and `first`, the row of
its first panel at which the matrix begins (so that low-rank matrices can lie one after the other in shared panels).
`active` (int32) lists the groups with rows; group e owns the rows begin[e] ≤ p < end[e] (int64). A panel is expanded
once for all rows of its group, then multiplied by the tiles of `tithe.quant.product`: each output is one chain over k,
so that a row's bits do not depend on the rows around it and equal those of `PackedMatrix.matmul` on that row alone.

Argument order of every kernel is written above it; a pointer is an integer address, a stride counts elements. Output
modes: 0 float32, 1 bf16, 2 float32 rounded to bf16 (operands of processors without a bf16 dot product).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from tithe.quant.codes import BF16, FP32, data_bytes, round_bf16, scale_bytes
from tithe.quant.expand import expand_f32, expand_pairs
from tithe.quant.runtime import (
    as_float,
    f32_to_bf16,
    f32p,
    fma,
    i32p,
    i64p,
    kernel,
    next_slot,
    next_task,
    prefetch,
    stack_f32,
    u16p,
    u32p,
)
from tithe.quant.tile import (
    DOT_ROWS,
    FMA_ROWS,
    dot_row,
    dot_row_add,
    dot_tile,
    dot_tile_add,
    fma_row,
    fma_row_add,
    fma_tile,
    fma_tile_add,
)

_NO_SCALE = np.float32(0.0)


@njit
def _finish(tile: Any, rows: Any, left: Any, right: Any, out: Any, ldo: Any, mode: Any, add: Any, scale: Any) -> None:
    """Write columns left..right of a 48-wide float32 tile to out[:, left:right]."""
    for r in range(rows):
        if mode == 1:
            o16 = u16p(out + r * ldo * 2)
            for c in range(left, right):
                o16[c] = f32_to_bf16(tile[r * 48 + c])
        elif mode == 2:
            o32 = f32p(out + r * ldo * 4)
            for c in range(left, right):
                o32[c] = round_bf16(tile[r * 48 + c])
        else:
            o32 = f32p(out + r * ldo * 4)
            for c in range(left, right):
                o32[c] = fma(scale, tile[r * 48 + c], o32[c]) if add else tile[r * 48 + c]


@njit
def dot_rows(
    x: Any, ldx: Any, begin: Any, end: Any, panel: Any, steps: Any, out: Any, ldo: Any, span: Any, write: Any, tile: Any
) -> None:
    """Rows begin..end of x times one panel of bf16 pairs; span = (left, right), write = (mode, add, factor)."""
    w = u32p(panel)
    left, right = span
    mode, add, factor = write
    size = 2 if mode == 1 else 4
    via_tile = mode != 0 or left > 0 or right < 48
    for i in range(begin, end, DOT_ROWS):
        count = min(DOT_ROWS, end - i)
        target = out + i * ldo * size
        if count == DOT_ROWS and not via_tile and not add:
            dot_tile(u32p(x + i * ldx * 4), ldx, w, steps, f32p(target), ldo, _NO_SCALE)
        elif count == DOT_ROWS and not via_tile:
            dot_tile_add(u32p(x + i * ldx * 4), ldx, w, steps, f32p(target), ldo, factor)
        elif count == DOT_ROWS:
            dot_tile(u32p(x + i * ldx * 4), ldx, w, steps, tile, 48, _NO_SCALE)
            _finish(tile, count, left, right, target, ldo, mode, add, factor)
        else:
            for r in range(count):
                row = u32p(x + (i + r) * ldx * 4)
                if via_tile:
                    dot_row(row, ldx, w, steps, tile, 48, _NO_SCALE)
                    _finish(tile, 1, left, right, target + r * ldo * size, ldo, mode, add, factor)
                elif add:
                    dot_row_add(row, ldx, w, steps, f32p(target + r * ldo * 4), ldo, factor)
                else:
                    dot_row(row, ldx, w, steps, f32p(target + r * ldo * 4), ldo, _NO_SCALE)


@njit
def fma_rows(
    x: Any, ldx: Any, begin: Any, end: Any, panel: Any, steps: Any, out: Any, ldo: Any, span: Any, write: Any, tile: Any
) -> None:
    """The same with float32 operands; steps count k."""
    w = f32p(panel)
    left, right = span
    mode, add, factor = write
    size = 2 if mode == 1 else 4
    via_tile = mode != 0 or left > 0 or right < 48
    for i in range(begin, end, FMA_ROWS):
        count = min(FMA_ROWS, end - i)
        target = out + i * ldo * size
        if count == FMA_ROWS and not via_tile and not add:
            fma_tile(f32p(x + i * ldx * 4), ldx, w, steps, f32p(target), ldo, _NO_SCALE)
        elif count == FMA_ROWS and not via_tile:
            fma_tile_add(f32p(x + i * ldx * 4), ldx, w, steps, f32p(target), ldo, factor)
        elif count == FMA_ROWS:
            fma_tile(f32p(x + i * ldx * 4), ldx, w, steps, tile, 48, _NO_SCALE)
            _finish(tile, count, left, right, target, ldo, mode, add, factor)
        else:
            for r in range(count):
                row = f32p(x + (i + r) * ldx * 4)
                if via_tile:
                    fma_row(row, ldx, w, steps, tile, 48, _NO_SCALE)
                    _finish(tile, 1, left, right, target + r * ldo * size, ldo, mode, add, factor)
                elif add:
                    fma_row_add(row, ldx, w, steps, f32p(target + r * ldo * 4), ldo, factor)
                else:
                    fma_row(row, ldx, w, steps, f32p(target + r * ldo * 4), ldo, _NO_SCALE)


@njit
def _ask_ahead(kind: Any, data: Any, scale: Any, zero: Any, panel: Any, panels: Any, steps: Any) -> None:
    """Ask for the panel after next while this one is multiplied; of a big one only what the hardware will not fetch."""
    following = panel + 2
    if following >= panels or kind == FP32:
        return
    size = data_bytes(kind, steps)
    prefetch(data + following * size, min(size, 32768))
    of_scales, of_zeros = scale_bytes(kind, steps)
    prefetch(scale + following * of_scales, of_scales)
    prefetch(zero + following * of_zeros, of_zeros)


@njit(inline="always")
def columns_of(panel: Any, first: Any, rows: Any) -> Any:
    """(left, right) of a panel that belong to a matrix of `rows` rows that begins at row `first`."""
    return max(0, first - panel * 48), min(48, first + rows - panel * 48)


# x, ldx (pairs), steps (K/2), out, ldo, N, table, active, begin, end, panels of a group, scratch, scratch_stride
# (bytes), add, factor, mode, rounded
@kernel
def grouped_dot(args: Any) -> None:
    """out = x·W̃ᵀ (or out += factor·x·W̃ᵀ) of every group with bf16 operands; a task: active group × panel."""
    x, ldx, steps, out, ldo, columns, panels = args[3], args[4], args[5], args[6], args[7], args[8], args[13]
    active, begin, end = i32p(args[10]), i64p(args[11]), i64p(args[12])
    scratch = args[14] + next_slot(args) * args[15]
    mode = args[18]
    write = (mode, args[16] != 0, np.float32(as_float(args[17])))
    tile = stack_f32(384)
    while True:
        task = next_task(args)
        if task >= args[1]:
            break
        e, t = np.int64(active[task // panels]), task % panels
        source = i64p(args[9] + e * 40)
        kind, first = source[0], source[4]
        left, right = columns_of(t, first, columns)
        if right <= left or end[e] <= begin[e]:
            continue
        panel = scratch
        if kind == BF16:
            panel = source[1] + t * steps * 192
        else:
            expand_pairs(source[1], source[2], source[3], kind, t, steps, scratch)
        _ask_ahead(kind, source[1], source[2], source[3], t, panels, steps)
        target = out + (t * 48 - first) * (2 if mode == 1 else 4)
        dot_rows(x, ldx, begin[e], end[e], panel, steps, target, ldo, (left, right), write, tile)


# the same arguments; x and ldx count float32
@kernel
def grouped_fma(args: Any) -> None:
    """out = x·W̃ᵀ (or out += factor·x·W̃ᵀ) of every group with float32 operands; a task: active group × panel."""
    x, ldx, steps, out, ldo, columns, panels = args[3], args[4], args[5], args[6], args[7], args[8], args[13]
    active, begin, end = i32p(args[10]), i64p(args[11]), i64p(args[12])
    scratch = args[14] + next_slot(args) * args[15]
    mode, rounded = args[18], args[19] != 0
    write = (mode, args[16] != 0, np.float32(as_float(args[17])))
    tile = stack_f32(384)
    while True:
        task = next_task(args)
        if task >= args[1]:
            break
        e, t = np.int64(active[task // panels]), task % panels
        source = i64p(args[9] + e * 40)
        kind, first = source[0], source[4]
        left, right = columns_of(t, first, columns)
        if right <= left or end[e] <= begin[e]:
            continue
        panel = scratch
        if kind == FP32:
            panel = source[1] + t * steps * 384
        else:
            expand_f32(source[1], source[2], source[3], kind, t, steps, rounded, scratch)
        target = out + (t * 48 - first) * (2 if mode == 1 else 4)
        fma_rows(x, ldx, begin[e], end[e], panel, steps * 2, target, ldo, (left, right), write, tile)
