"""The product of rows with a packed matrix, and the small products that ride on it.

Argument order of every kernel is written above it; a pointer is an integer address, a stride counts elements.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from tithe.quant.codes import BF16, FP32, data_bytes, scale_bytes
from tithe.quant.expand import expand_f32, expand_pairs
from tithe.quant.runtime import (
    as_float,
    carrier,
    f32_to_bf16,
    f32p,
    fma,
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
def _finish(tile: Any, rows: Any, columns: Any, out: Any, ldo: Any, out_bf16: Any, add: Any, scale: Any) -> None:
    """Write a [rows, columns] corner of a 48-wide float32 tile to a float32 or bf16 output."""
    for r in range(rows):
        if out_bf16:
            o16 = u16p(out + r * ldo * 2)
            for c in range(columns):
                o16[c] = f32_to_bf16(tile[r * 48 + c])
        else:
            o32 = f32p(out + r * ldo * 4)
            for c in range(columns):
                o32[c] = fma(scale, tile[r * 48 + c], o32[c]) if add else tile[r * 48 + c]


@njit
def ahead(kind: Any, data: Any, scale: Any, zero: Any, panel: Any, steps: Any, columns: Any, rows: Any) -> Any:
    """Where the data begin of the panel that is likely this thread's next, and how many bytes of it to ask for with
    each tile of rows; asks for its scales at once. At decode sizes a panel is too short for hardware to run ahead.
    """
    following = panel + 2
    if following * 48 >= columns:
        return data, 0
    size = data_bytes(kind, steps)
    of_scales, of_zeros = scale_bytes(kind, steps)
    prefetch(scale + following * of_scales, of_scales)
    prefetch(zero + following * of_zeros, of_zeros)
    tiles = max(1, (rows + DOT_ROWS - 1) // DOT_ROWS)
    share = (size // tiles + 63) // 64 * 64
    return data + following * size, share


@njit
def ride(riders: Any, n: Any, panel: Any, first: Any, count: Any, out: Any, ldo: Any) -> None:
    """Add every rider's share to the rows first..first+count of one panel, while they are in the cache.

    A rider is a small product that lands on the same outputs, out += scale·u·Bᵀ, as nine int64: u, its row stride in
    pairs, B's panels, pairs of its rank, scale (float64 bits), first and last row, first and last panel.
    """
    for k in range(n):
        rider = i64p(riders + k * 72)
        if panel < rider[7] or panel >= rider[8]:
            continue
        begin, end = max(first, rider[5]), min(first + count, rider[6])
        w = u32p(rider[2] + (panel - rider[7]) * rider[3] * 192)
        scale = np.float32(as_float(rider[4]))
        if end - begin == DOT_ROWS:
            dot_tile_add(u32p(rider[0] + begin * rider[1] * 4), rider[1], w, rider[3], f32p(out), ldo, scale)
        else:
            for r in range(begin, end):
                row = u32p(rider[0] + r * rider[1] * 4)
                dot_row_add(row, rider[1], w, rider[3], f32p(out + (r - first) * ldo * 4), ldo, scale)


# x, ldx (pairs), rows, steps (K/2), out, ldo, columns (N), kind, data, scale, zero, scratch, scratch_stride (bytes),
# add, factor, out_bf16, rounded, rows per task, riders, number of riders
@carrier
def matmul_dot(args: Any) -> None:
    """out = x·W̃ᵀ (or out += factor·x·W̃ᵀ), bf16 operands, float32 accumulation; a task: panel × block of rows."""
    x, ldx, rows, steps, out, ldo, columns = args[3], args[4], args[5], args[6], args[7], args[8], args[9]
    kind, data, scale, zero = args[10], args[11], args[12], args[13]
    scratch = args[14] + next_slot(args) * args[15]
    add, factor, out_bf16 = args[16] != 0, np.float32(as_float(args[17])), args[18] != 0
    size = 2 if out_bf16 else 4
    blocks = (rows + args[20] - 1) // args[20]
    tile = stack_f32(384)
    while True:
        task = next_task(args)
        if task >= args[1]:
            break
        t, begin = task // blocks, (task % blocks) * args[20]
        end = min(rows, begin + args[20])
        panel = scratch
        if kind != BF16:
            expand_pairs(data, scale, zero, kind, t, steps, scratch)
        else:
            panel = data + t * steps * 192
        w = u32p(panel)
        width = min(48, columns - t * 48)
        via_tile = out_bf16 or width < 48
        ahead_at, share = ahead(kind, data, scale, zero, t, steps, columns, end - begin)
        for i in range(begin, end, DOT_ROWS):
            prefetch(ahead_at, share)
            ahead_at += share
            count = min(DOT_ROWS, end - i)
            target = out + (i * ldo + t * 48) * size
            if count == DOT_ROWS and not via_tile and not add:
                dot_tile(u32p(x + i * ldx * 4), ldx, w, steps, f32p(target), ldo, _NO_SCALE)
            elif count == DOT_ROWS and not via_tile:
                dot_tile_add(u32p(x + i * ldx * 4), ldx, w, steps, f32p(target), ldo, factor)
            elif count == DOT_ROWS:
                dot_tile(u32p(x + i * ldx * 4), ldx, w, steps, tile, 48, _NO_SCALE)
                _finish(tile, count, width, target, ldo, out_bf16, add, factor)
            else:
                for r in range(count):
                    row = u32p(x + (i + r) * ldx * 4)
                    if via_tile:
                        dot_row(row, ldx, w, steps, tile, 48, _NO_SCALE)
                        _finish(tile, 1, width, target + r * ldo * size, ldo, out_bf16, add, factor)
                    elif add:
                        dot_row_add(row, ldx, w, steps, f32p(target + r * ldo * 4), ldo, factor)
                    else:
                        dot_row(row, ldx, w, steps, f32p(target + r * ldo * 4), ldo, _NO_SCALE)
            ride(args[21], args[22], t, i, count, target, ldo)


# the same arguments; x and ldx count float32; slot 19: W̃ rounded to bf16
@kernel
def matmul_fma(args: Any) -> None:
    """out = x·W̃ᵀ (or out += factor·x·W̃ᵀ) with float32 operands; a task: panel × block of rows."""
    x, ldx, rows, steps, out, ldo, columns = args[3], args[4], args[5], args[6], args[7], args[8], args[9]
    kind, data, scale, zero = args[10], args[11], args[12], args[13]
    scratch = args[14] + next_slot(args) * args[15]
    add, factor, out_bf16, rounded = args[16] != 0, np.float32(as_float(args[17])), args[18] != 0, args[19] != 0
    size = 2 if out_bf16 else 4
    blocks = (rows + args[20] - 1) // args[20]
    tile = stack_f32(384)
    while True:
        task = next_task(args)
        if task >= args[1]:
            break
        t, begin = task // blocks, (task % blocks) * args[20]
        end = min(rows, begin + args[20])
        panel = scratch
        if kind == FP32:
            panel = data + t * steps * 384
        else:
            expand_f32(data, scale, zero, kind, t, steps, rounded, scratch)
        w = f32p(panel)
        width = min(48, columns - t * 48)
        via_tile = out_bf16 or width < 48
        for i in range(begin, end, FMA_ROWS):
            count = min(FMA_ROWS, end - i)
            target = out + (i * ldo + t * 48) * size
            if count == FMA_ROWS and not via_tile and not add:
                fma_tile(f32p(x + i * ldx * 4), ldx, w, steps * 2, f32p(target), ldo, _NO_SCALE)
            elif count == FMA_ROWS and not via_tile:
                fma_tile_add(f32p(x + i * ldx * 4), ldx, w, steps * 2, f32p(target), ldo, factor)
            elif count == FMA_ROWS:
                fma_tile(f32p(x + i * ldx * 4), ldx, w, steps * 2, tile, 48, _NO_SCALE)
                _finish(tile, count, width, target, ldo, out_bf16, add, factor)
            else:
                for r in range(count):
                    row = f32p(x + (i + r) * ldx * 4)
                    if via_tile:
                        fma_row(row, ldx, w, steps * 2, tile, 48, _NO_SCALE)
                        _finish(tile, 1, width, target + r * ldo * size, ldo, out_bf16, add, factor)
                    elif add:
                        fma_row_add(row, ldx, w, steps * 2, f32p(target + r * ldo * 4), ldo, factor)
                    else:
                        fma_row(row, ldx, w, steps * 2, f32p(target + r * ldo * 4), ldo, _NO_SCALE)
