"""Advantages of a batch of groups, in the shape training takes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tithe.advantages.gae import gae
from tithe.advantages.group import SCALES
from tithe.advantages.group_relative import group_relative
from tithe.advantages.leave_one_out import leave_one_out
from tithe.advantages.reinforce_pp import reinforce_pp
from tithe.advantages.samples import AdvantageRule, Estimated, Estimator, Sample, Samples
from tithe.advantages.whitening import whiten
from tithe.errors import ConfigError
from tithe.types import RolloutGroup

ESTIMATORS: dict[str, Estimator] = {
    "gae": gae,
    "group": group_relative,
    "leave_one_out": leave_one_out,
    "reinforce_pp": reinforce_pp,
}
"""Name → advantages of one group."""

ESTIMATOR_OF: dict[str, str] = {
    "cispo": "group",
    "dapo": "group",
    "dr_grpo": "group",
    "grpo": "group",
    "gspo": "group",
    "ppo": "gae",
    "reinforce_pp": "reinforce_pp",
    "reinforce_pp_baseline": "group",
    "rloo": "leave_one_out",
}
"""`rl.algorithm` → its estimator."""

Nested = list[list[NDArray[np.float32] | None]]
"""Per group and rollout an FP32 array [T], or None."""


@dataclass(frozen=True, eq=False)
class BatchAdvantages:
    """What `TrainingBatch.advantages` holds, and the returns for a critic (None in all places without one)."""

    advantages: Nested
    returns: Nested


def batch_advantages(groups: Sequence[RolloutGroup], scale: str, rejected: Collection[tuple[int, int]] = ()) -> Nested:
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
    return estimate(samples_of(groups, rejected), AdvantageRule(scale=scale)).advantages


def samples_of(groups: Sequence[RolloutGroup], rejected: Collection[tuple[int, int]] = ()) -> list[list[Sample | None]]:
    """The usable rollouts of groups, with their rewards alone."""
    return [
        [
            None
            if rollout.failure is not None or rollout.reward is None or (g, r) in rejected
            else Sample(rollout.reward, rollout.loss_mask)
            for r, rollout in enumerate(group.rollouts)
        ]
        for g, group in enumerate(groups)
    ]


def estimate(samples: Samples, rule: AdvantageRule) -> BatchAdvantages:
    """Estimated group by group, then whitened over the batch's trained tokens where `rule.scale` is `batch`.

    Returns are never whitened. Raises `ConfigError` for an unknown estimator or scale, or one that the estimator does
    not have.
    """
    if rule.estimator not in ESTIMATORS:
        raise ConfigError(f"the estimators are {sorted(ESTIMATORS)}, not {rule.estimator!r}")
    if rule.scale not in SCALES:
        raise ConfigError(f"advantage_scale is one of {sorted(SCALES)}, not {rule.scale!r}", "rl.advantage_scale")
    if rule.scale == "std" and rule.estimator in ("gae", "reinforce_pp"):
        raise ConfigError(
            "advantage_scale = std divides by a group's deviation, and this algorithm compares no group; take batch",
            "rl.advantage_scale",
        )
    found = [ESTIMATORS[rule.estimator](group, rule) for group in samples]
    if rule.scale == "batch":
        found = _whitened(found, samples)
    return BatchAdvantages(
        [[None if one is None else one.advantage.astype(np.float32) for one in group] for group in found],
        [
            [None if one is None or one.returns is None else one.returns.astype(np.float32) for one in group]
            for group in found
        ],
    )


def _whitened(found: list[list[Estimated | None]], samples: Samples) -> list[list[Estimated | None]]:
    pairs = [
        (one, sample)
        for group, own in zip(found, samples, strict=True)
        for one, sample in zip(group, own, strict=True)
        if one is not None and sample is not None
    ]
    white = iter(whiten([one.advantage for one, _ in pairs], [sample.mask for _, sample in pairs]))
    return [[None if one is None else Estimated(next(white), one.returns) for one in group] for group in found]
