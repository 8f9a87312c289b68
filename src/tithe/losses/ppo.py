"""PPO's clipped loss (arXiv 1707.06347), with the dual clip of arXiv 1912.09729 where it is set."""

from __future__ import annotations

from tithe.losses.policy import policy_loss
from tithe.losses.record import LossOutput, LossSettings, PolicyLossInput
from tithe.losses.surrogate import token_ratio


def ppo(inp: PolicyLossInput, settings: LossSettings) -> LossOutput:
    """`policy_loss` with the clipped ratio of each token. With `clip_range` None the policy term is -A·r.

    What else makes it PPO is outside this loss: a critic's advantages (`advantages.gae`) and its own loss
    (`losses.value_loss`). The paper averages over tokens: TOKEN_MEAN.
    """
    return policy_loss(inp, settings, token_ratio)
