"""From a micro-batch and its scored tokens to what the loss takes: the same for adapters and for whole models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tithe.advantages import with_kl_penalty
from tithe.losses import Denominators, LossSettings, PolicyLossInput
from tithe.packing import MicroBatch
from tithe.trainer.settings import TrainerSettings


def loss_input(
    micro: MicroBatch,
    logp: Tensor,
    entropy: Tensor,
    reference: np.ndarray | None,
    denominators: Denominators,
    settings: TrainerSettings,
    kl_coef: float,
) -> tuple[PolicyLossInput, LossSettings]:
    """`logp` and `entropy` [N] are the policy's, `reference` [N] its reference's log-probs (None: no KL), `kl_coef` the
    weight of the KL now.

    A KL in the reward is taken from the advantages here, unless the batch was scored beforehand: then it is part of
    them already. The policy with which the batch began is the scored one, or at a batch's only step the policy itself.
    """
    in_loss = settings.kl_placement == "loss"
    advantage, prox = micro.advantage, micro.prox_logp
    if reference is not None and not in_loss and micro.ref_logp is None:
        advantage = _penalised(micro, reference, kl_coef, settings.loss.kl_estimator)
    only_step = settings.steps_per_batch == 1
    given = PolicyLossInput(
        logp=logp,
        old_logp=torch.from_numpy(micro.old_logp),
        advantage=torch.from_numpy(advantage),
        mask=torch.from_numpy(micro.loss_mask),
        seq_index=torch.from_numpy(micro.seq_index),
        n_seqs=micro.n_seqs,
        denominators=denominators,
        ref_logp=None if reference is None else torch.from_numpy(reference),
        entropy=entropy,
        prox_logp=torch.from_numpy(prox) if prox is not None else logp.detach() if only_step else None,
        behaviour_logp=None if micro.behaviour_logp is None else torch.from_numpy(micro.behaviour_logp),
    )
    return given, replace(settings.loss, kl_coef=kl_coef if in_loss else 0.0)


def _penalised(micro: MicroBatch, reference: np.ndarray, coef: float, estimator: str) -> np.ndarray:
    """Advantages with the per-token penalty against the reference, rollout by rollout."""
    out = np.empty_like(micro.advantage)
    for q in range(micro.n_seqs):
        own = micro.seq_index == q
        pair = (micro.old_logp[own], reference[own], micro.loss_mask[own])
        out[own] = with_kl_penalty(micro.advantage[own], *pair, coef, estimator)
    return out
