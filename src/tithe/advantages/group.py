"""Group-relative advantages: a rollout is judged against the other answers to the same prompt.

Shape legend: _G rollouts of one group that have a usable reward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from tithe.errors import ConfigError

STD_EPSILON = 1e-6
"""Added to the standard deviation, in reward units. verl adds 1e-6 too, TRL 1e-4, which makes at most 0.03 % of
difference on 0/1 rewards in groups of 8; both take the sample deviation (ddof = 1), as here."""

EQUAL_REL = float(np.finfo(np.float32).eps)
"""Rewards closer than this share of the largest are equal: what is computed in FP32 differs by as much for nothing."""


def _scale_none(centred_G: NDArray[np.float64]) -> NDArray[np.float64]:
    return centred_G


def _scale_std(centred_G: NDArray[np.float64]) -> NDArray[np.float64]:
    deviation = math.sqrt(float(np.square(centred_G).sum()) / (len(centred_G) - 1))
    return centred_G / (deviation + STD_EPSILON)


SCALES: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "batch": _scale_none,
    "none": _scale_none,
    "std": _scale_std,
}
"""`rl.advantage_scale` → what is done to a group's centred rewards. `std` is GRPO's (arXiv 2402.03300); `none` is
Dr. GRPO's (arXiv 2503.20783), which shows that dividing favours prompts that are nearly always or nearly never solved;
`batch` leaves them for `whiten`, which scales over the whole batch (REINFORCE++, arXiv 2501.03262, and PPO)."""


def group_advantages(rewards: Sequence[float | None], scale: str, rejected: Collection[int] = ()) -> list[float | None]:
    """One advantage per rollout of a group, in order; None where there is no usable reward.

    A reward of None (abstained, failed) and the positions in `rejected` (too old, ratio out of bounds) get None and
    have no part in mean or deviation: a rollout that is not trained must not push those that are. If the rest are
    equal (by maximum minus minimum, since the deviation of equal FP32 numbers need not be 0), all advantages are
    exactly 0. So is that of a rollout left alone, which has nothing to be compared with; verl lets it keep its bare
    reward.

    Raises `ConfigError` for an unknown scale and `ValueError` for a reward that is not finite.

    >>> group_advantages([1.0, 0.0, None, 0.0, 1.0], "none")
    [0.5, -0.5, None, -0.5, 0.5]
    >>> group_advantages([60.0, 1.0, 3.0], "none", rejected=[0])
    [None, -1.0, 1.0]
    """
    if scale not in SCALES:
        raise ConfigError(f"advantage_scale is one of {sorted(SCALES)}, not {scale!r}", "rl.advantage_scale")
    kept = {i: reward for i, reward in enumerate(rewards) if reward is not None and i not in rejected}
    wrong = {i: reward for i, reward in kept.items() if not math.isfinite(reward)}
    if wrong:
        raise ValueError(f"a reward is a finite number; of this group's rollouts {wrong} are not")
    if not kept:
        return [None] * len(rewards)
    rewards_G = np.array(list(kept.values()), np.float64)
    if not has_spread(rewards_G):
        advantages_G = np.zeros_like(rewards_G)
    else:
        advantages_G = SCALES[scale](rewards_G - rewards_G.mean())
    by_position = dict(zip(kept, advantages_G.tolist(), strict=True))
    return [by_position.get(i) for i in range(len(rewards))]


def has_spread(rewards: Sequence[float] | NDArray[np.float64]) -> bool:
    """Whether rewards differ by more than rounding: only then has a group something to teach.

    >>> has_spread([0.7] * 7), has_spread([0.0, 1.0]), has_spread([])
    (False, True, False)
    """
    values = np.asarray(rewards, np.float64)
    return len(values) > 0 and bool(np.ptp(values) > EQUAL_REL * np.abs(values).max())
