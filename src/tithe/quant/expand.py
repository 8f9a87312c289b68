"""Panels of W̃ from packed panels, and the row-major and transposed expansions for gradients.

Argument order of every kernel is written above it; a pointer is an integer address, a stride counts elements.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from tithe.quant.codes import (
    BF16,
    E2M1,
    E4M3,
    FP32,
    S4,
    S6,
    S8,
    U4,
    data_bytes,
    element_of,
    groups_of,
    load_group,
    pairs_of_group,
)
from tithe.quant.runtime import (
    bits_to_f32,
    f32p,
    kernel,
    next_slot,
    next_task,
    stack_f32,
    u8p,
    u16p,
    u32p,
)
from tithe.quant.turn_tile import turn_pairs
from tithe.quant.widen_tile import FLOATS, PAIRS, ROUNDED, make_widen


def _by_element(mode: int) -> Any:
    """`run(element, base, p, end, d, m, out)`: k-pairs [p, end) of one group as `widen` writes them in this mode."""
    u4, s4, e2m1, s8, e4m3, s6 = (make_widen(element, mode) for element in (U4, S4, E2M1, S8, E4M3, S6))

    @njit
    def run(element: Any, base: Any, p: Any, end: Any, d: Any, m: Any, out: Any) -> None:
        source, target, pairs = u8p(base + data_bytes(element, p)), u32p(out), end - p
        if element == U4:
            u4(source, d, m, pairs, target)
        elif element == S4:
            s4(source, d, m, pairs, target)
        elif element == E2M1:
            e2m1(source, d, m, pairs, target)
        elif element == S8:
            s8(source, d, m, pairs, target)
        elif element == E4M3:
            e4m3(source, d, m, pairs, target)
        else:
            s6(source, d, m, pairs, target)

    return run


_pairs_of, _floats_of, _rounded_of = _by_element(PAIRS), _by_element(FLOATS), _by_element(ROUNDED)


@njit(error_model="numpy")
def expand_some_pairs(
    data: Any, scale: Any, zero: Any, kind: Any, panel: Any, steps: Any, first: Any, count: Any, out: Any
) -> None:
    """k-pairs [first, first + count) of a quantized panel as bf16 pairs [count][48]; both multiples of four."""
    d = stack_f32(96)
    m = stack_f32(96)
    element, pairs, groups = element_of(kind), pairs_of_group(kind), groups_of(kind, steps)
    base = data + panel * data_bytes(kind, steps)
    p, last, g = first, first + count, first // pairs
    while p < last:
        load_group(scale, zero, kind, panel, groups, g, d, m)
        end = min(last, g * pairs + pairs)
        _pairs_of(element, base, p, end, d, m, out + (p - first) * 192)
        p, g = end, g + 1


@njit(inline="always")
def expand_pairs(data: Any, scale: Any, zero: Any, kind: Any, panel: Any, steps: Any, out: Any) -> None:
    """Panel number `panel` of a quantized matrix as bf16 pairs [K/2][48]."""
    expand_some_pairs(data, scale, zero, kind, panel, steps, 0, steps, out)


@njit(inline="always")
def panel_pairs(data: Any, scale: Any, zero: Any, kind: Any, panel: Any, steps: Any, scratch: Any) -> Any:
    """Where bf16 pairs [K/2][48] of a panel are: in the matrix itself if it is held so, else expanded in `scratch`."""
    if kind == BF16:
        return data + panel * steps * 192
    expand_pairs(data, scale, zero, kind, panel, steps, scratch)
    return scratch


@njit(error_model="numpy")
def expand_some_f32(
    data: Any, scale: Any, zero: Any, kind: Any, panel: Any, steps: Any, first: Any, count: Any, rounded: Any, out: Any
) -> None:
    """k-pairs [first, first + count) of any panel but FP32's as float32 [2·count][48]; `rounded`: bf16 values."""
    base = data + panel * data_bytes(kind, steps)
    if kind == BF16:
        o, q = f32p(out), u32p(base + first * 192)
        for p in range(count):
            for n in range(48):
                bits = q[p * 48 + n]
                o[2 * p * 48 + n] = bits_to_f32(bits << np.uint32(16))
                o[(2 * p + 1) * 48 + n] = bits_to_f32(bits & np.uint32(0xFFFF0000))
        return
    d = stack_f32(96)
    m = stack_f32(96)
    element, pairs, groups = element_of(kind), pairs_of_group(kind), groups_of(kind, steps)
    p, last, g = first, first + count, first // pairs
    while p < last:
        load_group(scale, zero, kind, panel, groups, g, d, m)
        end = min(last, g * pairs + pairs)
        if rounded:
            _rounded_of(element, base, p, end, d, m, out + (p - first) * 384)
        else:
            _floats_of(element, base, p, end, d, m, out + (p - first) * 384)
        p, g = end, g + 1


