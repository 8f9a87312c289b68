"""Advantages of a batch of groups, in the shape training takes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from tithe.advantages.group import group_advantages
from tithe.types import RolloutGroup


def batch_advantages(
    groups: Sequence[RolloutGroup], scale: str, rejected: Collection[tuple[int, int]] = ()
) -> list[list[NDArray[np.float32] | None]]:
    """What `TrainingBatch.advantages` holds: per group and rollout an FP32 array [T], one advantage on all its tokens.

    None for rollouts that failed, were not scored, or are `rejected` = {(group index, rollout index)}; see
    `group_advantages`. What is compared is a `RolloutGroup`, whatever its prompt's text: two groups of one text
    stay apart.

    >>> from tithe.types import FinishReason, Rollout
    >>> def rollout(sample, reward):
    ...     two = np.zeros(2, np.float32)
    ...     return Rollout(sample, np.ones(2, np.int32), np.ones(2, bool), two, two, np.zeros(2, np.int32), 1.0,
    ...                    FinishReason.STOP, reward=reward)
    >>> rollouts = (rollout(0, 1.0), rollout(1, 0.0), rollout(2, None))
    >>> batch_advantages([RolloutGroup(0, "p", np.array([5], np.int32), rollouts, 0, 0)], "none")
    [[array([0.5, 0.5], dtype=float32), array([-0.5, -0.5], dtype=float32), None]]
    """
    out: list[list[NDArray[np.float32] | None]] = []
    for g, group in enumerate(groups):
        rewards = [None if rollout.failure is not None else rollout.reward for rollout in group.rollouts]
        chosen = {r for r in range(len(rewards)) if (g, r) in rejected}
        advantages = group_advantages(rewards, scale, chosen)
        out.append(
            [
                None if advantage is None else np.full(len(rollout.token_ids), advantage, np.float32)
                for advantage, rollout in zip(advantages, group.rollouts, strict=True)
            ]
        )
    return out
