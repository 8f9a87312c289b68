"""Single rows of packed matrices in float32: the embedding look-up, and the whole matrix row by row.

Argument order of every kernel is written above it; a pointer is an integer address.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from tithe.quant.codes import BF16, FP32, INT4, round_bf16
from tithe.quant.runtime import bf16_to_f32, f16_to_f32, f32p, fma, i8p, i32p, kernel, next_task, u8p, u16p


@njit(inline="always")
def _integer_weight(kind: Any, data: Any, scale: Any, zero: Any, steps: Any, row: Any, k: Any) -> Any:
    """W̃[row, k] of an INT4 or INT8 matrix before bf16 rounding."""
    panel, n, p, odd = row // 48, row % 48, k // 2, k % 2
    group = ((panel * (steps // 16) + p // 16) * 48 + n) * 2
    d = f16_to_f32(u16p(scale + group)[0])
    if kind == INT4:
        b = np.int32(u8p(data)[(panel * steps + p) * 48 + (n // 16) * 16 + (n % 8) * 2 + odd])
        q = b & np.int32(15) if n % 16 < 8 else b >> np.int32(4)
        return fma(np.float32(q), d, f16_to_f32(u16p(zero + group)[0]))
    return np.float32(i8p(data)[((panel * steps + p) * 48 + n) * 2 + odd]) * d


@njit(inline="always")
def _weight(kind: Any, data: Any, scale: Any, zero: Any, steps: Any, row: Any, k: Any) -> Any:
    """W̃[row, k] before bf16 rounding."""
    panel, n, p, odd = row // 48, row % 48, k // 2, k % 2
    if kind == BF16:
        return bf16_to_f32(u16p(data)[((panel * steps + p) * 48 + n) * 2 + odd])
    if kind == FP32:
        return f32p(data)[(panel * steps * 2 + k) * 48 + n]
    return _integer_weight(kind, data, scale, zero, steps, row, k)


# rows (int32 ids), steps, out (float32 [tasks, K]), kind, data, scale, zero, rounded
@kernel
def gather_rows(args: Any) -> None:
    """out[t] = W̃[ids[t]] in float32: the embedding look-up on a packed matrix."""
    ids, steps, kind, data, scale, zero = i32p(args[3]), args[4], args[6], args[7], args[8], args[9]
    while True:
        t = next_task(args)
        if t >= args[1]:
            break
        o = f32p(args[5] + t * steps * 8)
        for k in range(steps * 2):
            w = _weight(kind, data, scale, zero, steps, np.int64(ids[t]), k)
            o[k] = round_bf16(w) if args[10] != 0 else w


# steps, rows (N), out (float32 [N, K]), kind, data, scale, zero, rounded
@kernel
def expand_rows_f32(args: Any) -> None:
    """Row-major float32 W̃ [N, K]; one task per row."""
    steps, kind, data, scale, zero = args[3], args[6], args[7], args[8], args[9]
    while True:
        t = next_task(args)
        if t >= args[1]:
            break
        o = f32p(args[5] + t * steps * 8)
        for k in range(steps * 2):
            w = _weight(kind, data, scale, zero, steps, t, k)
            o[k] = round_bf16(w) if args[10] != 0 else w
