"""Single rows of packed matrices in float32: the embedding look-up, and the whole matrix row by row.

Argument order of every kernel is written above it; a pointer is an integer address.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from tithe.quant.codes import (
    BF16,
    FP32,
    data_bytes,
    element_of,
    groups_of,
    number_at,
    pairs_of_group,
    round_bf16,
    scale_of_row,
)
from tithe.quant.runtime import bf16_to_f32, f32p, fma, i32p, kernel, next_task, u16p


@njit
def _write_row(data: Any, scale: Any, zero: Any, kind: Any, row: Any, steps: Any, rounded: Any, out: Any) -> None:
    """W̃[row] as float32 [K]."""
    o, panel, n = f32p(out), row // 48, row % 48
    base = data + panel * data_bytes(kind, steps)
    if kind == BF16:
        for k in range(2 * steps):
            o[k] = bf16_to_f32(u16p(base)[(k // 2 * 48 + n) * 2 + k % 2])
        return
    if kind == FP32:
        for k in range(2 * steps):
            w = f32p(base)[k * 48 + n]
            o[k] = round_bf16(w) if rounded else w
        return
    element, pairs, groups = element_of(kind), pairs_of_group(kind), groups_of(kind, steps)
    for g in range(groups):
        d, m = scale_of_row(scale, zero, kind, panel, groups, g, n)
        for k in range(2 * g * pairs, 2 * min(g * pairs + pairs, steps)):
            w = fma(number_at(element, base, k // 2, 2 * n + k % 2), d, m)
            o[k] = round_bf16(w) if rounded else w


# rows (int32 ids), steps, out (float32 [tasks, K]), kind, data, scale, zero, rounded
@kernel
def gather_rows(args: Any) -> None:
    """out[t] = W̃[ids[t]] in float32: the embedding look-up on a packed matrix."""
    ids, steps, rounded = i32p(args[3]), args[4], args[10] != 0
    while True:
        t = next_task(args)
        if t >= args[1]:
            break
        out = args[5] + t * steps * 8
        _write_row(args[7], args[8], args[9], args[6], np.int64(ids[t]), steps, rounded, out)


# steps, rows (N), out (float32 [N, K]), kind, data, scale, zero, rounded
@kernel
def expand_rows_f32(args: Any) -> None:
    """Row-major float32 W̃ [N, K]; one task per row."""
    steps, rounded = args[3], args[10] != 0
    while True:
        t = next_task(args)
        if t >= args[1]:
            break
        _write_row(args[7], args[8], args[9], args[6], t, steps, rounded, args[5] + t * steps * 8)
