"""The general policy loss: a surrogate per token, a correction, a KL, an entropy bonus, one denominator.

Every named algorithm is this function with one of the surrogates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tithe.losses.aggregation import token_weights
from tithe.losses.corrections import CORRECTIONS, Correction
from tithe.losses.kl import KL_ESTIMATORS, LOG_RATIO_BOUND, k3
from tithe.losses.metrics import LossMetrics
from tithe.losses.packed import kept, seq_lengths, seq_sum
from tithe.losses.record import LossOutput, LossSettings, PolicyLossInput
from tithe.losses.surrogate import Surrogate, TokenLoss


def policy_loss(inp: PolicyLossInput, settings: LossSettings, surrogate: Surrogate) -> LossOutput:
    """Σ_t w_t · [ c_t·surrogate_t + kl_coef·KL_t - entropy_coef·H_t ] over trained tokens.

    w_t carries the denominator (`settings.aggregation`, counted over the whole batch), c_t is the weight of the
    correction, without gradient: 1 where none is chosen, 0 on tokens that it rejects. These stay in the denominator, as
    in AReaL: otherwise a batch of which half is rejected would push the rest twice as hard. The ratio is taken against
    the correction's anchor. Log-ratios are 0 off the mask and bounded *before* any exponential, so that loss and
    gradient are finite for any sample and a masked token adds exactly 0.
    """
    correction = CORRECTIONS[settings.correction.name](inp, settings.correction)
    log_ratio_N = kept(inp.logp - correction.anchor, inp.mask)
    token = surrogate(inp, log_ratio_N, settings)
    loss_N = token.loss if correction.weight is None else token.loss * correction.weight
    loss_N = loss_N + _kl_term(inp, log_ratio_N, settings) - _entropy_term(inp, settings)
    weights_N = token_weights(
        inp.mask, inp.seq_index, inp.n_seqs, settings.aggregation, inp.denominators, inp.logp.dtype
    )
    return LossOutput(torch.sum(weights_N * loss_N), _metrics(inp, token, log_ratio_N.detach(), correction))


def _kl_term(inp: PolicyLossInput, log_ratio_N: Tensor, settings: LossSettings) -> Tensor | float:
    """At `kl_level` sequence the estimate is that of the rollout's whole log-ratio, a share 1/|o| on each token."""
    if settings.kl_coef == 0:
        return 0.0
    if inp.ref_logp is None:
        raise ValueError("kl_coef is set but the loss was given no ref_logp")
    estimate = KL_ESTIMATORS[settings.kl_estimator]
    logp_N, ref_N = kept(inp.logp, inp.mask), kept(inp.ref_logp, inp.mask)
    where = (inp.mask, inp.seq_index, inp.n_seqs)
    if settings.kl_level == "sequence":
        kl_N = estimate(seq_sum(logp_N, *where), seq_sum(ref_N, *where))[inp.seq_index]
        kl_N = kl_N / seq_lengths(*where).to(kl_N.dtype)[inp.seq_index]
        log_ratio_N = seq_sum(log_ratio_N, *where)[inp.seq_index]
    else:
        kl_N = estimate(logp_N, ref_N)
    if settings.kl_unbiased:
        kl_N = kl_N * torch.exp(log_ratio_N.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    return settings.kl_coef * kl_N


def _entropy_term(inp: PolicyLossInput, settings: LossSettings) -> Tensor | float:
    if settings.entropy_coef == 0:
        return 0.0
    if inp.entropy is None:
        raise ValueError("entropy_coef is set but the loss was given no entropy")
    return settings.entropy_coef * kept(inp.entropy, inp.mask)


@torch.no_grad()
def _metrics(inp: PolicyLossInput, token: TokenLoss, log_ratio_N: Tensor, correction: Correction) -> LossMetrics:
    mask_N = inp.mask

    def total(values_N: Tensor) -> Tensor:
        return kept(values_N.double(), mask_N).sum()

    def drawn_kl(logp_N: Tensor, drawn_from_N: Tensor) -> Tensor:
        """k3 of KL(drawn_from‖logp): what the tokens were drawn from takes the first place."""
        return total(k3(kept(drawn_from_N, mask_N), kept(logp_N, mask_N)))

    prox = inp.prox_logp
    weight_N = torch.ones_like(log_ratio_N) if correction.weight is None else correction.weight
    importance_N = weight_N.double() * token.ratio.double()
    return LossMetrics(
        n_tokens=mask_N.sum().double(),
        clipped=total(token.clipped_low | token.clipped_high),
        clipped_high=total(token.clipped_high),
        dual_clipped=total(token.dual_clipped),
        ratio=total(token.ratio),
        ratio_max=kept(token.ratio.double(), mask_N).max(),
        weight=total(weight_N),
        capped=total(correction.capped),
        rejected=total(correction.rejected),
        importance=total(importance_N),
        importance_squared=total(importance_N.square()),
        approx_kl=total(k3(torch.zeros_like(log_ratio_N), log_ratio_N)),
        sampler_kl=None if prox is None else drawn_kl(prox, inp.old_logp),
        update_kl=None if prox is None else drawn_kl(inp.logp, prox),
        kl=None if inp.ref_logp is None else drawn_kl(inp.ref_logp, inp.logp),
        entropy=None if inp.entropy is None else total(inp.entropy),
    )
