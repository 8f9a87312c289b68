"""What a correction gives, and the general one: weights of the trainer's own policy over the one that sampled.

Shape legend: _N completion tokens of one micro-batch, _Q its rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tithe.losses.kl import LOG_RATIO_BOUND
from tithe.losses.packed import kept, seq_mean, seq_sum
from tithe.losses.record import CorrectionSettings, Level, PolicyLossInput


@dataclass(frozen=True, eq=False)
class Correction:
    """`anchor` [N]: the log-probs that the ratio is taken against. `weight` [N]: factor of the policy term without
    gradient, 0 where rejected; None is 1 everywhere. `capped` and `rejected` (bool [N]) say which tokens a bound
    changed or left out."""

    anchor: Tensor
    weight: Tensor | None
    capped: Tensor
    rejected: Tensor


CorrectionFn = Callable[[PolicyLossInput, CorrectionSettings], Correction]
"""A named correction. Raises `ValueError` when the log-probs it needs are missing."""


@torch.no_grad()
def importance(inp: PolicyLossInput, settings: CorrectionSettings, *, reject: bool) -> Correction:
    """w = π_prox/π_behaviour at `settings.level`, outside its bounds cut to `high` or (`reject`) set to 0.

    The anchor is the policy with which the batch began. The denominator is the probability with which the token was
    drawn, renormalised over what top-p, top-k and min-p kept. At level `sequence` a rollout's tokens share the product
    of its ratios (unbiased, and its spread grows with the length), at `geometric` their geometric mean, as many
    tokens of a small and equal difference should weigh as one. Logarithms are bounded to ±20 before the exponential.
    `veto` counts tokens one by one at every level.
    """
    if inp.prox_logp is None:
        raise ValueError(f"the correction {settings.name} was given no prox_logp")
    behaviour = inp.old_logp if inp.behaviour_logp is None else inp.behaviour_logp
    own_N = kept(inp.prox_logp - behaviour, inp.mask)
    bounded_N = at_level(own_N, inp, settings.level).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    weight_N = kept(torch.exp(bounded_N), inp.mask)
    none_N = torch.zeros_like(inp.mask)
    high = math.inf if settings.high is None else settings.high
    capped_N, rejected_N = none_N, none_N
    if reject:
        rejected_N = inp.mask & ((weight_N < settings.low) | (weight_N > high))
    else:
        capped_N = inp.mask & (weight_N > high)
        weight_N = weight_N.clamp(max=high)
    if settings.veto is not None:
        hopeless_N = inp.mask & (own_N < math.log(settings.veto))
        rejected_N = rejected_N | (inp.mask & _any_of_rollout(hopeless_N, inp))
    return Correction(inp.prox_logp, torch.where(rejected_N, 0.0, weight_N), capped_N, rejected_N)


def at_level(log_ratio_N: Tensor, inp: PolicyLossInput, level: Level) -> Tensor:
    """Log-ratios [N] as they are, or their rollout's sum or mean on each of its tokens."""
    if level == "token":
        return log_ratio_N
    combine = seq_sum if level == "sequence" else seq_mean
    return combine(log_ratio_N, inp.mask, inp.seq_index, inp.n_seqs)[inp.seq_index]


def _any_of_rollout(which_N: Tensor, inp: PolicyLossInput) -> Tensor:
    return (torch.bincount(inp.seq_index[which_N], minlength=inp.n_seqs) > 0)[inp.seq_index]
