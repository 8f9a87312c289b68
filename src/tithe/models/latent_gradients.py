"""Backward kernels of latent attention; arrays as in `tithe.models.latent_kernels`, sums as in
`tithe.models.gradients`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from tithe.models.attention_gradients import score_gradients, unrotate
from tithe.models.gradients import norm_gradient
from tithe.models.page_tile import turn_page
from tithe.models.vector_tile import score_block, value_block
from tithe.quant.runtime import as_float, f32p, fma, i32p, kernel, next_slot, next_task, put_row

BLOCK = 128
"""Pairs of a row and a head that are computed at a time, unless one row has more heads."""
_ZERO = np.float32(0.0)


@njit
def _fill(x: Any, n: Any) -> None:
    for i in range(n):
        x[i] = _ZERO


@njit
def _copy(source: Any, n: Any, target: Any) -> None:
    for i in range(n):
        target[i] = source[i]


@njit
def _rows_of(begin: Any, length: Any, heads: Any) -> Any:
    """Rows of the block that begins at row `begin` of a segment."""
    return min(max(1, BLOCK // heads), length - begin)


# q [heads, n, C + E], d_mix [heads, n, C], n, heads, C, E, pages, pages_bf16, block table [S, ldt], ldt, segment start,
# segment length, first position (int32 [S]), lse [n, heads], scale, dq [heads, n, C + E] (out),
# d_page [S, longest, C + E] (out, zeroed by the caller), longest, scratch [threads, floats], floats, blocks per page
@kernel
def latent_attention_backward(args: Any) -> None:
    """Gradients of `latent_attention` for queries, and per segment for every latent and key it reads. One task a
    segment."""
    n, heads, latent, width = args[5], args[6], args[7], args[7] + args[8]
    pages_bf16, table = args[10] != 0, i32p(args[11])
    start, length, first = i32p(args[13]), i32p(args[14]), i32p(args[15])
    lse, scale, longest = f32p(args[16]), np.float32(as_float(args[17])), args[20]
    block = max(1, BLOCK // heads) * heads
    q = args[21] + next_slot(args) * args[22] * 4
    do = q + block * width * 4
    dq = do + block * latent * 4
    p = dq + block * width * 4
    ds = p + block * longest * 4
    turned = ds + block * longest * 4
    page_bytes = width * 16 * (2 if pages_bf16 else 4)
    while True:
        s = next_task(args)
        if s >= args[1]:
            break
        d_page, own = args[19] + s * longest * width * 4, s * args[12]
        begin = 0
        while begin < length[s]:
            rows = _rows_of(begin, np.int64(length[s]), heads)
            row, position, pairs = np.int64(start[s]) + begin, np.int64(first[s]) + begin, rows * heads
            pages = (position + rows - 1) // 16 + 1
            for h in range(heads):
                _copy(f32p(args[3] + (h * n + row) * width * 4), rows * width, f32p(q + h * rows * width * 4))
                _copy(f32p(args[4] + (h * n + row) * latent * 4), rows * latent, f32p(do + h * rows * latent * 4))
            for i in range(pages):
                page = args[9] + np.int64(table[own + i]) * args[23] * page_bytes
                turn_page(page, width, pages_bf16, turned)
                score_block(q, width, pairs, turned, width, p + i * 64, longest, False)
                score_block(do, latent, pairs, turned, latent, ds + i * 64, longest, False)
            for i in range(pairs):
                r, at = i % rows, i * longest * 4
                log = lse[(row + r) * heads + i // rows]
                score_gradients(f32p(p + at), f32p(ds + at), log, 0, position + r + 1, pages * 16, scale)
            _fill(f32p(dq), pairs * width)
            for i in range(pages):
                page = args[9] + np.int64(table[own + i]) * args[23] * page_bytes
                value_block(ds + i * 64, longest, 1, pairs, page, width, 16, width, dq, width, pages_bf16)
            for h in range(heads):
                _copy(f32p(dq + h * rows * width * 4), rows * width, f32p(args[18] + (h * n + row) * width * 4))
            value_block(ds, 1, longest, position + rows, q, width, pairs, width, d_page, width, False)
            value_block(p, 1, longest, position + rows, do, latent, pairs, latent, d_page, width, False)
            begin += rows


@njit
def _unrotate_from(x: Any, angles: Any, out: Any) -> None:
    """out = the gradient of what was rotated into x (overwritten)."""
    cos, sin, half, interleaved = angles
    if interleaved:
        for i in range(half):
            low, high = x[i], x[i + half]
            out[2 * i] = fma(low, cos[i], high * sin[i])
            out[2 * i + 1] = fma(high, cos[i], -(low * sin[i]))
    else:
        _copy(x, 2 * half, out)
        unrotate(out, cos, sin, half)


# d_plain [heads, n, N], dq [heads, n, C + E], n, heads, N, E, C, segment of row (int32 [R]), position (int32 [R]), cos,
# sin, interleaved, out [R, ld] operand, ld, mode, scratch [threads, heads·(N + E)]
@kernel
def place_queries_backward(args: Any) -> None:
    """The gradient of each row's heads as `place_queries` read them. Rows in no segment give 0."""
    n, heads, plain, rope, latent, half = args[5], args[6], args[7], args[8], args[9], args[8] // 2
    segment, position, mode = i32p(args[10]), i32p(args[11]), args[17]
    width = heads * (plain + rope)
    row = args[18] + next_slot(args) * width * 4
    while True:
        r = next_task(args)
        if r >= args[1]:
            break
        if segment[r] < 0:
            _fill(f32p(row), width)
        else:
            p = np.int64(position[r])
            angles = (f32p(args[12] + p * half * 4), f32p(args[13] + p * half * 4), half, args[14] != 0)
            for h in range(heads):
                at, target = h * n + r, row + h * (plain + rope) * 4
                _copy(f32p(args[3] + at * plain * 4), plain, f32p(target))
                key = f32p(args[4] + (at * (latent + rope) + latent) * 4)
                _unrotate_from(key, angles, f32p(target + plain * 4))
        put_row(f32p(row), width, args[15] + r * args[16] * (2 if mode == 1 else 4), mode)


