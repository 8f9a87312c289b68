"""Kernels of routing: which experts a token takes, how they weigh, and the gradient of the weights.

One row at a time, every sum in a fixed order: a row's experts do not depend on the rows around it. Argument order is
written above each kernel; a pointer is an integer address.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from tithe.models.kernels import tree_sum
from tithe.quant.runtime import as_float, exp_f32, f32p, i32p, kernel, next_slot, next_task, stack_f32

ROWS_PER_TASK = 16
SOFTMAX, SIGMOID = 0, 1
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_TINY = np.float32(1e-20)  # what the reference adds to a sum of sigmoids before it divides
_LOWEST = np.float32(-np.inf)


@njit(inline="always")
def _sigmoid(x: Any) -> Any:
    return _ONE / (_ONE + exp_f32(-x))


@njit
def _softmax(logits: Any, n: Any, out: Any) -> None:
    """out[0:n] = softmax of n logits, summed in 16 lanes and a fixed tree."""
    top = logits[0]
    for i in range(1, n):
        top = max(top, logits[i])
    lanes = stack_f32(16)
    for j in range(16):
        lanes[j] = _ZERO
    for i in range(n):
        out[i] = exp_f32(logits[i] - top)
        lanes[i % 16] += out[i]
    total = tree_sum(lanes)
    for i in range(n):
        out[i] = out[i] / total


@njit
def _best(keys: Any, first: Any, last: Any) -> Any:
    """The lowest index of the largest key in first..last; `last` when all are -inf (or not numbers)."""
    found, best = last, _LOWEST
    for i in range(first, last):
        if keys[i] > best:
            found, best = i, keys[i]
    return found


@njit
def _limit_groups(keys: Any, experts: Any, groups: Any, chosen: Any, score: Any) -> None:
    """Put the keys of all but the best groups at -inf; a group's score is the sum of its two largest keys."""
    size = experts // groups
    for g in range(groups):
        first, second = _LOWEST, _LOWEST
        for i in range(g * size, (g + 1) * size):
            if keys[i] > first:
                first, second = keys[i], first
            elif keys[i] > second:
                second = keys[i]
        score[g] = first + second if size > 1 else first
    for _ in range(chosen):
        g = _best(score, 0, groups)
        if g < groups:
            score[g] = _LOWEST
            for i in range(g * size, (g + 1) * size):
                keys[experts + i] = _ONE
    for i in range(experts):
        if keys[experts + i] == _ZERO:
            keys[i] = _LOWEST


@njit
def _sort(ids: Any, n: Any) -> None:
    """Ascending, in place."""
    for i in range(1, n):
        value, j = ids[i], i
        while j > 0 and ids[j - 1] > value:
            ids[j] = ids[j - 1]
            j -= 1
        ids[j] = value


@njit
def _choose(keys: Any, experts: Any, k: Any, ids: Any) -> None:
    """The k largest keys as ids in ascending order; of equal keys the lowest id, and where no number is left."""
    for i in range(experts):
        keys[experts + i] = _ZERO
    for j in range(k):
        found = _best(keys, 0, experts)
        if found == experts:
            found = 0
            while keys[experts + found] != _ZERO:
                found += 1
        keys[found] = _LOWEST
        keys[experts + found] = _ONE
        ids[j] = found
    _sort(ids, k)


@njit
def _weigh(logits: Any, experts: Any, ids: Any, k: Any, how: Any, scores: Any, out: Any) -> None:
    """Weights of the chosen experts; how = (scoring, normalise, scale); scores is scratch."""
    scoring, normalise, scale = how
    if scoring == SIGMOID:
        for j in range(k):
            out[j] = _sigmoid(logits[ids[j]])
        if normalise:
            total = _ZERO
            for j in range(k):
                total += out[j]
            for j in range(k):
                out[j] = out[j] / (total + _TINY)
    elif normalise:  # of a softmax, normalised over the chosen: the softmax of the chosen
        for j in range(k):
            scores[j] = logits[ids[j]]
        _softmax(scores, k, out)
    else:
        _softmax(logits, experts, scores)
        for j in range(k):
            out[j] = scores[ids[j]]
    for j in range(k):
        out[j] = out[j] * scale


