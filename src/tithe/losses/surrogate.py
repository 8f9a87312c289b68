"""The per-token policy term, before any weight, KL or denominator: a ratio, an advantage, and what bounds them.

Shape legend: _N completion tokens of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tithe.losses.kl import LOG_RATIO_BOUND
from tithe.losses.packed import kept
from tithe.losses.record import LossSettings, PolicyLossInput


@dataclass(frozen=True, eq=False)
class TokenLoss:
    """`loss` [N] with gradient and `ratio` [N]; which tokens the lower, the upper or the dual clip decided (bool
    [N])."""

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    dual_clipped: Tensor


Surrogate = Callable[[PolicyLossInput, Tensor, LossSettings], TokenLoss]
"""(input, log π - log of what the ratio is against [N], 0 off the mask; settings) → the token losses."""


def token_ratio(inp: PolicyLossInput, log_ratio_N: Tensor, settings: LossSettings) -> TokenLoss:
    """`clipped` at each token's own ratio, bounded to e^±20 before the exponential; beyond it no gradient passes."""
    ratio_N = torch.exp(log_ratio_N.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    return clipped(ratio_N, kept(inp.advantage, inp.mask), settings)


def clipped(ratio_N: Tensor, advantage_N: Tensor, settings: LossSettings) -> TokenLoss:
    """max(-A·r, -A·clip(r, 1-ε_low, 1+ε_high)) per token; for A < 0 at most -c·A where `dual_clip` c is set
    (arXiv 1912.09729; verl: always, with c = 3; TRL: not). A token that a clip decides passes no gradient.
    """
    loss_N = -advantage_N * ratio_N
    none_N = torch.zeros_like(ratio_N, dtype=torch.bool)
    low_N = high_N = dual_N = none_N
    if settings.ratio_bounds is not None:
        at_bound_N = -advantage_N * ratio_N.clamp(*settings.ratio_bounds)
        binds_N = at_bound_N > loss_N
        low_N, high_N = binds_N & (advantage_N < 0), binds_N & (advantage_N > 0)
        loss_N = torch.maximum(loss_N, at_bound_N)
    if settings.dual_clip is not None:
        ceiling_N = -advantage_N * settings.dual_clip
        dual_N = (advantage_N < 0) & (loss_N > ceiling_N)
        loss_N = torch.where(dual_N, ceiling_N, loss_N)
    return TokenLoss(loss_N, ratio_N.detach(), low_N, high_N, dual_N)
