"""Dr. GRPO (arXiv 2503.20783): GRPO's loss without its two biases."""

from __future__ import annotations

from tithe.losses.ppo import ppo
from tithe.losses.record import LossOutput, LossSettings, PolicyLossInput


def dr_grpo(inp: PolicyLossInput, settings: LossSettings) -> LossOutput:
    """PPO's loss with equal clips and SEQ_MEAN_TOKEN_SUM_NORM: a constant length in place of 1/|o|, which made long
    wrong rollouts cheap. Its other half is outside the loss: advantages are centred and not divided by the group's
    spread.
    """
    return ppo(inp, settings)
