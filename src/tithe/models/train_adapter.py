"""What the backward needs of an adapter, and where its gradients are added up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tithe.lora import LoraSpec, tensor_names
from tithe.models.decoder import Decoder, ModelAdapter
from tithe.models.expert_training import BlockGradients
from tithe.models.linear import Linear, Site
from tithe.quant import PackedMatrix
from tithe.quant.matrix import pack_transposed


@dataclass(frozen=True, eq=False)
class TrainSite:
    """One adapted linear: Aᵀ and Bᵀ in the published cast, in kernel layout. `start` and `rank` place it in u
    (rank is made even by zeros)."""

    site: Site
    a_transposed: PackedMatrix
    b_transposed: PackedMatrix
    scale: float
    start: int
    rank: int


@dataclass(frozen=True, eq=False)
class TrainPlace:
    """The sites of one fused linear; `width` is Σ rank."""

    sites: tuple[TrainSite, ...]
    width: int


@dataclass(frozen=True, eq=False)
class TrainAdapter:
    """An adapter version for forward (`model`) and backward (`places`: per layer, by place)."""

    model: ModelAdapter
    places: tuple[Mapping[str, TrainPlace], ...]

    @staticmethod
    def build(decoder: Decoder, tensors: Mapping[str, Tensor], spec: LoraSpec) -> TrainAdapter:
        """Cast float32 masters to what is published, in the layouts that forward and backward read."""
        dtype = decoder.options.operand_dtype
        places: list[dict[str, TrainPlace]] = []
        for layer in decoder.layers:
            found = {name: _place(linear, tensors, spec, dtype) for name, linear in layer.linears().items()}
            places.append({name: place for name, place in found.items() if place is not None})
        return TrainAdapter(decoder.build_adapter(tensors, spec), tuple(places))

    @staticmethod
    def for_scoring(decoder: Decoder, tensors: Mapping[str, Tensor], spec: LoraSpec) -> TrainAdapter:
        """The forward's half alone, for log-probs without a backward."""
        return TrainAdapter(decoder.build_adapter(tensors, spec), ())

    def widths(self) -> dict[str, int]:
        """Σ rank by place, the widest of all layers."""
        widths: dict[str, int] = {}
        for layer in self.places:
            for name, place in layer.items():
                widths[name] = max(widths.get(name, 0), place.width)
        return widths


def _place(linear: Linear, tensors: Mapping[str, Tensor], spec: LoraSpec, dtype: torch.dtype) -> TrainPlace | None:
    sites: list[TrainSite] = []
    at = 0
    for site in linear.sites:
        name_a, name_b = tensor_names(site.module)
        if name_a not in tensors:
            continue
        a, b = tensors[name_a].detach().to(dtype), tensors[name_b].detach().to(dtype)
        if a.shape[0] % 2:
            a, b = torch.nn.functional.pad(a, (0, 0, 0, 1)), torch.nn.functional.pad(b, (0, 1))
        scale = spec.scale(site.module)
        sites.append(TrainSite(site, pack_transposed(a), pack_transposed(b), scale, at, a.shape[0]))
        at += a.shape[0]
    return TrainPlace(tuple(sites), at) if sites else None


@dataclass(frozen=True, eq=False)
class SiteGradient:
    """Sums of one site: `a` [r, in] and `b_transposed` [r, out], float32, r made even."""

    a: Tensor
    b_transposed: Tensor


class AdapterGradients:
    """Gradients of all sites, added to by every micro-batch of a batch."""

    def __init__(self, decoder: Decoder, adapter: TrainAdapter) -> None:
        self.places: list[dict[str, list[SiteGradient]]] = []
        for layer, places in zip(decoder.layers, adapter.places, strict=True):
            columns = {name: linear.columns for name, linear in layer.linears().items()}
            self.places.append(
                {
                    name: [
                        SiteGradient(
                            torch.zeros(s.rank, columns[name]), torch.zeros(s.rank, s.site.stop - s.site.start)
                        )
                        for s in place.sites
                    ]
                    for name, place in places.items()
                }
            )
        blocks = adapter.model.experts
        self.experts = [BlockGradients.zeros(block) if block is not None else None for block in blocks]
        self._adapter = adapter

    def named(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Views by PEFT name in the shapes of `tensors`: A [r, in], B [out, r]; of experts stacked, [E, …] each."""
        out: dict[str, Tensor] = {}
        for layer, places in zip(self.places, self._adapter.places, strict=True):
            for name, place in places.items():
                for s, gradient in zip(place.sites, layer[name], strict=True):
                    name_a, name_b = tensor_names(s.site.module)
                    rank = tensors[name_a].shape[0]
                    out[name_a], out[name_b] = gradient.a[:rank], gradient.b_transposed[:rank].t()
        for block in self.experts:
            for part in block.parts() if block is not None else ():
                out |= part.named(tensors)
        return out
