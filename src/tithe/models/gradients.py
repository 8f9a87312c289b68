"""Backward kernels of a decoder layer.

They need no bitwise agreement with anything but themselves: every sum has a fixed order, so the same batch gives the
same gradient on any number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from tithe.models.kernels import dot_rows, operand, rms_scale
from tithe.models.vector_tile import score_block, value_block
from tithe.quant.runtime import (
    as_float,
    exp_f32,
    f32p,
    fma,
    i32p,
    kernel,
    next_slot,
    next_task,
    write_row,
)

BACKWARD_ROWS = 32
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@njit
def _norm_gradient(x: Any, weight: Any, dy: Any, n: Any, eps: Any, out: Any) -> None:
    """out += gradient of weight·x/rms(x) for dy; leaves weight·dy in dy."""
    scale = rms_scale(x, n, eps)
    for i in range(n):
        dy[i] = dy[i] * weight[i]
    share = dot_rows(x, dy, n) * scale * scale / np.float32(n)
    for i in range(n):
        out[i] += scale * (dy[i] - x[i] * share)


# x [R, H], weight, dy [R, H] float32 (overwritten), dx [R, H] (added to), H, eps, rows per task, R
@kernel
def rms_norm_backward(args: Any) -> None:
    """dx += the input gradient of `rms_norm`."""
    weight, width, eps = f32p(args[4]), args[7], np.float32(as_float(args[8]))
    while True:
        t = next_task(args)
        if t >= args[1]:
            break
        for r in range(t * args[9], min((t + 1) * args[9], args[10])):
            offset = r * width * 4
            _norm_gradient(f32p(args[3] + offset), weight, f32p(args[5] + offset), width, eps, f32p(args[6] + offset))


# gate_up [R, 2I] operand, d_act [R, I] float32, I, d_gate_up (out) [R, 2I] operand, act (out) [R, I] operand, is_bf16,
# scratch [threads, 3I], rows per task, R
@kernel
def swiglu_backward(args: Any) -> None:
    """Gradient of silu(gate)·up with respect to gate and up, and the activation itself once more."""
    width, is_bf16 = args[5], args[8] != 0
    size = 2 if is_bf16 else 4
    base = args[9] + next_slot(args) * width * 12
    row, act = f32p(base), f32p(base + width * 8)
    while True:
        t = next_task(args)
        if t >= args[1]:
            break
        for r in range(t * args[10], min((t + 1) * args[10], args[11])):
            d = f32p(args[4] + r * width * 4)
            source = args[3] + r * 2 * width * size
            for i in range(width):
                g, u = operand(source, i, is_bf16), operand(source, width + i, is_bf16)
                s = _ONE / (_ONE + exp_f32(-g))
                dy = d[i]
                row[i] = dy * u * s * (_ONE + g * (_ONE - s))
                row[width + i] = dy * g * s
                act[i] = g * s * u
            write_row(row, 2 * width, args[6] + r * 2 * width * size, is_bf16)
            write_row(act, width, args[7] + r * width * size, is_bf16)


@njit
def _copy_block(source: Any, ld: Any, rows: Any, group: Any, dim: Any, target: Any) -> None:
    """[rows, ld] → contiguous [rows·group, dim] float32 (the query heads of one kv head)."""
    o = f32p(target)
    for i in range(rows):
        x = f32p(source + i * ld * 4)
        for j in range(group * dim):
            o[i * group * dim + j] = x[j]


@njit
def _score_gradients(p: Any, ds: Any, lse: Any, position: Any, padded: Any, scale: Any) -> None:
    """One query row: p holds raw scores, ds holds dO·V; leaves probabilities in p and score gradients in ds."""
    n = position + 1
    delta = _ZERO
    for j in range(n):
        p[j] = exp_f32(p[j] * scale - lse)
    for j in range(n, padded):
        p[j] = _ZERO
        ds[j] = _ZERO
    delta = dot_rows(p, ds, n)
    for j in range(n):
        ds[j] = p[j] * (ds[j] - delta) * scale


# q [R, ldq], ldq, Hq, Hkv, D, d_out [R, Hq·D], keys, keys row-major, values transposed, pages_bf16,
# block table [S, ldt], ldt, segment start, segment length, first position (int32 [S]), lse [R, Hq], scale,
# dq [R, Hq·D] (out), dkv [S, Hkv, 2, longest, D] (out, zeroed by the caller), longest, scratch [threads, floats],
# floats, blocks per page of keys (the row-major keys and transposed values are this layer's alone)
@kernel
def attention_backward(args: Any) -> None:
    """Gradients of `attention` for queries, and per segment for every key and value it reads.

    One task a segment and kv head.
    """
    ldq, heads, kv_heads, dim = args[4], args[5], args[6], args[7]
    pages_bf16, table, ldt = args[12] != 0, i32p(args[13]), args[14]
    start, length, first = i32p(args[15]), i32p(args[16]), i32p(args[17])
    lse, scale, longest = f32p(args[18]), np.float32(as_float(args[19])), args[22]
    group = heads // kv_heads
    q = args[23] + next_slot(args) * args[24] * 4
    do = q + BACKWARD_ROWS * group * dim * 4
    p = do + BACKWARD_ROWS * group * dim * 4
    ds = p + BACKWARD_ROWS * group * longest * 4
    page_bytes = dim * 16 * (2 if pages_bf16 else 4)
    while True:
        t = next_task(args)
        if t >= args[1]:
            break
        s, h = t // kv_heads, t % kv_heads
        dk = args[21] + (t * 2) * longest * dim * 4
        dv = dk + longest * dim * 4
        for begin in range(0, np.int64(length[s]), BACKWARD_ROWS):
            rows = min(BACKWARD_ROWS, np.int64(length[s]) - begin)
            row = np.int64(start[s]) + begin
            last = np.int64(first[s]) + begin + rows - 1
            pages = last // 16 + 1
            offset = h * group * dim * 4
            _copy_block(args[3] + row * ldq * 4 + offset, ldq, rows, group, dim, q)
            _copy_block(args[8] + row * heads * dim * 4 + offset, heads * dim, rows, group, dim, do)
            for i in range(pages):
                number = np.int64(table[s * ldt + i])
                key = args[9] + (number * args[25] + h) * page_bytes
                page = (number * kv_heads + h) * page_bytes
                score_block(q, dim, rows * group, key, dim, p + i * 64, longest, pages_bf16)
                score_block(do, dim, rows * group, args[11] + page, dim, ds + i * 64, longest, pages_bf16)
            for i in range(rows * group):
                r = row + i // group
                _score_gradients(
                    f32p(p + i * longest * 4),
                    f32p(ds + i * longest * 4),
                    lse[r * heads + h * group + i % group],
                    np.int64(first[s]) + begin + i // group,
                    pages * 16,
                    scale,
                )
            for i in range(rows):
                target = args[20] + ((row + i) * heads + h * group) * dim * 4
                o = f32p(target)
                for j in range(group * dim):
                    o[j] = _ZERO
                for j in range(pages):
                    page = (np.int64(table[s * ldt + j]) * kv_heads + h) * page_bytes
                    a = ds + (i * group * longest + j * 16) * 4
                    value_block(a, longest, 1, group, args[10] + page, dim, 16, dim, target, dim, pages_bf16)
            value_block(ds, 1, longest, last + 1, q, dim, rows * group, dim, dk, dim, False)
            value_block(p, 1, longest, last + 1, do, dim, rows * group, dim, dv, dim, False)


@njit
def _gather_segments(
    dkv: Any, s: Any, segments: Any, prefix: Any, h: Any, kv_heads: Any, which: Any, at: Any, out: Any
) -> None:
    """out[0:D] = Σ over the segments that read position `at` of segment s's rows: itself, then those built on it."""
    longest, dim = dkv[1], dkv[2]
    for i in range(dim):
        out[i] = _ZERO
    for other in range(segments):
        if other == s or np.int64(prefix[other]) == s:
            x = f32p(dkv[0] + (((other * kv_heads + h) * 2 + which) * longest + at) * dim * 4)
            for i in range(dim):
                out[i] += x[i]


