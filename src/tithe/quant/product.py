"""The product of rows with a packed matrix, and the small products that ride on it.

Argument order of every kernel is written above it; a pointer is an integer address, a stride counts elements.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from tithe.quant.codes import data_bytes, scale_bytes
from tithe.quant.expand import panel_f32, panel_pairs
from tithe.quant.rows_tile import DOT_ROWS, TILE_FLOATS, begin_tiles, dot_block, dot_rows, fma_rows
from tithe.quant.runtime import as_float, carrier, i64p, kernel, next_slot, next_task, prefetch, stack_f32


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
        w = rider[2] + (panel - rider[7]) * rider[3] * 192
        scale = np.float32(as_float(rider[4]))
        for r in range(begin, end, DOT_ROWS):
            rows, target = min(DOT_ROWS, end - r), out + (r - first) * ldo * 4
            dot_block(rider[0] + r * rider[1] * 4, rider[1], rows, w, rider[3], target, ldo, True, scale)


# x, ldx (pairs), rows, steps (K/2), out, ldo, columns (N), kind, data, scale, zero, scratch, scratch_stride (bytes),
# add, factor, out_bf16, rounded, rows per task, riders, number of riders
@carrier
def matmul_dot(args: Any) -> None:
    """out = x·W̃ᵀ (or out += factor·x·W̃ᵀ), bf16 operands, float32 accumulation; a task: panel × block of rows."""
    x, ldx, rows, steps, out, ldo, columns = args[3], args[4], args[5], args[6], args[7], args[8], args[9]
    kind, data, scale, zero = args[10], args[11], args[12], args[13]
    scratch = args[14] + next_slot(args) * args[15]
    write = (args[18], args[16] != 0, np.float32(as_float(args[17])))
    size = 2 if args[18] != 0 else 4
    blocks = (rows + args[20] - 1) // args[20]
    tile = stack_f32(TILE_FLOATS)
    begin_tiles()
    while True:
        task = next_task(args)
        if task >= args[1]:
            break
        t, begin = task // blocks, (task % blocks) * args[20]
        end = min(rows, begin + args[20])
        panel = panel_pairs(data, scale, zero, kind, t, steps, scratch)
        span = (0, min(48, columns - t * 48))
        ahead_at, share = ahead(kind, data, scale, zero, t, steps, columns, end - begin)
        for i in range(begin, end, DOT_ROWS):
            prefetch(ahead_at, share)
            ahead_at += share
            last = min(end, i + DOT_ROWS)
            dot_rows(x, ldx, i, last, panel, steps, out + t * 48 * size, ldo, span, write, tile)
            ride(args[21], args[22], t, i, last - i, out + (i * ldo + t * 48) * size, ldo)


# the same arguments; x and ldx count float32; slot 19: W̃ rounded to bf16
@kernel
def matmul_fma(args: Any) -> None:
    """out = x·W̃ᵀ (or out += factor·x·W̃ᵀ) with float32 operands; a task: panel × block of rows."""
    x, ldx, rows, steps, out, ldo, columns = args[3], args[4], args[5], args[6], args[7], args[8], args[9]
    kind, data, scale, zero = args[10], args[11], args[12], args[13]
    scratch = args[14] + next_slot(args) * args[15]
    rounded, write = args[19] != 0, (args[18], args[16] != 0, np.float32(as_float(args[17])))
    size = 2 if args[18] != 0 else 4
    blocks = (rows + args[20] - 1) // args[20]
    tile = stack_f32(TILE_FLOATS)
    while True:
        task = next_task(args)
        if task >= args[1]:
            break
        t, begin = task // blocks, (task % blocks) * args[20]
        end = min(rows, begin + args[20])
        panel = panel_f32(data, scale, zero, kind, t, steps, rounded, scratch)
        span = (0, min(48, columns - t * 48))
        fma_rows(x, ldx, begin, end, panel, steps * 2, out + t * 48 * size, ldo, span, write, tile)
