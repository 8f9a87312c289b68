"""Sums over the rollouts of a packed micro-batch, and values that must not pass where the mask is off.

Shape legend: _N completion tokens of one micro-batch, _Q its rollouts.
"""

from __future__ import annotations

import torch
from torch import Tensor


def kept(values_N: Tensor, mask_N: Tensor) -> Tensor:
    """`values_N` with 0 off the mask, in value and in gradient: a product with the mask would keep NaN and infinity."""
    return torch.where(mask_N, values_N, torch.zeros((), dtype=values_N.dtype, device=values_N.device))


def seq_lengths(mask_N: Tensor, seq_index_N: Tensor, n_seqs: int) -> Tensor:
    """Tokens under the mask of each rollout, int64 [Q], at least 1 so that it can divide."""
    return torch.bincount(seq_index_N[mask_N], minlength=n_seqs).clamp(min=1)


def seq_sum(values_N: Tensor, mask_N: Tensor, seq_index_N: Tensor, n_seqs: int) -> Tensor:
    """Sum over the tokens under the mask of each rollout, [Q], with gradient."""
    zeros_Q = torch.zeros(n_seqs, dtype=values_N.dtype, device=values_N.device)
    return zeros_Q.index_add(0, seq_index_N, kept(values_N, mask_N))


def seq_mean(values_N: Tensor, mask_N: Tensor, seq_index_N: Tensor, n_seqs: int) -> Tensor:
    """Mean over the tokens under the mask of each rollout, [Q], with gradient; 0 for a rollout without any."""
    lengths_Q = seq_lengths(mask_N, seq_index_N, n_seqs).to(values_N.dtype)
    return seq_sum(values_N, mask_N, seq_index_N, n_seqs) / lengths_Q
