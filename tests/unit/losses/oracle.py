"""A slow policy loss in plain Python, and one batch with numbers that public implementations gave for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tithe.losses import Aggregation, Denominators, PolicyLossInput

NORM_TOKENS = 16


@dataclass(frozen=True)
class Sequences:
    """Ragged rollouts: one list per rollout."""

    old: list[list[float]]
    new: list[list[float]]
    ref: list[list[float]]
    advantage: list[list[float]]
    mask: list[list[bool]]

    def take(self, chosen: Sequence[int]) -> Sequences:
        old, new, ref, advantage = (
            [rows[i] for i in chosen] for rows in (self.old, self.new, self.ref, self.advantage)
        )
        return Sequences(old, new, ref, advantage, [self.mask[i] for i in chosen])

    def packed(self, over: Denominators | None = None, dtype: torch.dtype = torch.float64) -> PolicyLossInput:
        def flat(rows: Sequence[Sequence[float]]) -> torch.Tensor:
            return torch.tensor([value for row in rows for value in row], dtype=dtype)

        return PolicyLossInput(
            logp=flat(self.new).requires_grad_(),
            old_logp=flat(self.old),
            ref_logp=flat(self.ref),
            advantage=flat(self.advantage),
            mask=flat(self.mask).bool(),
            seq_index=torch.tensor([i for i, row in enumerate(self.new) for _ in row]),
            n_seqs=len(self.new),
            denominators=over or self.counts(),
        )

    def counts(self) -> Denominators:
        n_tokens = sum(sum(row) for row in self.mask)
        return Denominators(n_tokens, sum(any(row) for row in self.mask), NORM_TOKENS)


BATCH = Sequences(
    old=[[-1.2, -0.3, -2.5, -0.7], [-0.9, -3.1], [-0.05, -1.4, -0.6], [-2.2]],
    new=[[-0.9, -0.45, -2.1, -0.7], [-1.5, -2.2], [-0.04, -4.9, -0.55], [-1.1]],
    ref=[[-1.0, -0.5, -3.5, -0.2], [-1.3, -2.9], [-0.3, -3.2, -0.8], [-2.0]],
    advantage=[[1.25] * 4, [-0.5] * 2, [-1.5] * 3, [0.75]],
    mask=[[True, True, False, True], [True, True], [True, True, True], [True]],
)
"""Ragged, one masked token, both signs of advantage, ratios from 0.03 to 3."""

# Given for BATCH by verl at 1dda039: `compute_policy_loss_vanilla` (dual clip out of reach), `agg_loss` with
# loss_scale_factor 16, `kl_penalty_forward` "low_var_kl" times 0.1. TRL at f2cd577 (formulas of `GRPOTrainer`, loss
# types grpo, dapo, dr_grpo, epsilon_high 0.28, beta 0.1) gives the rows marked with its name.
# SEQ_MEAN_TOKEN_MEAN is good to 1e-8 only, because verl adds that to each length.
# (clip low, clip high) → aggregation → (loss without KL, with KL)
FROZEN: dict[tuple[float | None, float | None], dict[Aggregation, tuple[float, float]]] = {
    (0.2, None): {
        Aggregation.TOKEN_MEAN: (0.132877608915, 0.171912559977),
        Aggregation.TOKEN_SUM: (1.195898480237, 1.547213039791),
        Aggregation.SEQ_MEAN_TOKEN_SUM: (0.298974620059, 0.386803259948),
        Aggregation.SEQ_MEAN_TOKEN_MEAN: (0.017566605937, 0.052860596981),
        Aggregation.SEQ_MEAN_TOKEN_SUM_NORM: (0.018685913754, 0.024175203747),
    },
    (0.2, 0.28): {
        Aggregation.TOKEN_MEAN: (0.115099831137, 0.154134782199),  # TRL dapo
        Aggregation.TOKEN_SUM: (1.035898480237, 1.387213039791),
        Aggregation.SEQ_MEAN_TOKEN_SUM: (0.258974620059, 0.346803259948),
        Aggregation.SEQ_MEAN_TOKEN_MEAN: (-0.005766727218, 0.029527263825),  # TRL grpo
        Aggregation.SEQ_MEAN_TOKEN_SUM_NORM: (0.016185913754, 0.021675203747),  # TRL dr_grpo
    },
    (None, None): {
        Aggregation.TOKEN_MEAN: (-0.180538628224, -0.141503677162),
        Aggregation.TOKEN_SUM: (-1.624847654012, -1.273533094459),
        Aggregation.SEQ_MEAN_TOKEN_SUM: (-0.406211913503, -0.318383273615),
        Aggregation.SEQ_MEAN_TOKEN_MEAN: (-0.448249411991, -0.412955420947),
        Aggregation.SEQ_MEAN_TOKEN_SUM_NORM: (-0.025388244594, -0.019898954601),
    },
}

FROZEN_GRADIENT = [
    *[0.001057362022, -0.11900087922, 0.0, -0.146096903008],
    *[-0.002460030646, 0.142238113911],
    *[0.170885565783, -0.049710526575, 0.177669618473],
    0.006593670447,
]
"""Of the TOKEN_MEAN loss with clips 0.2, 0.28 and the KL, by verl's functions; the masked token's 0 put in."""


def slow_loss(
    batch: Sequences, low: float | None, high: float | None, kl_coef: float, mode: Aggregation, over: Denominators
) -> float:
    """Token by token, rollout by rollout, with math.exp."""
    total = 0.0
    for rows in zip(batch.old, batch.new, batch.ref, batch.advantage, batch.mask, strict=True):
        losses = [slow_token(*token[:4], low, high, kl_coef) for token in zip(*rows, strict=True) if token[4]]
        if not losses:
            continue
        if mode is Aggregation.TOKEN_SUM:
            total += sum(losses)
        elif mode is Aggregation.TOKEN_MEAN:
            total += sum(losses) / over.n_tokens
        elif mode is Aggregation.SEQ_MEAN_TOKEN_SUM:
            total += sum(losses) / over.n_seqs
        elif mode is Aggregation.SEQ_MEAN_TOKEN_MEAN:
            total += sum(losses) / len(losses) / over.n_seqs
        else:
            total += sum(losses) / over.norm_tokens / over.n_seqs
    return total


def slow_token(
    old: float, new: float, ref: float, advantage: float, low: float | None, high: float | None, kl_coef: float
) -> float:
    ratio = math.exp(min(max(new - old, -20.0), 20.0))
    value = -advantage * ratio
    if low is not None:
        upper = 1 + (low if high is None else high)
        value = max(value, -advantage * min(max(ratio, 1 - low), upper))
    return value + kl_coef * (math.exp(ref - new) - 1 - (ref - new))
