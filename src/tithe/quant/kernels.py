"""Kernels over packed matrices: product, row gather, row-major expansion. Layouts are defined in `tithe.quant.matrix`.

Argument order of every kernel is written above it; a pointer is an integer address, a stride counts elements.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from tithe.quant.runtime import (
    HAS_BF16_DOT,
    as_float,
    bf16_to_f32,
    bits_to_f32,
    f16_to_f32,
    f32_to_bf16,
    f32p,
    fma,
    i8p,
    i32p,
    i64p,
    kernel,
    next_slot,
    next_task,
    prefetch,
    stack_f32,
    u8p,
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
    expand_bytes,
    expand_nibbles,
    fma_row,
    fma_row_add,
    fma_tile,
    fma_tile_add,
)

INT4, INT8, BF16, FP32 = 0, 1, 2, 3
GROUP = 32
_NO_SCALE = np.float32(0.0)


@njit(inline="always")
def _round_bf16(x: Any) -> Any:
    return bf16_to_f32(f32_to_bf16(x))


@njit
def _load_scales(source: Any, g: Any, d: Any) -> None:
    """Group g's 48 half-precision numbers as float32, each twice: once for either k of a pair."""
    for n in range(48):
        value = f16_to_f32(source[g * 48 + n])
        d[2 * n] = value
        d[2 * n + 1] = value


@njit
def _load_group(scale: Any, zero: Any, kind: Any, panel: Any, groups: Any, g: Any, d: Any, m: Any) -> None:
    """Scales and zero points of one group of a panel."""
    _load_scales(u16p(scale + panel * groups * 96), g, d)
    if kind == INT4:
        _load_scales(u16p(zero + panel * groups * 96), g, m)
    else:
        for i in range(96):
            m[i] = _NO_SCALE


@njit
def _weights_of_pair(kind: Any, source: Any, d: Any, m: Any, w: Any) -> None:
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
def _pair_bytes(kind: Any) -> Any:
    return 48 if kind == INT4 else 96


