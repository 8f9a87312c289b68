"""DAPO's loss (arXiv 2503.14476), the general form of which GRPO and Dr. GRPO are instances."""

from __future__ import annotations

from tithe.losses.ppo import ppo
from tithe.losses.record import LossOutput, LossSettings, PolicyLossInput


def dapo(inp: PolicyLossInput, settings: LossSettings) -> LossOutput:
    """PPO's loss with a higher upper clip: the paper's is TOKEN_MEAN with ε_low 0.2, ε_high 0.28 and no KL.

    Outside the loss: groups without spread are replaced, and answers cut at the length limit are punished softly or
    left out (`advantages.overlong`). Without `dual_clip` a token with A < 0 and a large r keeps its full gradient, as
    in TRL; verl caps it at c = 3.
    """
    return ppo(inp, settings)
