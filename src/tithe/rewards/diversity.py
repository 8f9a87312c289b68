"""How alike the completions of one group are, and what that costs them.

Shape legend: _G rollouts of one group, _U distinct n-grams of the group, _T tokens of a completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # workers do without the carriers
    from tithe.types import Rollout

NGRAM = 3
PART = "group.diversity"
"""Name of the penalty among a rollout's reward parts."""

_BITS = 21
_NO_TOKEN = (1 << _BITS) - 1
"""Fills completions shorter than an n-gram. Token ids are smaller: three of them are one int64, exactly."""


def mean_overlap(completions: Sequence[NDArray[np.int32]]) -> NDArray[np.float64]:
    """For each completion (token ids [T]) its mean overlap with the others of its group, FP64 [G] in [0, 1].

    The overlap of two is the Jaccard index of their sets of 3-grams, those of both by those of either: 1 for equal
    texts, 0 for texts without a common 3-gram; a completion of fewer than three tokens is one gram as a whole. 0 for a
    completion without companions. (Self-BLEU, arXiv 1802.01886, scores the same likeness by precision, which is not
    symmetric.)

    >>> mean_overlap([np.array(ids, np.int32) for ids in ([1, 2, 3, 4], [1, 2, 3, 4], [7, 8])])
    array([0.5, 0.5, 0. ])
    """
    n = len(completions)
    if n < 2:
        return np.zeros(n)
    grams = [np.unique(_grams(ids)) for ids in completions]
    distinct_U, place = np.unique(np.concatenate(grams), return_inverse=True)
    has_GU = np.zeros((n, len(distinct_U)), np.float32)  # whole numbers below 2^24 are exact
    has_GU[np.repeat(np.arange(n), [len(own) for own in grams]), place] = 1.0
    common_GG = (has_GU @ has_GU.T).astype(np.float64)
    size_G = np.diag(common_GG)
    overlap_GG = common_GG / (size_G[:, None] + size_G[None, :] - common_GG)
    return (overlap_GG.sum(axis=1) - 1.0) / (n - 1)


def _grams(ids: NDArray[np.int32]) -> NDArray[np.int64]:
    padded = np.full(max(NGRAM, len(ids)), _NO_TOKEN, np.int64)
    padded[: len(ids)] = ids
    first, second, third = padded[:-2], padded[1:-1], padded[2:]
    return first << 2 * _BITS | second << _BITS | third


def unpenalised(rollout: Rollout) -> float | None:
    """A rollout's reward before `penalise_likeness`: what says whether a prompt is solved, and whether its completions
    differ in what they are worth; None for one without reward."""
    return None if rollout.reward is None else rollout.reward - rollout.reward_parts.get(PART, 0.0)


def penalise_likeness(rollouts: Sequence[Rollout], coef: float) -> tuple[Rollout, ...]:
    """The group with `coef` x mean overlap taken off every reward, kept as the part `PART`.

    Only scored rollouts are compared and charged. What all of a group share cancels in its mean: a group of copies
    is charged alike and learns nothing from it, and one that differs from seven copies gains on them.
    """
    scored = [i for i, rollout in enumerate(rollouts) if rollout.failure is None and rollout.reward is not None]
    charged = list(rollouts)
    for i, overlap in zip(scored, mean_overlap([rollouts[i].token_ids for i in scored]), strict=True):
        rollout, charge = rollouts[i], -coef * float(overlap)
        assert rollout.reward is not None
        parts = {**rollout.reward_parts, PART: charge}
        charged[i] = replace(rollout, reward=rollout.reward + charge, reward_parts=parts)
    return tuple(charged)
