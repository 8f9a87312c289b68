"""The critic's loss (arXiv 1707.06347; clipped as in OpenAI's baselines).

Shape legend: _N completion tokens of one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tithe.losses.aggregation import Denominators
from tithe.losses.packed import kept


@dataclass(frozen=True, eq=False)
class ValueLossInput:
    """One micro-batch, 1-D tensors of length N: `value` (with gradient) is the critic's, `old_value` the one with which
    the advantages were made, `returns` what it shall learn; `mask` True on trained tokens.

    >>> one, half = torch.ones(2), torch.tensor([0.5, 0.5])
    >>> inp = ValueLossInput(half, half, one, one > 0, Denominators(n_tokens=2, n_seqs=1, norm_tokens=8))
    >>> value_loss(inp, clip=0.2)[0].item()
    0.125
    """

    value: Tensor
    old_value: Tensor
    returns: Tensor
    mask: Tensor
    denominators: Denominators


def value_loss(inp: ValueLossInput, clip: float | None) -> tuple[Tensor, Tensor]:
    """½·Σ max((V - R)², (clip(V, V_old ± `clip`) - R)²) / (trained tokens of the batch), and the number of tokens whose
    clipped branch decides; both 0-d. `clip` None is the plain square. Masked tokens add exactly 0.
    """
    value_N, old_N, returns_N = (kept(x, inp.mask) for x in (inp.value, inp.old_value, inp.returns))
    square_N = (value_N - returns_N).square()
    clipped_N = torch.zeros_like(inp.mask)
    if clip is not None:
        held_N = (torch.clamp(value_N, old_N - clip, old_N + clip) - returns_N).square()
        clipped_N = held_N > square_N
        square_N = torch.maximum(square_N, held_N)
    return 0.5 * square_N.sum() / inp.denominators.n_tokens, clipped_N.sum()
