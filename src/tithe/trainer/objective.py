"""From a micro-batch and its scored tokens to what the loss takes: the same for adapters and for whole models."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tithe.advantages import with_kl_penalty
from tithe.losses import Denominators, PolicyLossInput
from tithe.packing import MicroBatch
from tithe.trainer.settings import TrainerSettings


def loss_input(
    micro: MicroBatch,
    logp: Tensor,
    entropy: Tensor,
    reference: np.ndarray | None,
    denominators: Denominators,
    settings: TrainerSettings,
) -> PolicyLossInput:
    """`logp` and `entropy` [N] are the policy's, `reference` [N] its reference's log-probs (None: no KL)."""
    advantage = micro.advantage
    if reference is not None and settings.kl_placement == "reward":
        advantage = _penalised(micro, reference, settings.kl_coef)
    return PolicyLossInput(
        logp=logp,
        old_logp=torch.from_numpy(micro.old_logp),
        advantage=torch.from_numpy(advantage),
        mask=torch.from_numpy(micro.loss_mask),
        seq_index=torch.from_numpy(micro.seq_index),
        n_seqs=micro.n_seqs,
        denominators=denominators,
        ref_logp=None if reference is None else torch.from_numpy(reference),
        entropy=entropy,
    )


def _penalised(micro: MicroBatch, reference: np.ndarray, coef: float) -> np.ndarray:
    """Advantages with the per-token k1 penalty against the reference, rollout by rollout."""
    out = np.empty_like(micro.advantage)
    for q in range(micro.n_seqs):
        own = micro.seq_index == q
        out[own] = with_kl_penalty(
            micro.advantage[own], micro.old_logp[own], reference[own], micro.loss_mask[own], coef
        )
    return out
