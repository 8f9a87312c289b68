"""DAPO's clipped loss (arXiv 2503.14476), the general form of which GRPO and Dr. GRPO are instances."""

from __future__ import annotations

import torch
from torch import Tensor

from tithe.losses.aggregation import token_weights
from tithe.losses.kl import KL_ESTIMATORS, LOG_RATIO_BOUND, k3
from tithe.losses.metrics import LossMetrics
from tithe.losses.record import LossOutput, LossSettings, PolicyLossInput


def dapo(inp: PolicyLossInput, settings: LossSettings) -> LossOutput:
    """Σ_t w_t · [ max(-A·r, -A·clip(r, 1-ε_low, 1+ε_high)) + kl_coef·KL_t - entropy_coef·H_t ] over trained tokens.

    r = π/π_old per token, π_old being the policy that sampled. w_t, which carries the denominator, comes from
    `settings.aggregation` and counts over the whole batch; the paper's is TOKEN_MEAN with ε_low 0.2, ε_high 0.28 and
    no KL. With `clip_range` None the policy term is -A·r. There is no dual clip: a token with A < 0 and a large r
    keeps its full gradient, as in TRL; verl caps it at c = 3.

    Log-ratios are set to 0 off the mask and bounded to ±20 *before* the exponential, so that loss and gradient are
    finite for any sample and a masked token adds exactly 0. A token beyond the bound passes no policy gradient.
    """
    mask_N = inp.mask
    log_ratio_N = _kept(inp.logp - inp.old_logp, mask_N)
    ratio_N = torch.exp(log_ratio_N.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    minus_advantage_N = -_kept(inp.advantage, mask_N)
    loss_N = minus_advantage_N * ratio_N
    clipped_N = torch.zeros_like(mask_N)
    if settings.ratio_bounds is not None:
        loss_at_bound_N = minus_advantage_N * ratio_N.clamp(*settings.ratio_bounds)
        clipped_N = loss_at_bound_N > loss_N
        loss_N = torch.maximum(loss_N, loss_at_bound_N)
    loss_N = loss_N + _kl_term(inp, settings) - _entropy_term(inp, settings)
    weights_N = token_weights(mask_N, inp.seq_index, inp.n_seqs, settings.aggregation, inp.denominators, inp.logp.dtype)
    return LossOutput(torch.sum(weights_N * loss_N), _metrics(inp, ratio_N.detach(), log_ratio_N.detach(), clipped_N))


def _kept(values_N: Tensor, mask_N: Tensor) -> Tensor:
    """`values_N` with 0 off the mask, in value and in gradient: a product with the mask would keep NaN and infinity."""
    return torch.where(mask_N, values_N, torch.zeros((), dtype=values_N.dtype, device=values_N.device))


def _kl_term(inp: PolicyLossInput, settings: LossSettings) -> Tensor | float:
    if settings.kl_coef == 0:
        return 0.0
    if inp.ref_logp is None:
        raise ValueError("kl_coef is set but the loss was given no ref_logp")
    estimate = KL_ESTIMATORS[settings.kl_estimator]
    return settings.kl_coef * estimate(_kept(inp.logp, inp.mask), _kept(inp.ref_logp, inp.mask))


def _entropy_term(inp: PolicyLossInput, settings: LossSettings) -> Tensor | float:
    if settings.entropy_coef == 0:
        return 0.0
    if inp.entropy is None:
        raise ValueError("entropy_coef is set but the loss was given no entropy")
    return settings.entropy_coef * _kept(inp.entropy, inp.mask)


@torch.no_grad()
def _metrics(inp: PolicyLossInput, ratio_N: Tensor, log_ratio_N: Tensor, clipped_N: Tensor) -> LossMetrics:
    mask_N = inp.mask

    def total(values_N: Tensor) -> Tensor:
        return _kept(values_N.double(), mask_N).sum()

    zeros_N = torch.zeros_like(log_ratio_N)
    kl = None if inp.ref_logp is None else total(k3(_kept(inp.logp, mask_N), _kept(inp.ref_logp, mask_N)))
    return LossMetrics(
        n_tokens=mask_N.sum().double(),
        clipped=total(clipped_N),
        ratio=total(ratio_N),
        ratio_squared=total(ratio_N.double().square()),
        ratio_max=_kept(ratio_N.double(), mask_N).max(),
        approx_kl=total(k3(zeros_N, log_ratio_N)),  # k3 of KL(π_old‖π): the sampler's policy takes the first place
        kl=kl,
        entropy=None if inp.entropy is None else total(inp.entropy),
    )
