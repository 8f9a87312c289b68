"""The backward of frozen linears and of the adapters on them: input gradients of the base, gradients of the adapters.

W̃ is expanded, as panels of its transpose, for one linear at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tithe.models.decoder import Decoder
from tithe.models.dropout import AdapterDropout
from tithe.models.linear import Linear
from tithe.models.train_adapter import AdapterGradients, TrainAdapter
from tithe.quant.matrix import LowRank, pack_transposed, transposed_numel


@dataclass(frozen=True)
class Slots:
    """Where a layer's copies lie: a slot for each layer, or one for all when layers are recomputed."""

    count: int

    def __getitem__(self, layer: int) -> int:
        return layer if self.count > 1 else 0


class LinearBackward:
    """Buffers for all linears of a pass; `begin` a micro-batch, `save` the forward's u = x·Aᵀ of each place."""

    def __init__(
        self, decoder: Decoder, rows: int, widths: Mapping[str, int], slots: Slots, dropout: AdapterDropout | None
    ) -> None:
        self.operand = decoder.options.operand_dtype
        self._slots, self._widths, self._dropout = slots, widths, dropout
        linears = list(decoder.linears())
        parts = [part for linear in linears for part in linear.parts]
        self._weights = torch.empty(max(part.transposed_numel for part in parts), dtype=self.operand)
        widest = max(max(linear.columns, *(s.stop - s.start for s in linear.sites)) for linear in linears)
        self._panels = torch.empty(transposed_numel(rows, widest), dtype=self.operand)
        kept = {place: width for place, width in widths.items() if place != "kv_b"}  # a part of latent attention
        self._u = {p: torch.empty(slots.count, rows, width, dtype=self.operand) for p, width in kept.items()}
        self._n = 0
        self._adapter: TrainAdapter | None = None

    def begin(self, n: int, adapter: TrainAdapter | None) -> None:
        """A micro-batch of n rows under an adapter."""
        self._n, self._adapter = n, adapter

    def save(self, i: int, place: str, u: Tensor) -> None:
        """Keep u of a place, whose adapters have just been computed."""
        if place in self._u:
            self._u[place][self._slots[i], : self._n] = u[: self._n, : self._widths[place]]

    def input_gradient(self, i: int, place: str, linear: Linear, dy: Tensor) -> tuple[Tensor | None, Tensor]:
        """(du, d_input): du = dy·B for all sites of the place side by side (operand, unscaled; None without an
        adapter), d_input = dy·W̃ + scale·du·A, float32 [R, in]."""
        assert self._adapter is not None
        found = self._adapter.places[i].get(place)
        du, added = None, list[LowRank]()
        if found is not None:
            du = torch.zeros(dy.shape[0], found.width, dtype=self.operand)
            for s in found.sites:
                columns = du[:, s.start : s.start + s.rank]
                s.b_transposed.matmul(dy[:, s.site.start : s.site.stop], columns)
                added.append((columns, s.a_transposed, s.scale))
        d_input = torch.empty(dy.shape[0], linear.columns)
        start = 0
        for part in linear.parts:
            transposed = part.transposed(self._weights[: part.transposed_numel])
            ends = start + part.rows == linear.rows and self._dropout is None
            rows = dy[:, start : start + part.rows]
            transposed.matmul(rows, d_input, add=start > 0, low_rank=added if ends else ())
            start += part.rows
        if self._dropout is not None and added:
            share = torch.zeros_like(d_input)
            for u, a_transposed, scale in added:
                a_transposed.matmul(u, share, add=True, factor=scale)
            d_input += self._dropout.apply_mask(i, place, share)
        return du, d_input

    def weight_gradients(
        self, i: int, place: str, dy: Tensor, du: Tensor | None, x: Tensor, grads: AdapterGradients
    ) -> None:
        """dA += scale·duᵀ·x and dBᵀ += scale·uᵀ·dy for the sites of a place."""
        if du is None:
            return
        assert self._adapter is not None
        if self._dropout is not None:
            x = self._dropout.apply_mask(i, place, x)
        u = self._u[place][self._slots[i], : self._n]
        du_t, u_t = _even_transpose(du), _even_transpose(u)
        inputs = pack_transposed(x, self._panels)
        for s, into in zip(self._adapter.places[i][place].sites, grads.places[i][place], strict=True):
            rows = slice(s.start, s.start + s.rank)
            inputs.matmul(du_t[rows], into.a, add=True, factor=s.scale)
        for s, into in zip(self._adapter.places[i][place].sites, grads.places[i][place], strict=True):
            rows = slice(s.start, s.start + s.rank)
            outputs = pack_transposed(dy[:, s.site.start : s.site.stop], self._panels)
            outputs.matmul(u_t[rows], into.b_transposed, add=True, factor=s.scale)


def _even_transpose(x: Tensor) -> Tensor:
    """xᵀ with an even number of columns (a zero column follows an odd one): products read pairs."""
    n = x.shape[0]
    if n % 2 == 0:
        return x.t().contiguous()
    return torch.nn.functional.pad(x.t(), (0, 1))
