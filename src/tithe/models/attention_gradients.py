"""Backward kernels of grouped-query attention; sums as in `tithe.models.gradients`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from tithe.models.attention_kernels import window_start
from tithe.models.gradients import norm_gradient
from tithe.models.kernels import dot_rows
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


@njit
def _copy_block(source: Any, ld: Any, rows: Any, group: Any, dim: Any, target: Any) -> None:
    """[rows, ld] → contiguous [rows·group, dim] float32 (the query heads of one kv head)."""
    o = f32p(target)
    for i in range(rows):
        x = f32p(source + i * ld * 4)
        for j in range(group * dim):
            o[i * group * dim + j] = x[j]


@njit
def score_gradients(p: Any, ds: Any, lse: Any, first: Any, n: Any, padded: Any, scale: Any) -> None:
    """One query row that sees positions first..n-1: p holds raw scores, ds holds dO·V; leaves probabilities in p and
    score gradients in ds, 0 elsewhere."""
    for j in range(first):
        p[j] = _ZERO
        ds[j] = _ZERO
    for j in range(first, n):
        p[j] = exp_f32(p[j] * scale - lse)
    for j in range(n, padded):
        p[j] = _ZERO
        ds[j] = _ZERO
    delta = dot_rows(p, ds, n)
    for j in range(first, n):
        ds[j] = p[j] * (ds[j] - delta) * scale


# q [R, ldq], ldq, Hq, Hkv, D, d_out [R, Hq·D], keys, keys row-major, values transposed, pages_bf16,
# block table [S, ldt], ldt, segment start, segment length, first position (int32 [S]), lse [R, Hq], scale,
# dq [R, Hq·D] (out), dkv [S, Hkv, 2, longest, D] (out, zeroed by the caller), longest, scratch [threads, floats],
# floats, blocks per page of keys (the row-major keys and transposed values are this layer's alone), window (0: none)
@kernel
def attention_backward(args: Any) -> None:
    """Gradients of `attention` for queries, and per segment for every key and value it reads.

    One task a segment and kv head. Sinks only show in lse: their value is 0, so that they add nothing to a gradient.
    """
    ldq, heads, kv_heads, dim = args[4], args[5], args[6], args[7]
    pages_bf16, table, ldt = args[12] != 0, i32p(args[13]), args[14]
    start, length, first = i32p(args[15]), i32p(args[16]), i32p(args[17])
    lse, scale, longest, window = f32p(args[18]), np.float32(as_float(args[19])), args[22], args[26]
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
        dkv = args[21] + (t * 2) * longest * dim * 4
        for begin in range(0, np.int64(length[s]), BACKWARD_ROWS):
            rows = min(BACKWARD_ROWS, np.int64(length[s]) - begin)
            row, position = np.int64(start[s]) + begin, np.int64(first[s]) + begin
            skipped = window_start(position + 1, window) // 16
            pages = (position + rows - 1) // 16 + 1 - skipped
            offset, own = h * group * dim * 4, s * ldt + skipped
            _copy_block(args[3] + row * ldq * 4 + offset, ldq, rows, group, dim, q)
            _copy_block(args[8] + row * heads * dim * 4 + offset, heads * dim, rows, group, dim, do)
            for i in range(pages):
                number = np.int64(table[own + i])
                key = args[9] + (number * args[25] + h) * page_bytes
                page = (number * kv_heads + h) * page_bytes
                score_block(q, dim, rows * group, key, dim, p + i * 64, longest, pages_bf16)
                score_block(do, dim, rows * group, args[11] + page, dim, ds + i * 64, longest, pages_bf16)
            for i in range(rows * group):
                n, at, log = position + i // group + 1, i * longest * 4, (row + i // group) * heads + h * group
                low = window_start(n, window) - skipped * 16
                total = lse[log + i % group]
                score_gradients(f32p(p + at), f32p(ds + at), total, low, n - skipped * 16, pages * 16, scale)
            for i in range(rows):
                target = args[20] + ((row + i) * heads + h * group) * dim * 4
                o = f32p(target)
                for j in range(group * dim):
                    o[j] = _ZERO
                for j in range(pages):
                    page = (np.int64(table[own + j]) * kv_heads + h) * page_bytes
                    a = ds + (i * group * longest + j * 16) * 4
                    value_block(a, longest, 1, group, args[10] + page, dim, 16, dim, target, dim, pages_bf16)
            count, dk = position + rows - skipped * 16, dkv + skipped * 16 * dim * 4
            value_block(ds, 1, longest, count, q, dim, rows * group, dim, dk, dim, False)
            value_block(p, 1, longest, count, do, dim, rows * group, dim, dk + longest * dim * 4, dim, False)


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
def unrotate(x: Any, cos: Any, sin: Any, half: Any) -> None:
    """The transpose of `rotate`, in place."""
    for i in range(half):
        low, high = x[i], x[i + half]
        x[i] = fma(low, cos[i], high * sin[i])
        x[i + half] = fma(high, cos[i], -(low * sin[i]))


@njit(inline="always")
def _through_norm(raw: Any, weight: Any, x: Any, n: Any, eps: Any, room: Any) -> None:
    """x, the gradient of n normed elements, becomes that of the raw ones."""
    for i in range(n):
        room[i] = _ZERO
    norm_gradient(raw, weight, x, n, eps, room)
    for i in range(n):
        x[i] = room[i]


@njit(inline="always")
def _unprepare_row(row: Any, raw: Any, heads: Any, kv_heads: Any, dim: Any, norms: Any, angles: Any, room: Any) -> None:
    """The backward of `_prepare_row`; room is as long as queries and keys."""
    q_norm, k_norm, whole, eps = norms
    cos, sin, half = angles
    for h in range(heads + kv_heads):
        at = h * dim * 4
        unrotate(f32p(row + at), cos, sin, half)
        norm = q_norm if h < heads else k_norm
        if norm != 0 and not whole:
            _through_norm(f32p(raw + at), f32p(norm), f32p(row + at), dim, eps, room)
    if whole and q_norm != 0:
        at = heads * dim * 4
        _through_norm(f32p(raw), f32p(q_norm), f32p(row), heads * dim, eps, room)
        _through_norm(f32p(raw + at), f32p(k_norm), f32p(row + at), kv_heads * dim, eps, room)


# dq [R, Hq·D], dkv, longest, Hq, Hkv, D, segment of row (int32 [R]), prefix (int32 [S]), S, position (int32 [R]),
# cos, sin, q_norm or 0, k_norm or 0, raw qkv [R, ld] or 0, ld, eps, out [R, (Hq + 2·Hkv)·D] operand, out_bf16,
# scratch [threads, 2·(Hq + 2·Hkv)·D], half, whether a norm is over all heads together
@kernel
def finish_qkv_backward(args: Any) -> None:
    """Collects key and value gradients of a row, undoes rotary and norms.

    One task a row; rows in no segment give 0.
    """
    heads, kv_heads, dim, half = args[6], args[7], args[8], args[23]
    segment, prefix, position = i32p(args[9]), i32p(args[10]), i32p(args[12])
    norms = (args[15], args[16], args[24] != 0, np.float32(as_float(args[19])))
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
            angles = (f32p(args[13] + at * half * 4), f32p(args[14] + at * half * 4), half)
            raw = args[17] + r * args[18] * 4
            _unprepare_row(base, raw, heads, kv_heads, dim, norms, angles, f32p(base + width * 4))
        write_row(row, width, args[20] + r * width * (2 if args[21] != 0 else 4), args[21] != 0)
