"""GRPO (DeepSeekMath, arXiv 2402.03300): PPO's loss without a critic, with equal clips."""

from __future__ import annotations

from tithe.losses.ppo import ppo
from tithe.losses.record import LossOutput, LossSettings, PolicyLossInput


def grpo(inp: PolicyLossInput, settings: LossSettings) -> LossOutput:
    """PPO's loss where ε_high is ε_low (leave `clip_range_high` out) and a k3 term holds the policy near the reference.

    The paper's denominator is SEQ_MEAN_TOKEN_MEAN (1/|o| inside, 1/G outside); most recipes since DAPO use TOKEN_MEAN.
    What else makes it GRPO is outside the loss: advantages centred and scaled by their group.
    """
    return ppo(inp, settings)