def _pairs_by_instruction(data: Any, scale: Any, zero: Any, kind: Any, panel: Any, steps: Any, out: Any) -> None:
    """Panel number `panel` of an INT4 or INT8 matrix as bf16 pairs [K/2][48]."""
    d = stack_f32(96)
    m = stack_f32(96)
    for g in range(steps // 16):
        _load_group(scale, zero, kind, panel, steps // 16, g, d, m)
        for p in range(g * 16, g * 16 + 16):
            source = data + (panel * steps + p) * _pair_bytes(kind)
            if kind == INT4:
                expand_nibbles(u8p(source), d, m, u32p(out + p * 192))
            else:
                expand_bytes(i8p(source), d, m, u32p(out + p * 192))


def _pairs_by_rounding(data: Any, scale: Any, zero: Any, kind: Any, panel: Any, steps: Any, out: Any) -> None:
    """The same without the narrowing instruction."""
    d = stack_f32(96)
    m = stack_f32(96)
    w = stack_f32(96)
    for g in range(steps // 16):
        _load_group(scale, zero, kind, panel, steps // 16, g, d, m)
        for p in range(g * 16, g * 16 + 16):
            _weights_of_pair(kind, data + (panel * steps + p) * _pair_bytes(kind), d, m, w)
            o = u32p(out + p * 192)
            for n in range(48):
                low, high = np.uint32(f32_to_bf16(w[2 * n])), np.uint32(f32_to_bf16(w[2 * n + 1]))
                o[n] = low | (high << np.uint32(16))


_expand_pairs = njit(_pairs_by_instruction if HAS_BF16_DOT else _pairs_by_rounding)


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


@njit
def _expand_f32(kind: Any, data: Any, scale: Any, zero: Any, panel: Any, steps: Any, rounded: Any, out: Any) -> None:
    """Panel number `panel` of any matrix as float32 [K][48]; `rounded` keeps W̃ at bf16 values."""
    o = f32p(out)
    groups = steps // 16
    if kind == BF16:
        pairs = u32p(data + panel * steps * 192)
        for p in range(steps):
            for n in range(48):
                bits = pairs[p * 48 + n]
                o[2 * p * 48 + n] = bits_to_f32(bits << np.uint32(16))
                o[(2 * p + 1) * 48 + n] = bits_to_f32(bits & np.uint32(0xFFFF0000))
        return
    d = stack_f32(96)
    m = stack_f32(96)
    w = stack_f32(96)
    for g in range(groups):
        _load_group(scale, zero, kind, panel, groups, g, d, m)
        for p in range(g * 16, g * 16 + 16):
            _weights_of_pair(kind, data + (panel * steps + p) * _pair_bytes(kind), d, m, w)
            for n in range(48):
                o[2 * p * 48 + n] = _round_bf16(w[2 * n]) if rounded else w[2 * n]
                o[(2 * p + 1) * 48 + n] = _round_bf16(w[2 * n + 1]) if rounded else w[2 * n + 1]


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
def _ahead(kind: Any, data: Any, scale: Any, zero: Any, panel: Any, steps: Any, columns: Any, rows: Any) -> Any:
    """Where the data begin of the panel that is likely this thread's next, and how many bytes of it to ask for with
    each tile of rows; asks for its scales at once. At decode sizes a panel is too short for hardware to run ahead.
    """
    following = panel + 2
    if following * 48 >= columns:
        return data, 0
    size = steps * (192 if kind == BF16 else (48 if kind == INT4 else 96))
    if kind != BF16:
        prefetch(scale + following * steps * 6, steps * 6)
    if kind == INT4:
        prefetch(zero + following * steps * 6, steps * 6)
    tiles = max(1, (rows + DOT_ROWS - 1) // DOT_ROWS)
    share = (size // tiles + 63) // 64 * 64
    return data + following * size, share


@njit
def _ride(riders: Any, n: Any, panel: Any, first: Any, count: Any, out: Any, ldo: Any) -> None:
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
@kernel
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
            _expand_pairs(data, scale, zero, kind, t, steps, scratch)
        else:
            panel = data + t * steps * 192
        w = u32p(panel)
        width = min(48, columns - t * 48)
        via_tile = out_bf16 or width < 48
        ahead, share = _ahead(kind, data, scale, zero, t, steps, columns, end - begin)
        for i in range(begin, end, DOT_ROWS):
            prefetch(ahead, share)
            ahead += share
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
            _ride(args[21], args[22], t, i, count, target, ldo)


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
            _expand_f32(kind, data, scale, zero, t, steps, rounded, scratch)
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
            o[k] = _round_bf16(w) if args[10] != 0 else w


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
        source = scratch
        if kind != BF16:
            _expand_pairs(data, scale, zero, kind, t, steps, scratch)
        else:
            source = data + t * steps * 192
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
    low, high = np.uint32(0xFFFF), np.uint32(0xFFFF0000)
    while True:
        t = next_task(args)
        if t >= args[1]:
            break
        source = scratch
        if kind != BF16:
            _expand_pairs(data, scale, zero, kind, t, steps, scratch)
        else:
            source = data + t * steps * 192
        w = u32p(source)
        for kp in range(k_panels):
            width = min(24, steps - kp * 24)
            for p in range(min(24, pairs_out - t * 24)):
                o = u32p(args[5] + ((kp * pairs_out + t * 24 + p) * 48) * 4)
                for c in range(width):
                    a = w[(kp * 24 + c) * 48 + 2 * p]
                    b = w[(kp * 24 + c) * 48 + 2 * p + 1]
                    o[2 * c] = (a & low) | (b << np.uint32(16))
                    o[2 * c + 1] = (a >> np.uint32(16)) | (b & high)
                for c in range(2 * width, 48):
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
            o[k] = _round_bf16(w) if args[10] != 0 else w
