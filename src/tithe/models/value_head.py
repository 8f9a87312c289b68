"""A scalar head on the frozen base: what a critic reads a state's value from.

Shape legend: _N targets of one micro-batch, _H the model's width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tithe.models.head import Head

WEIGHT, BIAS = "value_head.weight", "value_head.bias"
"""Names of the head's two tensors, float32 [H] and [1]."""


@dataclass(frozen=True, eq=False)
class Values:
    """`value` [N] and `d_normed` [N, H], its derivative by the normed rows; `normed` [N, H] float32, its derivative by
    the weight."""

    value: Tensor
    d_normed: Tensor
    normed: Tensor


def new_value_head(width: int) -> dict[str, Tensor]:
    """Zeros: a critic that has learned nothing says 0 everywhere, so that the first advantages are plain rewards."""
    return {WEIGHT: torch.zeros(width), BIAS: torch.zeros(1)}


def score_values(head: Head, x_NH: Tensor, weight_H: Tensor, bias: Tensor) -> Values:
    """V = weight·norm(x) + bias in float32 at residual rows: the final norm is the base's own, so that the head reads
    what the token head reads. The value of a token is that of the state before it, the row that predicts it."""
    normed_NH = head.normed(x_NH).float()
    value_N = normed_NH @ weight_H + bias
    return Values(value_N, weight_H.expand_as(normed_NH), normed_NH)
