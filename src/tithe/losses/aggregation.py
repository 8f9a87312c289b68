"""How token losses become one number.

Each mode is a weight per token, w_t, with loss = Σ w_t·l_t over trained tokens. The weights use counts over the *whole*
batch, so the sum over micro-batches is the batch's loss; normalising each micro-batch by itself and averaging would
give short micro-batches' tokens more say than long ones'.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Aggregation(enum.StrEnum):
    """Modes, with n = trained tokens of the batch, s = rollouts that have any, |o| = trained tokens of the rollout.

    The names are verl's (`agg_loss`), and so are the results at one data-parallel rank. GRPO's paper uses
    SEQ_MEAN_TOKEN_MEAN, DAPO's TOKEN_MEAN, Dr. GRPO's SEQ_MEAN_TOKEN_SUM_NORM with a constant length (TRL's `dr_grpo`).
    """

    TOKEN_MEAN = enum.auto()
    """w = 1/n: every token counts alike, long rollouts weigh more."""
    TOKEN_SUM = enum.auto()
    """w = 1: the gradient grows with the batch."""
    SEQ_MEAN_TOKEN_SUM = enum.auto()
    """w = 1/s: mean over rollouts of their summed loss, the plain policy gradient."""
    SEQ_MEAN_TOKEN_MEAN = enum.auto()
    """w = 1/(s·|o|): every rollout counts alike, so tokens of long rollouts weigh less."""
    SEQ_MEAN_TOKEN_SUM_NORM = enum.auto()
    """w = 1/(s·norm_tokens): as SEQ_MEAN_TOKEN_SUM, divided by a constant length."""


@dataclass(frozen=True)
class Denominators:
    """Counts over the whole batch (all micro-batches of all ranks), never over one micro-batch.

    `n_tokens`: tokens under the loss mask. `n_seqs`: rollouts with at least one of them. `norm_tokens`: the constant
    length of SEQ_MEAN_TOKEN_SUM_NORM, in tokens, the same in every step (`rollout.max_new_tokens`).

    >>> Denominators(n_tokens=8, n_seqs=2, norm_tokens=64)
    Denominators(n_tokens=8, n_seqs=2, norm_tokens=64)
    """

    n_tokens: int
    n_seqs: int
    norm_tokens: int

    def __post_init__(self) -> None:
        if min(self.n_tokens, self.n_seqs, self.norm_tokens) < 1:
            raise ValueError(f"a batch without trained tokens has no loss: {self}")


class Counted(Protocol):
    """What `denominators` needs to know of a micro-batch."""

    @property
    def n_trained_tokens(self) -> int:
        """Tokens under the loss mask."""
        ...

    @property
    def n_seqs(self) -> int:
        """Rollouts, each with at least one trained token."""
        ...


def denominators(micro_batches: Iterable[Counted], norm_tokens: int) -> Denominators:
    """Count once per batch, before the first micro-batch. Raises `ValueError` when nothing is trained."""
    counts = [(micro.n_trained_tokens, micro.n_seqs) for micro in micro_batches]
    return Denominators(sum(tokens for tokens, _ in counts), sum(seqs for _, seqs in counts), norm_tokens)


def token_weights(
    mask_N: Tensor, seq_index_N: Tensor, n_seqs: int, mode: Aggregation, over: Denominators, dtype: torch.dtype
) -> Tensor:
    """The weight of each token, [N]; exactly 0 where the mask is off.

    `n_seqs` is the number of rollouts in this micro-batch. A rollout must lie in it whole, because |o| is counted here.
    """
    if mode == Aggregation.TOKEN_MEAN:
        scale = 1.0 / over.n_tokens
    elif mode == Aggregation.TOKEN_SUM:
        scale = 1.0
    elif mode == Aggregation.SEQ_MEAN_TOKEN_SUM_NORM:
        scale = 1.0 / (over.n_seqs * over.norm_tokens)
    elif mode in {Aggregation.SEQ_MEAN_TOKEN_SUM, Aggregation.SEQ_MEAN_TOKEN_MEAN}:
        scale = 1.0 / over.n_seqs
    else:
        raise ValueError(f"the aggregations are {[str(mode) for mode in Aggregation]}, not {mode!r}")
    weights_N = mask_N.to(dtype) * scale
    if mode == Aggregation.SEQ_MEAN_TOKEN_MEAN:
        lengths_Q = torch.bincount(seq_index_N[mask_N], minlength=n_seqs).clamp(min=1)
        weights_N = weights_N / lengths_Q[seq_index_N].to(dtype)
    return weights_N
