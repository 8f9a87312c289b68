"""Element and scale codes inside kernels: single numbers, and d and m of a group.

The layouts, and W̃ = fma(q, d, m), are written in `tithe.quant.kinds`. A kernel is told `kind`, one word (`Kind.word`),
and the addresses of data, scales and zeros. Every scale code is one small function of a row here; the loop
over a panel's 48 rows is made from it, so that a row alone and a row in its panel have the same bits. Whole panels of
elements: `tithe.quant.widen_tile`.
"""

# ruff: noqa: ARG001 - all functions of a table take the same arguments
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from tithe.quant.runtime import (
    bf16_to_f32,
    bits_to_f32,
    f16_to_f32,
    f32_to_bf16,
    f32p,
    i8p,
    u8p,
    u16p,
)

U4, S8, BF16, FP32, S4, E2M1, E4M3, S6 = range(8)
"""Element codes; those of dense storage, 2 and 3, are also the whole word of their kind."""
NO_SCALE, F16, F16_ZERO, BF16_SCALE, E8M0, E4M3_GLOBAL, F32_BLOCK, F16_INT_ZERO, Q4_K, Q6_K = range(10)
"""Scale codes."""
BLOCK_ROWS = 128
"""Rows that share one scale of F32_BLOCK."""
_NO_ZERO = np.float32(0.0)


@njit(inline="always")
def element_of(kind: Any) -> Any:
    """The element code in a kind's word."""
    return kind & 255


@njit(inline="always")
def pairs_of_group(kind: Any) -> Any:
    """The k-pairs that share d and m."""
    return (kind >> 16) & 0xFFFFFF


@njit(inline="always", error_model="numpy")
def groups_of(kind: Any, steps: Any) -> Any:
    """Groups in a row of `steps` k-pairs; the last may be short. Not for dense kinds."""
    pairs = pairs_of_group(kind)
    return (steps + pairs - 1) // pairs


@njit(inline="always")
def data_bytes(kind: Any, steps: Any) -> Any:
    """Bytes of a panel's elements over `steps` k-pairs; `steps` is even for six bits."""
    element = element_of(kind)
    if element == BF16:
        return steps * 192
    if element == FP32:
        return steps * 384
    if element == S6:
        return steps * 72
    return steps * 96 if element in (S8, E4M3) else steps * 48


@njit(inline="always")
def scale_bytes(kind: Any, steps: Any) -> Any:
    """Bytes of a panel's own scales, and of its own zeros."""
    scales = (kind >> 8) & 255
    if scales in (NO_SCALE, F32_BLOCK):
        return 0, 0
    groups = groups_of(kind, steps)
    if scales == Q4_K:
        return groups * 96, 0
    if scales == Q6_K:
        return groups * 54, 0
    if scales in (E8M0, E4M3_GLOBAL):
        return groups * 48, 0
    return groups * 96, (groups * 96 if scales == F16_ZERO else (groups * 24 if scales == F16_INT_ZERO else 0))


@njit(inline="always")
def round_bf16(x: Any) -> Any:
    """A float32 rounded to what bf16 can hold."""
    return bf16_to_f32(f32_to_bf16(x))


# ---------------------------------------------------------------- numbers: bits to float32


@njit
def _u4(code: Any) -> Any:
    return np.float32(code)


@njit
def _s4(code: Any) -> Any:
    return np.float32(code - np.int32(8))


@njit
def _e2m1(code: Any) -> Any:
    """As a half with the exponent 14 too low, where halves of E2M1's subnormal are subnormal, too."""
    half = ((code & np.int32(7)) << np.int32(9)) | ((code & np.int32(8)) << np.int32(12))
    return f16_to_f32(np.uint16(half)) * np.float32(16384.0)


@njit
def _s8(code: Any) -> Any:
    return np.float32(np.int8(code))


@njit
def _e4m3(code: Any) -> Any:
    """As a half with the exponent 8 too low."""
    bits = np.int32(code)
    half = ((bits & np.int32(127)) << np.int32(7)) | ((bits & np.int32(128)) << np.int32(8))
    return f16_to_f32(np.uint16(half)) * np.float32(256.0)