@njit
def _unrotate(x: Any, cos: Any, sin: Any, half: Any) -> None:
    for i in range(half):
        low, high = x[i], x[i + half]
        x[i] = fma(low, cos[i], high * sin[i])
        x[i + half] = fma(high, cos[i], -(low * sin[i]))


# dq [R, Hq·D], dkv, longest, Hq, Hkv, D, segment of row (int32 [R]), prefix (int32 [S]), S, position (int32 [R]),
# cos, sin, q_norm or 0, k_norm or 0, raw qkv [R, ld] or 0, ld, eps, out [R, (Hq + 2·Hkv)·D] operand, out_bf16,
# scratch [threads, 2·(Hq + 2·Hkv)·D]
@kernel
def finish_qkv_backward(args: Any) -> None:
    """Collects key and value gradients of a row, undoes rotary and head norms.

    One task a row; rows in no segment give 0.
    """
    heads, kv_heads, dim = args[6], args[7], args[8]
    segment, prefix, position = i32p(args[9]), i32p(args[10]), i32p(args[12])
    q_norm, k_norm, eps = args[15], args[16], np.float32(as_float(args[19]))
    width = (heads + 2 * kv_heads) * dim
    base = args[22] + next_slot(args) * width * 8
    dkv = (args[4], args[5], dim)
    while True:
        r = next_task(args)
        if r >= args[1]:
            break
        row = f32p(base)
        s = np.int64(segment[r])
        at = np.int64(position[r])
        if s < 0:
            for i in range(width):
                row[i] = _ZERO
        else:
            dq = f32p(args[3] + r * heads * dim * 4)
            for i in range(heads * dim):
                row[i] = dq[i]
            for h in range(kv_heads):
                k = f32p(base + (heads + h) * dim * 4)
                v = f32p(base + (heads + kv_heads + h) * dim * 4)
                _gather_segments(dkv, s, args[11], prefix, h, kv_heads, 0, at, k)
                _gather_segments(dkv, s, args[11], prefix, h, kv_heads, 1, at, v)
            cos, sin = f32p(args[13] + at * dim * 2), f32p(args[14] + at * dim * 2)
            for h in range(heads + kv_heads):
                x = f32p(base + h * dim * 4)
                _unrotate(x, cos, sin, dim // 2)
                norm = q_norm if h < heads else k_norm
                if norm != 0:
                    out = f32p(base + (width + h * dim) * 4)
                    for i in range(dim):
                        out[i] = _ZERO
                    _norm_gradient(f32p(args[17] + (r * args[18] + h * dim) * 4), f32p(norm), x, dim, eps, out)
                    for i in range(dim):
                        x[i] = out[i]
        write_row(row, width, args[20] + r * width * (2 if args[21] != 0 else 4), args[21] != 0)
