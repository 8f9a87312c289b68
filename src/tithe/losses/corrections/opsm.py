"""Off-policy sequence masking (DeepSeek-V3.2; miles' and slime's `compute_opsm_mask`)."""

from __future__ import annotations

import torch

from tithe.losses.corrections.correction import Correction
from tithe.losses.packed import kept, seq_mean
from tithe.losses.record import CorrectionSettings, PolicyLossInput


@torch.no_grad()
def opsm(inp: PolicyLossInput, settings: CorrectionSettings) -> Correction:
    """Leave out tokens with A < 0 of rollouts from which the policy has drifted by more than `high` nats a token,
    mean(old_logp - logp): pushing further away from what is no longer said teaches nothing and diverges.

    The ratio stays one against the sampler and weights are 1. What is left out stays in the denominator.
    """
    if settings.high is None:
        raise ValueError("the correction opsm needs a bound (high)")
    drift_Q = seq_mean(kept(inp.old_logp - inp.logp, inp.mask), inp.mask, inp.seq_index, inp.n_seqs)
    rejected_N = inp.mask & (inp.advantage < 0) & (drift_Q > settings.high)[inp.seq_index]
    weight_N = (inp.mask & ~rejected_N).to(inp.logp.dtype)
    return Correction(inp.old_logp, weight_N, torch.zeros_like(inp.mask), rejected_N)
