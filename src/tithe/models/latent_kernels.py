"""Forward kernels of multi-head latent attention in its absorbed form (DeepSeek-V2, https://arxiv.org/abs/2405.04434).

A page [page, L, 16, C + E] holds one row a position for all heads: the normed latent (C wide) and the rotated key (E
wide). A head's query is taken through its part of kv_b_proj first (`tithe.models.latent`), so that it meets the latents
themselves: scores are products of C + E numbers, and the answer is a mix of latents that another part of kv_b_proj
makes a value of. Arrays by head are [heads, capacity, …] (`capacity` rows, of which R are used); conventions as in
`tithe.models.kernels`. Operand modes are those of `tithe.quant.rows_tile`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from tithe.models.attention_kernels import LOWEST, rotate, softmax_row
from tithe.models.kernels import add_into, norm_into
from tithe.models.page_tile import turn_page
from tithe.models.vector_tile import score_block, value_block
from tithe.quant.runtime import (
    as_float,
    f32p,
    fma,
    i32p,
    kernel,
    next_slot,
    next_task,
    prefetch,
    put_row,
    stack_f32,
    u16p,
    write_row,
)

HEAD_CHUNK = 32
"""Heads that one task computes at most."""
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@njit
def _rotate_into(x: Any, angles: Any, out: Any) -> None:
    """out = the rotated x. angles = (cos, sin, half, interleaved); interleaved pairs (2i, 2i + 1) come out apart."""
    cos, sin, half, interleaved = angles
    if interleaved:
        for i in range(half):
            low, high = x[2 * i], x[2 * i + 1]
            out[i] = fma(low, cos[i], -(high * sin[i]))
            out[i + half] = fma(high, cos[i], low * sin[i])
    else:
        for i in range(2 * half):
            out[i] = x[i]
        rotate(out, cos, sin, half)


# down [R, ld] float32 (the bias is added in place), ld, Q, C, E, bias [Q + C + E] or 0, norm of Q or 0, norm of C, eps,
# cos, sin [positions, E/2], interleaved, position [R], sequence [R], block table, ldt, pages, pages_bf16, blocks per
# page (L), R, q out [R, Q] operand, q_bf16, scratch [threads, Q + C + E]
@kernel
def finish_latent(args: Any) -> None:
    """A row's projections into the bottlenecks: norms, rotary of the key; latent and key go to the page.

    A task is 16 rows, as in `finish_qkv`. Without a norm of Q (no query bottleneck) the query is left where it is.
    """
    ld, wide, latent, rope = args[4], args[5], args[6], args[7]
    position, sequence, table = i32p(args[15]), i32p(args[16]), i32p(args[17])
    eps, half, pages_bf16 = np.float32(as_float(args[11])), args[7] // 2, args[20] != 0
    size = 2 if pages_bf16 else 4
    row = f32p(args[25] + next_slot(args) * (wide + latent + rope) * 4)
    while True:
        t = next_task(args)
        if t >= args[1]:
            break
        for r in range(t * 16, min(t * 16 + 16, args[22])):
            x = args[3] + r * ld * 4
            p = np.int64(position[r])
            if args[8] != 0:
                add_into(f32p(x), f32p(args[8]), wide + latent + rope)
            if args[9] != 0:
                norm_into(f32p(x), f32p(args[9]), wide, eps, row)
                write_row(row, wide, args[23] + r * wide * (2 if args[24] != 0 else 4), args[24] != 0)
            page = np.int64(table[np.int64(sequence[r]) * args[18] + p // 16])
            target = args[19] + (page * args[21] * 16 + p % 16) * (latent + rope) * size
            norm_into(f32p(x + wide * 4), f32p(args[10]), latent, eps, row)
            write_row(row, latent, target, pages_bf16)
            angles = (f32p(args[12] + p * half * 4), f32p(args[13] + p * half * 4), half, args[14] != 0)
            _rotate_into(f32p(x + (wide + latent) * 4), angles, row)
            write_row(row, rope, target + latent * size, pages_bf16)


# q [R, ldq] float32, ldq, heads, N, E, C, cos, sin [positions, E/2], interleaved, position [R], R, capacity,
# unrotated out [heads, capacity, N] operand, mode, query out [heads, capacity, C + E] float32
@kernel
def place_queries(args: Any) -> None:
    """Splits each head's query: N numbers as operands for kv_b_proj, E numbers rotated to the end of the query."""
    heads, plain, rope, latent, half = args[5], args[6], args[7], args[8], args[7] // 2
    position, capacity, mode = i32p(args[12]), args[14], args[16]
    size = 2 if mode == 1 else 4
    while True:
        t = next_task(args)
        if t >= args[1]:
            break
        for r in range(t * 8, min(t * 8 + 8, args[13])):
            p = np.int64(position[r])
            angles = (f32p(args[9] + p * half * 4), f32p(args[10] + p * half * 4), half, args[11] != 0)
            for h in range(heads):
                x, at = args[3] + (r * args[4] + h * (plain + rope)) * 4, h * capacity + r
                put_row(f32p(x), plain, args[15] + at * plain * size, mode)
                _rotate_into(f32p(x + plain * 4), angles, f32p(args[17] + (at * (latent + rope) + latent) * 4))