# d_page [S, longest, C + E], longest, C, E, segment of row, prefix (int32 [S]), S, position, cos, sin, interleaved,
# norm of C, eps, raw [n, ld] float32 (the latent before its norm), ld, out [n, ldo] operand, ldo, mode,
# scratch [threads, 2·(C + E)]
@kernel
def finish_latent_backward(args: Any) -> None:
    """The gradient of a row's projection into the bottleneck of keys and values: what the segments that read its
    position found, through norm and rotary. One task a row; rows in no segment give 0."""
    longest, latent, rope, half = args[4], args[5], args[6], args[6] // 2
    segment, prefix, position, mode = i32p(args[7]), i32p(args[8]), i32p(args[10]), args[20]
    width, eps = latent + rope, np.float32(as_float(args[15]))
    row = args[21] + next_slot(args) * 2 * width * 4
    out = row + width * 4
    while True:
        r = next_task(args)
        if r >= args[1]:
            break
        s, p = np.int64(segment[r]), np.int64(position[r])
        _fill(f32p(row), 2 * width)
        for other in range(args[9]):
            if s >= 0 and (other == s or np.int64(prefix[other]) == s):
                found, total = f32p(args[3] + (other * longest + p) * width * 4), f32p(row)
                for i in range(width):
                    total[i] += found[i]
        if s >= 0:
            raw = f32p(args[16] + r * args[17] * 4)
            norm_gradient(raw, f32p(args[14]), f32p(row), latent, eps, f32p(out))
            angles = (f32p(args[11] + p * half * 4), f32p(args[12] + p * half * 4), half, args[13] != 0)
            _unrotate_from(f32p(row + latent * 4), angles, f32p(out + latent * 4))
        put_row(f32p(out), width, args[18] + r * args[19] * (2 if mode == 1 else 4), mode)
