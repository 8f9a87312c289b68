"""From logits to tokens and log-probs. Sampler and trainer share `row_mass`, so a token's log-prob has one value.

Random numbers are counter-based: Philox4x32-10 (Salmon et al. 2011) keyed by the run's seed with the counter
(group, sample, position), so a token never depends on what else is in the batch.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from tithe.models.kernels import tree_sum
from tithe.quant.runtime import (
    bits_to_f32,
    exp_f32,
    f32_to_bf16,
    f32_to_bits,
    f32p,
    i32p,
    i64p,
    kernel,
    next_task,
    stack_f32,
    u16p,
)

_ZERO = np.float32(0.0)
_CHUNK = 512
_LOW = np.uint64(0xFFFFFFFF)


@njit
def philox(seed: Any, group: Any, sample: Any, position: Any) -> Any:
    """A uniform float64 in [0, 1) from Philox4x32-10; all arguments int64 of which 32 to 64 bits are used."""
    c0, c1 = np.uint64(group) & _LOW, (np.uint64(group) >> np.uint64(32)) & _LOW
    c2, c3 = np.uint64(sample) & _LOW, np.uint64(position) & _LOW
    k0, k1 = np.uint64(seed) & _LOW, (np.uint64(seed) >> np.uint64(32)) & _LOW
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (
            (p1 >> np.uint64(32)) ^ c1 ^ k0,
            p1 & _LOW,
            (p0 >> np.uint64(32)) ^ c3 ^ k1,
            p0 & _LOW,
        )
        k0 = (k0 + np.uint64(0x9E3779B9)) & _LOW
        k1 = (k1 + np.uint64(0xBB67AE85)) & _LOW
    return np.float64(((c0 << np.uint64(32)) | c1) >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@njit
def row_top(z: Any, n: Any) -> Any:
    """The largest of n logits (n > 0)."""
    lanes = stack_f32(16)
    for j in range(16):
        lanes[j] = np.float32(-np.inf)
    full = n - n % 16
    for i in range(0, full, 16):
        for j in range(16):
            lanes[j] = max(lanes[j], z[i + j])
    top = lanes[0]
    for j in range(1, 16):
        top = max(top, lanes[j])
    for i in range(full, n):
        top = max(top, z[i])
    return top


@njit
def chunk_mass(z: Any, start: Any, stop: Any, top: Any, inverse_t: Any) -> Any:
    """Σ exp((z − top) / T) over [start, stop), float32, 16 lanes in a fixed tree."""
    lanes = stack_f32(16)
    for j in range(16):
        lanes[j] = _ZERO
    full = start + (stop - start) - (stop - start) % 16
    for i in range(start, full, 16):
        for j in range(16):
            lanes[j] += exp_f32((z[i + j] - top) * inverse_t)
    for i in range(full, stop):
        lanes[i - full] += exp_f32((z[i] - top) * inverse_t)
    return tree_sum(lanes)


@njit
def row_mass(z: Any, n: Any, top: Any, inverse_t: Any) -> Any:
    """Σ exp((z − top) / T) over a row, chunks of 512 added in float64 in order."""
    mass = 0.0
    for start in range(0, n, _CHUNK):
        mass += np.float64(chunk_mass(z, start, min(start + _CHUNK, n), top, inverse_t))
    return mass


@njit
def _kept(z: Any, n: Any, top: Any, inverse_t: Any, threshold: Any) -> Any:
    """(count, mass) of the tokens whose exp((z − top) / T) is at least `threshold`."""
    count, mass = 0, 0.0
    for i in range(n):
        w = exp_f32((z[i] - top) * inverse_t)
        if w >= threshold:
            count += 1
            mass += np.float64(w)
    return count, mass


@njit
def keep_threshold(z: Any, n: Any, top: Any, inverse_t: Any, mass: Any, top_k: Any, top_p: Any, min_p: Any) -> Any:
    """The largest weight threshold that keeps top-k, then top-p of what is left, then min-p; ties at it are all kept.

    Found by bisection over the bits of a float32 in (0, 1]: 31 passes, exact, without sorting the vocabulary.
    """
    threshold = _ZERO
    for stage in range(2):
        if stage == 0 and (top_k <= 0 or top_k >= n):
            continue
        if stage == 1 and top_p >= 1.0:
            continue
        wanted = top_p * (_kept(z, n, top, inverse_t, threshold)[1] if threshold > _ZERO else mass)
        low, high = np.int64(f32_to_bits(threshold)), np.int64(0x3F800000)  # low keeps enough; 1.0 is the top token
        while low < high:
            middle = (low + high + 1) // 2
            count, kept = _kept(z, n, top, inverse_t, bits_to_f32(np.uint32(middle)))
            if (stage == 0 and count >= top_k) or (stage == 1 and kept >= wanted):
                low = middle
            else:
                high = middle - 1
        threshold = bits_to_f32(np.uint32(low))
    return max(threshold, np.float32(min_p))  # the top token weighs 1, so min-p is a threshold as it stands


@njit
def _draw(z: Any, n: Any, top: Any, inverse_t: Any, threshold: Any, target: Any) -> Any:
    """First token whose cumulative kept weight exceeds `target`, by chunks, then inside the chunk."""
    before, last = 0.0, np.int64(0)
    for start in range(0, n, _CHUNK):
        stop = min(start + _CHUNK, n)
        if threshold == _ZERO:
            mass = np.float64(chunk_mass(z, start, stop, top, inverse_t))
            if before + mass <= target:
                before += mass
                continue
        for i in range(start, stop):
            w = exp_f32((z[i] - top) * inverse_t)
            if w >= threshold and w > _ZERO:
                before += np.float64(w)
                last = i
                if before > target:
                    return last
    return last


# logits [R, ld], ld, vocabulary, inverse T (float32 [R], 0 = greedy), top_k (int32), top_p, min_p (float32 [R]),
# counters (int64 [R, 4]: seed, group, sample, position), token (int32 out), logp, logp_behaviour (float32 out)
@kernel
def sample_rows(args: Any) -> None:
    """Draw one token a row and its two log-probs. One task a row."""
    n = args[5]
    inverse, top_k, top_p, min_p = f32p(args[6]), i32p(args[7]), f32p(args[8]), f32p(args[9])
    counter = i64p(args[10])
    token, logp, behaviour = i32p(args[11]), f32p(args[12]), f32p(args[13])
    while True:
        r = next_task(args)
        if r >= args[1]:
            break
        z = f32p(args[3] + r * args[4] * 4)
        top = row_top(z, n)
        greedy = inverse[r] == _ZERO
        inverse_t = np.float32(1.0) if greedy else inverse[r]
        mass = row_mass(z, n, top, inverse_t)
        kept_mass, choice = mass, np.int64(0)
        if greedy:
            while z[choice] != top and choice < n - 1:
                choice += 1
        else:
            threshold = _ZERO
            if 0 < top_k[r] < n or top_p[r] < np.float32(1.0) or min_p[r] > _ZERO:
                threshold = keep_threshold(z, n, top, inverse_t, mass, top_k[r], np.float64(top_p[r]), min_p[r])
                kept_mass = _kept(z, n, top, inverse_t, threshold)[1]
            u = philox(counter[r * 4], counter[r * 4 + 1], counter[r * 4 + 2], counter[r * 4 + 3])
            choice = _draw(z, n, top, inverse_t, threshold, u * kept_mass)
        token[r] = choice
        score = np.float64((z[choice] - top) * inverse_t)
        logp[r] = np.float32(score - math.log(mass))
        behaviour[r] = _ZERO if greedy else np.float32(score - math.log(kept_mass))


@njit
def _write_distribution(
    z: Any, n: Any, top: Any, inverse_t: Any, scale: Any, shift: Any, h: Any, p: Any, w: Any, is_bf16: Any
) -> None:
    """The distribution of a row at address p, and when w is not 0 also p·(log p + h) at w; bf16 or float32."""
    if is_bf16:
        p16 = u16p(p)
        for i in range(n):
            p16[i] = f32_to_bf16(exp_f32((z[i] - top) * inverse_t) * scale)
        if w != 0:
            w16 = u16p(w)
            for i in range(n):
                s = (z[i] - top) * inverse_t
                w16[i] = f32_to_bf16(exp_f32(s) * scale * (s - shift + h))
    else:
        p32 = f32p(p)
        for i in range(n):
            p32[i] = exp_f32((z[i] - top) * inverse_t) * scale
        if w != 0:
            w32 = f32p(w)
            for i in range(n):
                s = (z[i] - top) * inverse_t
                w32[i] = exp_f32(s) * scale * (s - shift + h)


# logits [R, ld], ld, vocabulary, inverse T (float32 [R]), target (int32 [R]), logp (out), entropy (out),
# probabilities [R, ldp] operand or 0, ldp, probabilities_bf16, log_weights [R, ldp] operand or 0
@kernel
def logp_rows(args: Any) -> None:
    """log-prob of a target and entropy of each row at its temperature; optionally p, and p·(log p + H)."""
    n, is_bf16 = args[5], args[12] != 0
    row_bytes = args[11] * (2 if is_bf16 else 4)
    inverse, target, logp, entropy = f32p(args[6]), i32p(args[7]), f32p(args[8]), f32p(args[9])
    while True:
        r = next_task(args)
        if r >= args[1]:
            break
        z = f32p(args[3] + r * args[4] * 4)
        inverse_t = inverse[r]
        top = row_top(z, n)
        mass = row_mass(z, n, top, inverse_t)
        log_mass = math.log(mass)
        logp[r] = np.float32(np.float64((z[target[r]] - top) * inverse_t) - log_mass)
        scale, shift = np.float32(1.0 / mass), np.float32(log_mass)
        lanes = stack_f32(16)
        for j in range(16):
            lanes[j] = _ZERO
        full = n - n % 16
        for i in range(0, full, 16):
            for j in range(16):
                s = (z[i + j] - top) * inverse_t
                lanes[j] += exp_f32(s) * scale * (shift - s)
        for i in range(full, n):
            s = (z[i] - top) * inverse_t
            lanes[i - full] += exp_f32(s) * scale * (shift - s)
        h = tree_sum(lanes)
        entropy[r] = h
        if args[10] != 0:
            w = args[13] + r * row_bytes if args[13] != 0 else 0
            _write_distribution(z, n, top, inverse_t, scale, shift, h, args[10] + r * row_bytes, w, is_bf16)
