"""REINFORCE++ (arXiv 2501.03262): PPO's loss without a critic, advantages whitened over the batch."""

from __future__ import annotations

from tithe.losses.ppo import ppo
from tithe.losses.record import LossOutput, LossSettings, PolicyLossInput


def reinforce_pp(inp: PolicyLossInput, settings: LossSettings) -> LossOutput:
    """PPO's loss at TOKEN_MEAN. Its advantages, with a baseline or without, are in `advantages.reinforce_pp`."""
    return ppo(inp, settings)
