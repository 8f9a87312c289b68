"""Kernels of grouped gradients: input gradients dy·W̃ and weight gradients Σ a·x of every group, in one launch each.

Tables and groups are those of `tithe.quant.grouped_kernels`, output modes those of `tithe.quant.rows_tile`. No global
scratch: a task turns the columns of W̃ that it needs, so that the packed matrix is read once and its transpose is never
held.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from tithe.quant.codes import BF16, FP32, round_bf16
from tithe.quant.expand import expand_some_f32, expand_some_pairs
from tithe.quant.grouped_kernels import columns_of
from tithe.quant.rows_tile import TILE_FLOATS, begin_tiles, dot_rows, fma_rows
from tithe.quant.runtime import (
    as_float,
    f32_to_bf16,
    f32p,
    i32p,
    i64p,
    kernel,
    next_slot,
    next_task,
    operand,
    stack_f32,
    u16p,
    u32p,
)
from tithe.quant.turn_tile import turn_pairs

BLOCK_PAIRS = 48
"""k-pairs that a task of a transposed product takes: 96 columns are two whole panels of 48."""
OUTER_ROWS = 256
"""Rows that a weight gradient sums in registers before it adds them to memory."""


@njit
def _turn_f32(w: Any, count: Any, left: Any, right: Any, out: Any, at: Any, rows: Any) -> None:
    """The same in float32: [k][48 rows] into [k / 48][N][48 k], `at` counts rows."""
    for q in range((count + 47) // 48):
        width = min(48, count - q * 48)
        for n in range(left, right):
            o = f32p(out + ((q * rows + at + n) * 48) * 4)
            for c in range(width):
                o[c] = w[(q * 48 + c) * 48 + n]


# dy, ldy (pairs), steps (K/2), out, ldo, N (even), table, active, begin, end, blocks of a group, scratch,
# scratch_stride, add, factor, mode, rounded
@kernel
def grouped_transposed_dot(args: Any) -> None:
    """out = dy·W̃ (or out += factor·dy·W̃) of every group, bf16 operands; a task: active group × 96 columns of W̃.

    A task turns its columns of W̃ around in scratch: two panels of N/2 pairs; the packed matrix is read once.
    """
    x, ldx, steps, out, ldo, rows, blocks = args[3], args[4], args[5], args[6], args[7], args[8], args[13]
    active, begin, end = i32p(args[10]), i64p(args[11]), i64p(args[12])
    scratch = args[14] + next_slot(args) * args[15]
    mode = args[18]
    write = (mode, args[16] != 0, np.float32(as_float(args[17])))
    turned = scratch + BLOCK_PAIRS * 192
    tile = stack_f32(TILE_FLOATS)
    begin_tiles()
    while True:
        task = next_task(args)
        if task >= args[1]:
            break
        e, pair = np.int64(active[task // blocks]), task % blocks * BLOCK_PAIRS
        if end[e] <= begin[e]:
            continue
        source = i64p(args[9] + e * 40)
        kind, first = source[0], source[4]
        count = min(BLOCK_PAIRS, steps - pair)
        for t in range((first + rows + 47) // 48):
            data = scratch
            if kind == BF16:
                data = source[1] + (t * steps + pair) * 192
            else:
                expand_some_pairs(source[1], source[2], source[3], kind, t, steps, pair, count, scratch)
            left, right = columns_of(t, first, rows)
            turn_pairs(data, count, left, right, turned, (t * 48 - first) // 2, rows // 2)
        for q in range((count + 23) // 24):
            column = 2 * pair + q * 48
            span = (0, min(48, 2 * steps - column))
            target = out + column * (2 if mode == 1 else 4)
            panel = turned + q * rows * 96
            dot_rows(x, ldx, begin[e], end[e], panel, rows // 2, target, ldo, span, write, tile)


# the same arguments; dy and ldy count float32
@kernel
def grouped_transposed_fma(args: Any) -> None:
    """The same with float32 operands."""
    x, ldx, steps, out, ldo, rows, blocks = args[3], args[4], args[5], args[6], args[7], args[8], args[13]
    active, begin, end = i32p(args[10]), i64p(args[11]), i64p(args[12])
    scratch = args[14] + next_slot(args) * args[15]
    mode, rounded = args[18], args[19] != 0
    write = (mode, args[16] != 0, np.float32(as_float(args[17])))
    turned = scratch + BLOCK_PAIRS * 384
    tile = stack_f32(TILE_FLOATS)
    while True:
        task = next_task(args)
        if task >= args[1]:
            break
        e, pair = np.int64(active[task // blocks]), task % blocks * BLOCK_PAIRS
        if end[e] <= begin[e]:
            continue
        source = i64p(args[9] + e * 40)
        kind, first = source[0], source[4]
        count = min(BLOCK_PAIRS, steps - pair)
        for t in range((first + rows + 47) // 48):
            data = scratch
            if kind == FP32:
                data = source[1] + (t * steps + pair) * 384
            else:
                expand_some_f32(source[1], source[2], source[3], kind, t, steps, pair, count, rounded, scratch)
            left, right = columns_of(t, first, rows)
            _turn_f32(f32p(data), 2 * count, left, right, turned, t * 48 - first, rows)
        for q in range((2 * count + 47) // 48):
            column = 2 * pair + q * 48
            span = (0, min(48, 2 * steps - column))
            target = out + column * (2 if mode == 1 else 4)
            panel = turned + q * rows * 192
            fma_rows(x, ldx, begin[e], end[e], panel, rows, target, ldo, span, write, tile)


# ---------------------------------------------------------------- sums over the rows of a group (weight gradients)


# source [P, r] operand, ld, r, weights (float32 [P]) or 0, out [r, lda], lda, active, begin, end, start of a group's
# columns (int64 [E]), mode of source and out
@kernel
def turn_rows(args: Any) -> None:
    """out[i, start[e] + p] = weight·source[begin[e] + p, i]: small operands by column; a zero follows an odd group."""
    ld, rank, weights, lda, mode = args[4], args[5], args[6], args[8], args[13]
    active, begin, end, start = i32p(args[9]), i64p(args[10]), i64p(args[11]), i64p(args[12])
    while True:
        task = next_task(args)
        if task >= args[1]:
            break
        e = np.int64(active[task])
        for p in range(begin[e], end[e] + (end[e] - begin[e]) % 2):
            column = start[e] + p - begin[e]
            weight = f32p(weights)[p] if weights != 0 and p < end[e] else np.float32(1.0)
            for i in range(rank):
                value = np.float32(0.0)
                if p < end[e]:
                    at = p * ld + i
                    value = operand(args[3], at, mode == 1) * weight
                if mode == 1:
                    u16p(args[7])[i * lda + column] = f32_to_bf16(value)
                else:
                    f32p(args[7])[i * lda + column] = round_bf16(value) if mode == 2 else value


# a [r, lda] by column, lda (pairs), r, start (int64 [E]), x [P, W], ldx (elements), W, out, bytes from one group's out
# to the next, active, begin, end, scratch, scratch_stride, factor
@kernel
def grouped_outer_dot(args: Any) -> None:
    """out[e] [r, W] += factor·Σ_p a[:, p]·x[p, :] over the rows of group e, bf16; a task: active group × 48 columns."""
    lda, rank, ldx, width = args[4], args[5], args[8], args[9]
    start, active, begin, end = i64p(args[6]), i32p(args[12]), i64p(args[13]), i64p(args[14])
    scratch = args[15] + next_slot(args) * args[16]
    write = (0, True, np.float32(as_float(args[17])))
    panels = (width + 47) // 48
    tile = stack_f32(TILE_FLOATS)
    begin_tiles()
    while True:
        task = next_task(args)
        if task >= args[1]:
            break
        e, t = np.int64(active[task // panels]), task % panels
        columns = min(48, width - t * 48)
        target = args[10] + e * args[11] + t * 192
        for row in range(begin[e], end[e], OUTER_ROWS):
            count = min(OUTER_ROWS, end[e] - row)
            for p in range((count + 1) // 2):
                a = u16p(args[7] + ((row + 2 * p) * ldx + t * 48) * 2)
                b = u16p(args[7] + ((row + min(2 * p + 1, count - 1)) * ldx + t * 48) * 2)
                o = u32p(scratch + p * 192)
                keep = np.uint32(0xFFFF0000) if 2 * p + 1 < count else np.uint32(0)
                for c in range(columns):
                    o[c] = np.uint32(a[c]) | ((np.uint32(b[c]) << np.uint32(16)) & keep)
            x = args[3] + (start[e] + row - begin[e]) * 2
            dot_rows(x, lda, 0, rank, scratch, (count + 1) // 2, target, width, (0, columns), write, tile)


# the same arguments; lda counts float32
@kernel
def grouped_outer_fma(args: Any) -> None:
    """The same with float32 operands."""
    lda, rank, ldx, width = args[4], args[5], args[8], args[9]
    start, active, begin, end = i64p(args[6]), i32p(args[12]), i64p(args[13]), i64p(args[14])
    scratch = args[15] + next_slot(args) * args[16]
    write = (0, True, np.float32(as_float(args[17])))
    panels = (width + 47) // 48
    tile = stack_f32(TILE_FLOATS)
    while True:
        task = next_task(args)
        if task >= args[1]:
            break
        e, t = np.int64(active[task // panels]), task % panels
        columns = min(48, width - t * 48)
        target = args[10] + e * args[11] + t * 192
        for row in range(begin[e], end[e], OUTER_ROWS):
            count = min(OUTER_ROWS, end[e] - row)
            for p in range(count):
                a = f32p(args[7] + ((row + p) * ldx + t * 48) * 4)
                o = f32p(scratch + p * 192)
                for c in range(columns):
                    o[c] = a[c]
            x = args[3] + (start[e] + row - begin[e]) * 4
            fma_rows(x, lda, 0, rank, scratch, count, target, width, (0, columns), write, tile)
