"""Rewards in units of their own running standard deviation (`reward.normalise: running`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from tithe.types import RolloutGroup

MIN_SCALE = 1e-6
"""A smaller deviation is taken for none, and rewards stay as they are."""


class RunningScale:
    """Divides the rewards of a batch by the standard deviation of every reward trained on, this batch included. Means
    stay: group baselines take them away.

    A pure function of what the pool holds, so that a resumed run scales as the unbroken one: `trained` gives the
    rewards of batches trained after the given one, and the batch each belongs to. Sums are exactly rounded, so the
    order of rows does not matter. Failed and abstained rollouts count nowhere.
    """

    def __init__(self, trained: Callable[[int], Sequence[tuple[int, float]]]) -> None:
        self._trained = trained
        self._seen = -1
        self._rewards: list[float] = []

    def __call__(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """The groups with scaled rewards; what the pool holds does not change."""
        for serial, reward in self._trained(self._seen):
            self._rewards.append(reward)
            self._seen = max(self._seen, serial)
        rewards = [r.reward for group in groups for r in group.rollouts if r.failure is None and r.reward is not None]
        scale = deviation([*self._rewards, *rewards])
        return [
            replace(
                group,
                rollouts=tuple(r if r.reward is None else replace(r, reward=r.reward / scale) for r in group.rollouts),
            )
            for group in groups
        ]


def deviation(rewards: Sequence[float]) -> float:
    """Population standard deviation, the same for any order; 1 when it is none.

    >>> deviation([0.0, 2.0, 0.0, 2.0]), deviation([3.0, 3.0])
    (1.0, 1.0)
    """
    if len(rewards) < 2:
        return 1.0
    mean = math.fsum(rewards) / len(rewards)
    found = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return found if found > MIN_SCALE else 1.0
