"""Dropout on an adapter's input, in training only.

The mask is a function of (seed, layer, place): it is drawn twice, never kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tithe.models.decoder import Decoder

_PLACES = {"qkv": 0, "o": 1, "gate_up": 2, "down": 3, "q_b": 4}


class AdapterDropout:
    """Buffers of dropped inputs and the masks of one micro-batch; set `seed` before each (0 < p < 1)."""

    def __init__(self, decoder: Decoder, rows: int, probability: float) -> None:
        dtype = decoder.options.operand_dtype
        widths = {place: one.columns for layer in decoder.layers for place, one in layer.linears().items()}
        self.buffers = {place: torch.zeros(rows, width, dtype=dtype) for place, width in widths.items()}
        self.probability = probability
        self.seed = 0
        self.enabled = True

    def apply_mask(self, layer: int, place: str, x: Tensor) -> Tensor:
        """x with the place's mask, kept entries divided by 1 − p."""
        if not self.enabled:
            return x
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + layer * 8 + _PLACES[place])
        keep = torch.rand(x.shape, generator=generator) >= self.probability
        return x * keep.to(x.dtype) / (1.0 - self.probability)

    def fill(self, layer: int, place: str, x: Tensor, n: int) -> None:
        """Write the dropped input of n rows where the adapter's launches read it. A place without a linear (of experts)
        has none."""
        if place in self.buffers:
            self.buffers[place][:n] = self.apply_mask(layer, place, x[:n])
