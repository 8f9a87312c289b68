"""Storage kinds inside a kernel: scales of a group, weights of a k-pair. Layouts are in `tithe.quant.matrix`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from tithe.quant.runtime import bf16_to_f32, f16_to_f32, f32_to_bf16, fma, i8p, u8p, u16p

INT4, INT8, BF16, FP32 = 0, 1, 2, 3
GROUP = 32
_NO_ZERO = np.float32(0.0)


@njit(inline="always")
def round_bf16(x: Any) -> Any:
    """A float32 rounded to what bf16 can hold."""
    return bf16_to_f32(f32_to_bf16(x))


@njit
def _load_scales(source: Any, g: Any, d: Any) -> None:
    """Group g's 48 half-precision numbers as float32, each twice: once for either k of a pair."""
    for n in range(48):
        value = f16_to_f32(source[g * 48 + n])
        d[2 * n] = value
        d[2 * n + 1] = value


@njit
def load_group(scale: Any, zero: Any, kind: Any, panel: Any, groups: Any, g: Any, d: Any, m: Any) -> None:
    """Scales and zero points of one group of a panel."""
    _load_scales(u16p(scale + panel * groups * 96), g, d)
    if kind == INT4:
        _load_scales(u16p(zero + panel * groups * 96), g, m)
    else:
        for i in range(96):
            m[i] = _NO_ZERO


@njit
def weights_of_pair(kind: Any, source: Any, d: Any, m: Any, w: Any) -> None:
    """w[2n + odd] = q·d + m in float32 for the 48 columns n of one k-pair."""
    if kind == INT4:
        q4 = u8p(source)
        for v in range(3):
            for i in range(16):
                b = np.int32(q4[v * 16 + i])
                w[v * 32 + i] = fma(np.float32(b & np.int32(15)), d[v * 32 + i], m[v * 32 + i])
                w[v * 32 + 16 + i] = fma(np.float32(b >> np.int32(4)), d[v * 32 + 16 + i], m[v * 32 + 16 + i])
    else:
        q8 = i8p(source)
        for i in range(96):
            w[i] = fma(np.float32(q8[i]), d[i], m[i])


@njit(inline="always")
def pair_bytes(kind: Any) -> Any:
    """Bytes of 48 rows at two adjacent k."""
    return 48 if kind == INT4 else 96