# q [heads, capacity, C + E], capacity, heads, C, E, pages, pages_bf16, block table [S, ldt], ldt, sequence [R],
# position [R], out [heads, capacity, C] operand, mode, lse [R, heads] or 0, scale, scratch [threads, scratch_floats],
# scratch_floats, longest (tokens, multiple of 16), blocks per page (L), heads per task
@kernel
def latent_attention(args: Any) -> None:
    """Causal attention of each row's heads over the latents of its own sequence. A task: a row and some heads."""
    capacity, heads, latent, width = args[4], args[5], args[6], args[6] + args[7]
    pages_bf16, table, sequence, position = args[9] != 0, i32p(args[10]), i32p(args[12]), i32p(args[13])
    mode, scale, longest, each = args[15], np.float32(as_float(args[17])), args[20], args[22]
    scores = args[18] + next_slot(args) * args[19] * 4
    answer = scores + each * longest * 4
    turned = answer + each * latent * 4
    page_bytes, size = width * 16 * (2 if pages_bf16 else 4), 2 if mode == 1 else 4
    chunks = (heads + each - 1) // each
    while True:
        t = next_task(args)
        if t >= args[1]:
            break
        r, h = t // chunks, t % chunks * each
        group = min(each, heads - h)
        n = np.int64(position[r]) + 1
        pages = (n + 15) // 16
        own = np.int64(sequence[r]) * args[11]
        q = args[3] + (h * capacity + r) * width * 4
        for i in range(pages):
            if i + 1 < pages:
                prefetch(args[8] + np.int64(table[own + i + 1]) * args[21] * page_bytes, page_bytes)
            turn_page(args[8] + np.int64(table[own + i]) * args[21] * page_bytes, width, pages_bf16, turned)
            score_block(q, capacity * width, group, turned, width, scores + i * 64, longest, False)
        o = f32p(answer)
        for i in range(group * latent):
            o[i] = _ZERO
        total = stack_f32(32)
        for g in range(group):
            top, mass = softmax_row(f32p(scores + g * longest * 4), 0, n, pages * 16, scale, LOWEST)
            total[g] = _ONE / mass
            if args[16] != 0:
                f32p(args[16])[r * heads + h + g] = top + np.float32(math.log(mass))
        for i in range(pages):
            page = args[8] + np.int64(table[own + i]) * args[21] * page_bytes
            count = min(16, n - i * 16)
            value_block(scores + i * 64, longest, 1, group, page, width, count, latent, answer, latent, pages_bf16)
        for g in range(group):
            for i in range(latent):
                o[g * latent + i] = o[g * latent + i] * total[g]
            target = args[14] + ((h + g) * capacity + r) * latent * size
            put_row(f32p(answer + g * latent * 4), latent, target, mode)


# source page, target page, slots (int32 [T]), numbers in a position, layers, bytes of a page (all layers), bytes of a
# layer in it, pages, bf16
@kernel
def copy_positions(args: Any) -> None:
    """Copy the first `slots` positions of a page into another."""
    width, layers = args[6] * (1 if args[11] != 0 else 2), args[7]
    while True:
        t = next_task(args)
        if t >= args[1]:
            break
        source = u16p(args[10] + np.int64(i32p(args[3])[t // layers]) * args[8] + (t % layers) * args[9])
        target = u16p(args[10] + np.int64(i32p(args[4])[t // layers]) * args[8] + (t % layers) * args[9])
        for i in range(np.int64(i32p(args[5])[t // layers]) * width):
            target[i] = source[i]