# logits [R, E], E, k, scoring, normalise, scale, groups, groups chosen, correction [E] or 0, replay [R, k] int32 or 0,
# ids out [R, k] int32, weights out [R, k], agreement out [R] int32, scratch [threads, 2E + groups], R
@kernel
def route_rows(args: Any) -> None:
    """Ids, weights, and whether a replayed choice is the row's own (1, 0; -1: its own choice was taken)."""
    experts, k, scoring = args[4], args[5], args[6]
    how = (scoring, args[7] != 0, np.float32(as_float(args[8])))
    groups, correction, replay = args[9], args[11], args[12]
    base = args[16] + next_slot(args) * (2 * experts + groups) * 4
    keys, score = f32p(base), f32p(base + 2 * experts * 4)
    while True:
        t = next_task(args)
        if t >= args[1]:
            break
        for r in range(t * ROWS_PER_TASK, min((t + 1) * ROWS_PER_TASK, args[17])):
            logits = f32p(args[3] + r * experts * 4)
            ids = i32p(args[13] + r * k * 4)
            for i in range(experts):
                keys[i] = logits[i] if scoring == SOFTMAX else _sigmoid(logits[i])
                keys[experts + i] = _ZERO
                if correction != 0:
                    keys[i] += f32p(correction)[i]
            if groups > 1:
                _limit_groups(keys, experts, groups, args[10], score)
            _choose(keys, experts, k, ids)
            agreement = np.int32(-1)
            if replay != 0 and i32p(replay)[r * k] >= 0:
                given = i32p(replay + r * k * 4)
                agreement = np.int32(1)
                for j in range(k):
                    if keys[experts + given[j]] == _ZERO:
                        agreement = np.int32(0)
                for j in range(k):
                    ids[j] = given[j]
                _sort(ids, k)
            i32p(args[15])[r] = agreement
            _weigh(logits, experts, ids, k, how, keys, f32p(args[14] + r * k * 4))


# logits [R, E], E, k, scoring, normalise, scale, ids [R, k], d_weights [R, k], d_logits out [R, E],
# scratch [threads, 2E], R
@kernel
def route_rows_backward(args: Any) -> None:
    """d_logits = the gradient of the weights; ids (and the correction, which only chooses) have none."""
    experts, k, scoring, normalise = args[4], args[5], args[6], args[7] != 0
    scale = np.float32(as_float(args[8]))
    base = args[12] + next_slot(args) * 2 * experts * 4
    scores, weights = f32p(base), f32p(base + experts * 4)
    while True:
        t = next_task(args)
        if t >= args[1]:
            break
        for r in range(t * ROWS_PER_TASK, min((t + 1) * ROWS_PER_TASK, args[13])):
            logits, out = f32p(args[3] + r * experts * 4), f32p(args[11] + r * experts * 4)
            ids, dw = i32p(args[9] + r * k * 4), f32p(args[10] + r * k * 4)
            for i in range(experts):
                out[i] = _ZERO
            _weigh(logits, experts, ids, k, (scoring, normalise, _ONE), scores, weights)
            share = _ZERO  # Σ weight · gradient, which any normalisation takes from every gradient
            for j in range(k):
                share += weights[j] * dw[j]
            if scoring == SIGMOID:
                total = _ZERO
                for j in range(k):
                    total += _sigmoid(logits[ids[j]])
                for j in range(k):
                    s = _sigmoid(logits[ids[j]])
                    d = (dw[j] - share) / (total + _TINY) if normalise else dw[j]
                    out[ids[j]] = scale * d * s * (_ONE - s)
            elif normalise:
                for j in range(k):
                    out[ids[j]] = scale * weights[j] * (dw[j] - share)
            else:
                _softmax(logits, experts, scores)
                for i in range(experts):
                    out[i] = -scale * scores[i] * share
                for j in range(k):
                    out[ids[j]] += scale * weights[j] * dw[j]
