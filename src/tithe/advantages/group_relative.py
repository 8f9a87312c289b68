"""GRPO's estimator (arXiv 2402.03300): the reward less the group's mean, the same on every token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tithe.advantages.group import group_advantages
from tithe.advantages.samples import AdvantageRule, Estimated, Sample


def group_relative(group: Sequence[Sample | None], rule: AdvantageRule) -> list[Estimated | None]:
    """`group_advantages` with `rule.scale`, less the penalties still to come. These are taken away after the rewards
    are centred and scaled: a group of equal rewards would otherwise be scaled up to full-size advantages made of KL
    noise alone."""
    rewards = [None if sample is None else sample.reward for sample in group]
    advantages = group_advantages(rewards, "std" if rule.scale == "std" else "none")
    return [
        None
        if sample is None or advantage is None
        else Estimated(np.full(len(sample.mask), advantage) - sample.to_come())
        for sample, advantage in zip(group, advantages, strict=True)
    ]
