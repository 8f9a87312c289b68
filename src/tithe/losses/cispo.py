"""CISPO (MiniMax-M1, arXiv 2506.13585 eq. 4 and 5): the weight is clipped, never the gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from tithe.losses.kl import LOG_RATIO_BOUND
from tithe.losses.packed import kept
from tithe.losses.policy import policy_loss
from tithe.losses.record import LossOutput, LossSettings, PolicyLossInput
from tithe.losses.surrogate import TokenLoss


def cispo(inp: PolicyLossInput, settings: LossSettings) -> LossOutput:
    """`policy_loss` with -sg[clip(r, 1-ε_low, 1+ε_high)]·A·log π: every token keeps a gradient, however far its ratio.

    The paper turns the lower clip off (`clip_range` 1) and averages over tokens (TOKEN_MEAN). The upper bound is
    1 + ε_high, as in verl; TRL's `epsilon_high` is that bound itself, so its 5 is our 4. The loss's value is no ratio
    and need not fall. `dual_clip` has no part in it.
    """
    return policy_loss(inp, settings, _clipped_weight)


def _clipped_weight(inp: PolicyLossInput, log_ratio_N: Tensor, settings: LossSettings) -> TokenLoss:
    ratio_N = torch.exp(log_ratio_N.detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    weight_N, none_N = ratio_N, torch.zeros_like(inp.mask)
    low_N = high_N = none_N
    if settings.ratio_bounds is not None:
        low, high = settings.ratio_bounds
        weight_N, low_N, high_N = ratio_N.clamp(low, high), ratio_N < low, ratio_N > high
    loss_N = -weight_N * kept(inp.advantage, inp.mask) * kept(inp.logp, inp.mask)
    return TokenLoss(loss_N, ratio_N, low_N, high_N, none_N)
