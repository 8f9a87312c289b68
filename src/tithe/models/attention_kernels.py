"""Forward kernels of grouped-query attention over pages.

Keys and values live in pages of 16 positions: keys transposed [page, L, Hkv, D, 16], values [page, L, Hkv, 16, D], so
that a row's attention walks whole pages in order, from position 0 or from the page where its window begins, whatever
else is in the batch. A kernel gets the address of its layer in page 0 and the blocks (L·Hkv) from one page to the next.
What a layer does besides (norms, partial rotary, window, sinks) is told by arguments once a launch; conventions as in
`tithe.models.kernels`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from tithe.models.kernels import add_into, norm_into, tree_sum
from tithe.models.vector_tile import score_block, value_block
from tithe.quant.runtime import (
    as_float,
    exp_f32,
    f32_to_bf16,
    f32p,
    fma,
    i32p,
    kernel,
    next_slot,
    next_task,
    prefetch,
    stack_f32,
    u16p,
    write_row,
)

PAGE = 16
MOST_QUERIES = 64
"""Query heads that may share a key head."""
LOWEST = np.float32(-3.0e38)
"""Below every score; `exp_f32` flushes it to exactly 0."""
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@njit
def rotate(x: Any, cos: Any, sin: Any, half: Any) -> None:
    """Rotary embedding of the first 2·half elements in place: pairs (i, i + half), as Hugging Face's rotate_half."""
    for i in range(half):
        low, high = x[i], x[i + half]
        x[i] = fma(low, cos[i], -(high * sin[i]))
        x[i + half] = fma(high, cos[i], low * sin[i])


@njit
def _write_kv(k: Any, v: Any, base: Any, slot: Any, dim: Any, keys: Any, values: Any, as_bf16: Any) -> None:
    """One position's key (a column of its page) and value (a row) at element `base` of a layer's pages."""
    if as_bf16:
        kp, vp = u16p(keys + base * 2), u16p(values + (base + slot * dim) * 2)
        for i in range(dim):
            kp[i * 16 + slot] = f32_to_bf16(k[i])
            vp[i] = f32_to_bf16(v[i])
    else:
        kf, vf = f32p(keys + base * 4), f32p(values + (base + slot * dim) * 4)
        for i in range(dim):
            kf[i * 16 + slot] = k[i]
            vf[i] = v[i]


@njit(inline="always")
def _prepare_row(row: Any, heads: Any, kv_heads: Any, dim: Any, norms: Any, angles: Any) -> None:
    """Norms, then rotary, of a row's queries and keys; norms = (q or 0, k or 0, whole, eps), angles = (cos, sin,
    half)."""
    q_norm, k_norm, whole, eps = norms
    cos, sin, half = angles
    if whole and q_norm != 0:
        norm_into(f32p(row), f32p(q_norm), heads * dim, eps, f32p(row))
        keys = f32p(row + heads * dim * 4)
        norm_into(keys, f32p(k_norm), kv_heads * dim, eps, keys)
    for h in range(heads + kv_heads):
        head = f32p(row + h * dim * 4)
        norm = q_norm if h < heads else k_norm
        if norm != 0 and not whole:
            norm_into(head, f32p(norm), dim, eps, head)
        rotate(head, cos, sin, half)


