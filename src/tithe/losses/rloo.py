"""RLOO (arXiv 2402.14740): REINFORCE with the mean of the *other* answers as the baseline."""

from __future__ import annotations

from tithe.losses.ppo import ppo
from tithe.losses.record import LossOutput, LossSettings, PolicyLossInput


def rloo(inp: PolicyLossInput, settings: LossSettings) -> LossOutput:
    """PPO's loss; on-policy its gradient is the paper's -A·∇log π. The clip bounds what is not, token by token; TRL
    clips the ratio of the whole answer.

    The paper sums over a rollout and averages over rollouts: SEQ_MEAN_TOKEN_SUM. Its baseline is in
    `advantages.leave_one_out`.
    """
    return ppo(inp, settings)