@njit
def _s6(code: Any) -> Any:
    return np.float32(code - np.int32(32))


@njit(inline="always")
def number_at(element: Any, data: Any, p: Any, i: Any) -> Any:
    """q of row n at k = 2p + odd of the panel at `data`, i = 2n + odd."""
    if element == S8:
        return _s8(u8p(data + p * 96)[i])
    if element == E4M3:
        return _e4m3(u8p(data + p * 96)[i])
    h, b = i // 16, i % 16
    if element == S6:
        block, at = data + p // 2 * 144, p % 2 * 6 + h
        nibble = (np.int32(u8p(block + p % 2 * 48)[h // 2 * 16 + b]) >> np.int32(h % 2 * 4)) & np.int32(15)
        top = (np.int32(u8p(block + 96)[at // 4 * 16 + b]) >> np.int32(at % 4 * 2)) & np.int32(3)
        return _s6(nibble | (top << np.int32(4)))
    code = (np.int32(u8p(data + p * 48)[h // 2 * 16 + b]) >> np.int32(h % 2 * 4)) & np.int32(15)
    if element == U4:
        return _u4(code)
    return _s4(code) if element == S4 else _e2m1(code)


# ---------------------------------------------------------------- scales: (d, m) of row n in group g of a panel


@njit
def _f16(scale: Any, zero: Any, kind: Any, panel: Any, groups: Any, g: Any, n: Any) -> Any:
    return f16_to_f32(u16p(scale)[(panel * groups + g) * 48 + n]), _NO_ZERO


@njit
def _f16_zero(scale: Any, zero: Any, kind: Any, panel: Any, groups: Any, g: Any, n: Any) -> Any:
    at = (panel * groups + g) * 48 + n
    return f16_to_f32(u16p(scale)[at]), f16_to_f32(u16p(zero)[at])


@njit
def _bf16(scale: Any, zero: Any, kind: Any, panel: Any, groups: Any, g: Any, n: Any) -> Any:
    return bf16_to_f32(u16p(scale)[(panel * groups + g) * 48 + n]), _NO_ZERO


@njit
def _e8m0(scale: Any, zero: Any, kind: Any, panel: Any, groups: Any, g: Any, n: Any) -> Any:
    code = np.uint32(u8p(scale)[(panel * groups + g) * 48 + n])
    return bits_to_f32(code << np.uint32(23)), _NO_ZERO


@njit
def _e4m3_global(scale: Any, zero: Any, kind: Any, panel: Any, groups: Any, g: Any, n: Any) -> Any:
    return _e4m3(u8p(scale)[(panel * groups + g) * 48 + n]) * f32p(zero)[0], _NO_ZERO


@njit
def _f32_block(scale: Any, zero: Any, kind: Any, panel: Any, groups: Any, g: Any, n: Any) -> Any:
    block = ((panel + (kind >> 40)) * 48 + n) // BLOCK_ROWS
    return f32p(scale)[block * groups + g], _NO_ZERO


@njit
def _f16_int_zero(scale: Any, zero: Any, kind: Any, panel: Any, groups: Any, g: Any, n: Any) -> Any:
    at = panel * groups + g
    code = (np.int32(u8p(zero + at * 24)[n % 24]) >> np.int32(n // 24 * 4)) & np.int32(15)
    d = f16_to_f32(u16p(scale)[at * 48 + n])
    return d, -(d * np.float32(code))


@njit
def _q4_k(scale: Any, zero: Any, kind: Any, panel: Any, groups: Any, g: Any, n: Any) -> Any:
    """As `kquants`: sub-blocks 4..7 keep their two high bits in the bytes of 0..3."""
    base = scale + (panel * (groups // 8) + g // 8) * 768
    packed, k, early = u8p(base + 192), g % 4, g % 8 < 4
    a, b, c = np.int32(packed[k * 48 + n]), np.int32(packed[(k + 4) * 48 + n]), np.int32(packed[(k + 8) * 48 + n])
    six, low, two, four = np.int32(63), np.int32(15), np.int32(6), np.int32(4)
    s = a & six if early else (c & low) | ((a >> two) << four)
    t = b & six if early else (c >> four) | ((b >> two) << four)
    return f16_to_f32(u16p(base)[n]) * np.float32(s), -(f16_to_f32(u16p(base + 96)[n]) * np.float32(t))


@njit
def _q6_k(scale: Any, zero: Any, kind: Any, panel: Any, groups: Any, g: Any, n: Any) -> Any:
    base = scale + (panel * (groups // 16) + g // 16) * 864
    s = np.float32(i8p(base)[g % 16 * 48 + n])
    return f16_to_f32(u16p(base + 768)[n]) * s, _NO_ZERO


def _panel_of(at: Callable[..., Any]) -> Any:
    """d and m of a panel's 48 rows, each twice: once for either k of a pair."""

    @njit(inline="always")
    def fill(scale: Any, zero: Any, kind: Any, panel: Any, groups: Any, g: Any, d: Any, m: Any) -> None:
        for n in range(48):
            value = at(scale, zero, kind, panel, groups, g, n)[0]
            d[2 * n] = value
            d[2 * n + 1] = value
        for n in range(48):
            value = at(scale, zero, kind, panel, groups, g, n)[1]
            m[2 * n] = value
            m[2 * n + 1] = value

    return fill


_fill_f16, _fill_f16_zero, _fill_bf16 = _panel_of(_f16), _panel_of(_f16_zero), _panel_of(_bf16)
_fill_e8m0, _fill_e4m3, _fill_block = _panel_of(_e8m0), _panel_of(_e4m3_global), _panel_of(_f32_block)
_fill_int_zero, _fill_q4_k, _fill_q6_k = _panel_of(_f16_int_zero), _panel_of(_q4_k), _panel_of(_q6_k)


@njit
def load_group(scale: Any, zero: Any, kind: Any, panel: Any, groups: Any, g: Any, d: Any, m: Any) -> None:
    """d[96] and m[96] of group g of a panel, index 2n + odd."""
    scales = (kind >> 8) & 255
    if scales == F16_ZERO:
        _fill_f16_zero(scale, zero, kind, panel, groups, g, d, m)
    elif scales == F16:
        _fill_f16(scale, zero, kind, panel, groups, g, d, m)
    elif scales == BF16_SCALE:
        _fill_bf16(scale, zero, kind, panel, groups, g, d, m)
    elif scales == E8M0:
        _fill_e8m0(scale, zero, kind, panel, groups, g, d, m)
    elif scales == E4M3_GLOBAL:
        _fill_e4m3(scale, zero, kind, panel, groups, g, d, m)
    elif scales == F32_BLOCK:
        _fill_block(scale, zero, kind, panel, groups, g, d, m)
    elif scales == F16_INT_ZERO:
        _fill_int_zero(scale, zero, kind, panel, groups, g, d, m)
    elif scales == Q4_K:
        _fill_q4_k(scale, zero, kind, panel, groups, g, d, m)
    else:
        _fill_q6_k(scale, zero, kind, panel, groups, g, d, m)


@njit
def scale_of_row(  # noqa: PLR0911 - one for each code
    scale: Any, zero: Any, kind: Any, panel: Any, groups: Any, g: Any, n: Any
) -> Any:
    """(d, m) of row n of a panel in group g."""
    scales = (kind >> 8) & 255
    if scales == F16_ZERO:
        return _f16_zero(scale, zero, kind, panel, groups, g, n)
    if scales == F16:
        return _f16(scale, zero, kind, panel, groups, g, n)
    if scales == BF16_SCALE:
        return _bf16(scale, zero, kind, panel, groups, g, n)
    if scales == E8M0:
        return _e8m0(scale, zero, kind, panel, groups, g, n)
    if scales == E4M3_GLOBAL:
        return _e4m3_global(scale, zero, kind, panel, groups, g, n)
    if scales == F32_BLOCK:
        return _f32_block(scale, zero, kind, panel, groups, g, n)
    if scales == F16_INT_ZERO:
        return _f16_int_zero(scale, zero, kind, panel, groups, g, n)
    if scales == Q4_K:
        return _q4_k(scale, zero, kind, panel, groups, g, n)
    return _q6_k(scale, zero, kind, panel, groups, g, n)