# qkv [R, ld] float32 in place, ld, Hq, Hkv, D, bias or 0, q_norm or 0, k_norm or 0, eps, cos, sin [positions, half],
# position [R], sequence [R], block table [S, ldt], ldt, key pages, value pages, pages_bf16, R, blocks per page, half
# (pairs of a head that are rotated), whether a norm is over all heads together
@kernel
def finish_qkv(args: Any) -> None:
    """Bias, norms and rotary on q and k; writes k and v of each row into its sequence's page.

    A task is 16 rows: neighbours in a prompt share a page, and two threads on one page would fight for its lines.
    """
    ld, heads, kv_heads, dim, half = args[4], args[5], args[6], args[7], args[23]
    bias, norms = args[8], (args[9], args[10], args[24] != 0, np.float32(as_float(args[11])))
    position, sequence, table = i32p(args[14]), i32p(args[15]), i32p(args[16])
    while True:
        t = next_task(args)
        if t >= args[1]:
            break
        for r in range(t * 16, min(t * 16 + 16, args[21])):
            p = np.int64(position[r])
            if bias != 0:
                add_into(f32p(args[3] + r * ld * 4), f32p(bias), (heads + 2 * kv_heads) * dim)
            angles = (f32p(args[12] + p * half * 4), f32p(args[13] + p * half * 4), half)
            _prepare_row(args[3] + r * ld * 4, heads, kv_heads, dim, norms, angles)
            page = np.int64(table[np.int64(sequence[r]) * args[17] + p // 16])
            for h in range(kv_heads):
                k = f32p(args[3] + (r * ld + (heads + h) * dim) * 4)
                v = f32p(args[3] + (r * ld + (heads + kv_heads + h) * dim) * 4)
                base = (page * args[22] + h) * dim * 16
                _write_kv(k, v, base, p % 16, dim, args[18], args[19], args[20] != 0)


@njit
def softmax_row(s: Any, first: Any, n: Any, padded: Any, scale: Any, floor: Any) -> Any:
    """In place: s[first:n] → exp(scale·s − max), the rest of s[0:padded] → 0. Returns (max of scale·s and floor, sum of
    s)."""
    lanes = stack_f32(16)
    for j in range(first):
        s[j] = LOWEST
    for j in range(n, padded):
        s[j] = LOWEST
    for j in range(16):
        lanes[j] = floor
    for i in range(0, padded, 16):
        for j in range(16):
            scaled = s[i + j] * scale
            s[i + j] = scaled
            lanes[j] = max(lanes[j], scaled)
    top = lanes[0]
    for j in range(1, 16):
        top = max(top, lanes[j])
    for j in range(16):
        lanes[j] = _ZERO
    for i in range(0, padded, 16):
        for j in range(16):
            e = exp_f32(s[i + j] - top)
            s[i + j] = e
            lanes[j] += e
    return top, tree_sum(lanes)


@njit(inline="always")
def window_start(n: Any, window: Any) -> Any:
    """The first of positions 0..n-1 that the last one sees; window 0: all."""
    if window == 0 or n <= window:
        return 0
    return n - window


# q [R, ldq], ldq, Hq, Hkv, D, key pages, value pages, pages_bf16, block table, ldt, sequence [R], position [R],
# out [R, Hq·D] operand, out_bf16, lse [R, Hq] or 0, scale, scratch [threads, scratch_floats], scratch_floats,
# longest (tokens, multiple of 16), blocks per page, window (tokens; 0: all), sinks [Hq] or 0
@kernel
def attention(args: Any) -> None:
    """Causal attention of each row over the last `window` positions up to its own, in its own sequence. One task a row.

    A head's sink is one more logit in the denominator, and in lse.
    """
    ldq, heads, kv_heads, dim = args[4], args[5], args[6], args[7]
    pages_bf16, table, ldt = args[10] != 0, i32p(args[11]), args[12]
    sequence, position = i32p(args[13]), i32p(args[14])
    out_bf16, scale = args[16] != 0, np.float32(as_float(args[18]))
    group = heads // kv_heads
    scores = args[19] + next_slot(args) * args[20] * 4
    longest, blocks = args[21], args[22]
    answer = scores + group * longest * 4
    page_bytes = dim * 16 * (2 if pages_bf16 else 4)
    while True:
        r = next_task(args)
        if r >= args[1]:
            break
        n = np.int64(position[r]) + 1
        start = window_start(n, args[23])
        skipped = start // 16
        pages = (n + 15) // 16 - skipped
        own = np.int64(sequence[r]) * ldt + skipped
        start, n = start - skipped * 16, n - skipped * 16
        for h in range(kv_heads):
            q = args[3] + (r * ldq + h * group * dim) * 4
            for i in range(pages):
                key = args[8] + (np.int64(table[own + i]) * blocks + h) * page_bytes
                if i + 1 < pages:
                    prefetch(args[8] + (np.int64(table[own + i + 1]) * blocks + h) * page_bytes, page_bytes)
                score_block(q, dim, group, key, dim, scores + i * 64, longest, pages_bf16)
            prefetch(args[9] + (np.int64(table[own]) * blocks + h) * page_bytes, page_bytes)
            o = f32p(answer)
            for i in range(group * dim):
                o[i] = _ZERO
            total = stack_f32(64)  # MOST_QUERIES
            for g in range(group):
                sink = LOWEST if args[24] == 0 else f32p(args[24])[h * group + g]
                top, mass = softmax_row(f32p(scores + g * longest * 4), start, n, pages * 16, scale, sink)
                if args[24] != 0:
                    mass += exp_f32(sink - top)
                total[g] = _ONE / mass
                if args[17] != 0:
                    f32p(args[17])[r * heads + h * group + g] = top + np.float32(math.log(mass))
            for i in range(pages):
                value = args[9] + (np.int64(table[own + i]) * blocks + h) * page_bytes
                count = min(16, n - i * 16)
                if i + 1 < pages:
                    prefetch(args[9] + (np.int64(table[own + i + 1]) * blocks + h) * page_bytes, page_bytes)
                value_block(scores + i * 64, longest, 1, group, value, dim, count, dim, answer, dim, pages_bf16)
            for g in range(group):
                for i in range(dim):
                    o[g * dim + i] = o[g * dim + i] * total[g]
            write_row(o, group * dim, args[15] + (r * heads + h * group) * dim * (2 if out_bf16 else 4), out_bf16)


# source page, target page (int32 [T]), slots (int32 [T]), Hkv, D, layers, bytes of a page (all layers), bytes of a
# layer in it, keys, values, bf16
@kernel
def copy_slots(args: Any) -> None:
    """Copy the first `slots` positions of a page into another: a prompt's last, partly filled page is forked so."""
    kv_heads, dim, layers, size = args[6], args[7], args[8], 2 if args[13] != 0 else 4
    words = size // 2
    while True:
        t = next_task(args)
        if t >= args[1]:
            break
        source = np.int64(i32p(args[3])[t // layers]) * args[9] + (t % layers) * args[10]
        target = np.int64(i32p(args[4])[t // layers]) * args[9] + (t % layers) * args[10]
        slots = np.int64(i32p(args[5])[t // layers])
        for h in range(kv_heads):
            offset = h * dim * 16 * size
            k_from, k_to = u16p(args[11] + source + offset), u16p(args[11] + target + offset)
            for i in range(dim):
                for j in range(slots * words):
                    k_to[i * 16 * words + j] = k_from[i * 16 * words + j]
            v_from, v_to = u16p(args[12] + source + offset), u16p(args[12] + target + offset)
            for i in range(slots * dim * words):
                v_to[i] = v_from[i]
