"""Kernels of grouped products: the rows of many experts, each group times its own packed matrix, in one launch.

A table row is five int64: kind, data, scale, zero of a packed matrix (as `PackedMatrix.source`) and `first`, the row of
its first panel at which the matrix begins (so that low-rank matrices can lie one after the other in shared panels).
`active` (int32) lists the groups with rows; group e owns the rows begin[e] ≤ p < end[e] (int64). A panel is expanded
once for all rows of its group, then multiplied as in `tithe.quant.product`: each output is one chain over k,
so that a row's bits do not depend on the rows around it and equal those of `PackedMatrix.matmul` on that row alone.

Argument order of every kernel is written above it; a pointer is an integer address, a stride counts elements. Output
modes are those of `tithe.quant.rows_tile`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from tithe.quant.codes import FP32, data_bytes, scale_bytes
from tithe.quant.expand import panel_f32, panel_pairs
from tithe.quant.rows_tile import TILE_FLOATS, begin_tiles, dot_rows, fma_rows
from tithe.quant.runtime import as_float, i32p, i64p, kernel, next_slot, next_task, prefetch, stack_f32


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
    tile = stack_f32(TILE_FLOATS)
    begin_tiles()
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
        panel = panel_pairs(source[1], source[2], source[3], kind, t, steps, scratch)
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
    tile = stack_f32(TILE_FLOATS)
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
        panel = panel_f32(source[1], source[2], source[3], kind, t, steps, rounded, scratch)
        target = out + (t * 48 - first) * (2 if mode == 1 else 4)
        fma_rows(x, ldx, begin[e], end[e], panel, steps * 2, target, ldo, (left, right), write, tile)
