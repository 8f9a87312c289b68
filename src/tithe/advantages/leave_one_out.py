"""RLOO's estimator (arXiv 2402.14740): the reward less the mean of the *other* rewards of the group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tithe.advantages.group_relative import group_relative
from tithe.advantages.samples import AdvantageRule, Estimated, Sample


def leave_one_out(group: Sequence[Sample | None], rule: AdvantageRule) -> list[Estimated | None]:
    """R_i - mean of R_j over j ≠ i, which is the centred reward times G/(G - 1), with G the usable rollouts; less the
    penalties still to come. Unbiased, where the group's mean holds a share 1/G of the reward itself.

    A rollout left alone has nothing to be compared with: 0. (verl lets it keep its bare reward.)
    """
    n = sum(sample is not None for sample in group)
    rewards = [None if sample is None else replace(sample, penalty=None) for sample in group]
    centred = group_relative(rewards, rule)
    factor = n / (n - 1) if n > 1 else 0.0
    return [
        None if sample is None or one is None else Estimated(one.advantage * factor - sample.to_come())
        for sample, one in zip(group, centred, strict=True)
    ]