@njit(inline="always")
def expand_f32(data: Any, scale: Any, zero: Any, kind: Any, panel: Any, steps: Any, rounded: Any, out: Any) -> None:
    """Panel number `panel` of any kind but FP32 as float32 [K][48]; `rounded` keeps W̃ at bf16 values."""
    expand_some_f32(data, scale, zero, kind, panel, steps, 0, steps, rounded, out)


@njit(inline="always")
def panel_f32(data: Any, scale: Any, zero: Any, kind: Any, panel: Any, steps: Any, rounded: Any, scratch: Any) -> Any:
    """Where a panel in float32 [K][48] is: in the matrix itself if it is held so, else expanded in `scratch`."""
    if kind == FP32:
        return data + panel * steps * 384
    expand_f32(data, scale, zero, kind, panel, steps, rounded, scratch)
    return scratch


# steps, rows (N), out (bf16 [N, K]), kind, data, scale, zero, scratch, scratch_stride
@kernel
def expand_rows_bf16(args: Any) -> None:
    """Row-major bf16 W̃ [N, K] for the input gradient; one task per panel."""
    steps, rows, kind, data, scale, zero = args[3], args[4], args[6], args[7], args[8], args[9]
    scratch = args[10] + next_slot(args) * args[11]
    while True:
        t = next_task(args)
        if t >= args[1]:
            break
        source = panel_pairs(data, scale, zero, kind, t, steps, scratch)
        pairs = u32p(source)
        width = min(48, rows - t * 48)
        o = u32p(args[5] + t * 48 * steps * 4)
        for block in range(0, steps, 16):  # 16 pairs of a row are one cache line of the output
            for n in range(width):
                for p in range(block, min(block + 16, steps)):
                    o[n * steps + p] = pairs[p * 48 + n]


# steps, rows (N), out (bf16 pairs [K/48, N/2, 48]), kind, data, scale, zero, scratch, scratch_stride
@kernel
def expand_transposed(args: Any) -> None:
    """W̃ in the panels of its transpose: pairs along N, columns along K, for products with W̃ itself.

    One task for 48 rows of W̃.
    """
    steps, rows, kind, data, scale, zero = args[3], args[4], args[6], args[7], args[8], args[9]
    scratch = args[10] + next_slot(args) * args[11]
    pairs_out = (rows + 1) // 2
    k_panels = (2 * steps + 47) // 48
    spare = 2 * steps - (k_panels - 1) * 48  # columns of the last panel
    while True:
        t = next_task(args)
        if t >= args[1]:
            break
        source = panel_pairs(data, scale, zero, kind, t, steps, scratch)
        turn_pairs(source, steps, 0, min(48, 2 * pairs_out - t * 48), args[5], t * 24, pairs_out)
        if spare < 48:
            for p in range(t * 24, min(t * 24 + 24, pairs_out)):
                o = u32p(args[5] + ((k_panels - 1) * pairs_out + p) * 192)
                for c in range(spare, 48):
                    o[c] = np.uint32(0)


# source (operand [R, C]), ld, R, C, out, is_bf16
@kernel
def pack_transposed_kernel(args: Any) -> None:
    """Panels of the transpose of a row-major array: bf16 pairs along R [C/48, R/2, 48], or float32 [C/48, R, 48].

    R may be odd (a zero row follows). One task a panel.
    """
    ld, rows, columns = args[4], args[5], args[6]
    while True:
        t = next_task(args)
        if t >= args[1]:
            break
        width = min(48, columns - t * 48)
        pairs = (rows + 1) // 2
        if args[8] != 0:
            for p in range(pairs):
                a = u16p(args[3] + (2 * p * ld + t * 48) * 2)
                b = u16p(args[3] + (min(2 * p + 1, rows - 1) * ld + t * 48) * 2)
                o = u32p(args[7] + ((t * pairs + p) * 48) * 4)
                if 2 * p + 1 < rows:
                    for c in range(width):
                        o[c] = np.uint32(a[c]) | (np.uint32(b[c]) << np.uint32(16))
                else:
                    for c in range(width):
                        o[c] = np.uint32(a[c])
                for c in range(width, 48):
                    o[c] = np.uint32(0)
            continue
        for r in range(2 * pairs):
            of = f32p(args[7] + ((t * 2 * pairs + r) * 48) * 4)
            x = f32p(args[3] + (min(r, rows - 1) * ld + t * 48) * 4)
            for c in range(48):
                of[c] = x[c] if r < rows and c < width else np.float32(0.0)
