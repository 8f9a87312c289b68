"""Adapters on experts: names, tensors and the layouts that forward and backward read.

Two layouts. *Per expert*: every expert has its own A and B. *Shared outer*: of each pair the matrix at the hidden size
is one for all experts, A of gate and up [r, H] and B of down [H, r]; the inner ones, at the expert's width, stay per
expert (the layout that SGLang serves as `experts_shared_outer_loras`, sgl-project/sglang#21466). Experts are narrower
than the model, so this keeps the smaller half.

A tensor that every expert has is held stacked, under a name with ``{expert}`` in place of the number: A [E, r, in], B
[E, out, r]. `split_experts` names them one by one, as PEFT would for a linear each, and `stack_experts` takes them
back; a shared tensor has a name without a number, or is repeated under every number for programs that know no sharing.
PEFT itself knows neither form for models whose experts lie in one 3-D parameter: there its `target_parameters` has a
layout of its own, without dropout, without sharing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tithe.errors import AdapterError
from tithe.lora import LoraSpec, tensor_names
from tithe.quant import pack_dense
from tithe.quant.grouped import GroupTable

EXPERT = "{expert}"
ExpertLora = Literal["per_expert", "shared_outer"]
PLACES = ("gate_up", "down")


@dataclass(frozen=True)
class ExpertSite:
    """One linear of every expert: `place` gate_up or down, its rows [start, stop) of the place's outputs.

    Example: ``ExpertSite("gate_up", "model.layers.3.mlp.experts.{expert}.up_proj", 768, 1536)``. A shared expert has no
    number in its path.
    """

    place: str
    module: str
    start: int
    stop: int

    @property
    def is_numbered(self) -> bool:
        """True for experts, False for the shared expert."""
        return EXPERT in self.module

    def modules(self, experts: int) -> list[str]:
        """The path of every expert's linear."""
        return [self.module.replace(EXPERT, str(e)) for e in range(experts)] if self.is_numbered else [self.module]

    def names(self, layout: ExpertLora = "per_expert") -> tuple[str, str]:
        """Names of A and B in a layout; the shared one of the pair has no number."""
        name_a, name_b = tensor_names(self.module)
        if layout == "shared_outer" and self.is_numbered:
            shared_a, shared_b = tensor_names(self.module.replace(f"{EXPERT}.", ""))
            return (shared_a, name_b) if self.place == "gate_up" else (name_a, shared_b)
        return name_a, name_b


def expert_sites(
    experts: str, width: int, hidden: int, parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
) -> tuple[ExpertSite, ...]:
    """The sites of experts; `experts` is their path, ``….mlp.experts.{expert}``. Two `parts`: gate and up are one."""
    *first, down = parts
    each = 2 * width // len(first)
    gate_up = [ExpertSite("gate_up", f"{experts}.{part}", i * each, (i + 1) * each) for i, part in enumerate(first)]
    return (*gate_up, ExpertSite("down", f"{experts}.{down}", 0, hidden))


def tensor_shapes(
    site: ExpertSite, experts: int, columns: int, rank: int, layout: ExpertLora
) -> dict[str, tuple[int, ...]]:
    """Name and shape of a site's A and B: [E, …] where each expert has its own, without E where one is shared."""
    shapes = ((rank, columns), (site.stop - site.start, rank))
    return {
        name: (experts, *shape) if EXPERT in name else shape
        for name, shape in zip(site.names(layout), shapes, strict=True)
    }


def init_tensors(shapes: Mapping[str, tuple[int, ...]], generator: torch.Generator) -> dict[str, Tensor]:
    """A as PEFT draws it for a linear (uniform in ±1/√in), B zero, in the order of `shapes`."""
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        bound = 1.0 / math.sqrt(shape[-1]) if name.endswith("lora_A.weight") else 0.0
        drawn = torch.rand(shape, generator=generator) if bound else torch.zeros(shape)
        tensors[name] = (2 * drawn - 1) * bound if bound else drawn
    return tensors


@dataclass(frozen=True, eq=False)
class SiteTables:
    """The adapter on one site: B of every expert; `start` and `rank` place it in u (rank is made even by zeros).
    `shares_a`, `shares_b`: one for all experts. `a` is this site's part of the place's A."""

    site: ExpertSite
    names: tuple[str, str]
    a: GroupTable
    b: GroupTable
    scale: float
    start: int
    rank: int
    shares_a: bool
    shares_b: bool


@dataclass(frozen=True, eq=False)
class PlaceTables:
    """All adapters on one place: A of its sites one below the other, [E][Σr, in]."""

    a: GroupTable
    sites: tuple[SiteTables, ...]

    @property
    def width(self) -> int:
        """Σr, the columns of u."""
        return self.a.rows


@dataclass(frozen=True, eq=False)
class ExpertAdapter:
    """One immutable version on one bank of experts, in kernel layout, in the published cast."""

    places: Mapping[str, PlaceTables]

    @property
    def n_bytes(self) -> int:
        """Resident bytes: whole panels of 48 rows for each tall matrix."""
        tables = [t for p in self.places.values() for t in (p.a, *(s.b for s in p.sites))]
        return sum(m.n_bytes for t in tables for m in t.matrices)

    @property
    def widest(self) -> int:
        """Largest Σr of a place."""
        return max(p.width for p in self.places.values())

    @staticmethod
    def build(
        sites: tuple[ExpertSite, ...],
        experts: int,
        tensors: Mapping[str, Tensor],
        spec: LoraSpec,
        dtype: torch.dtype,
        first: int = 0,
    ) -> ExpertAdapter | None:
        """From float32 tensors by name, of all experts, for those from number `first`; None when no site is adapted.

        `AdapterError` for ranks that differ.
        """
        places: dict[str, PlaceTables] = {}
        for place in PLACES:
            found = [(s, names) for s in sites if s.place == place and (names := _names_in(s, tensors)) is not None]
            if found:
                own = {name: _own(tensors[name], first, experts) for _, names in found for name in names}
                places[place] = _place(found, experts, own, spec, dtype)
        return ExpertAdapter(places) if places else None


def _own(x: Tensor, first: int, experts: int) -> Tensor:
    """The bank's experts of a tensor that every expert has; a shared one as it is."""
    return x[first : first + experts] if x.ndim == 3 else x


def _names_in(site: ExpertSite, tensors: Mapping[str, Tensor]) -> tuple[str, str] | None:
    layouts: tuple[ExpertLora, ...] = ("per_expert", "shared_outer")
    for layout in layouts:
        names = site.names(layout)
        if all(name in tensors for name in names):
            return names
    return None


def _place(
    found: list[tuple[ExpertSite, tuple[str, str]]],
    experts: int,
    tensors: Mapping[str, Tensor],
    spec: LoraSpec,
    dtype: torch.dtype,
) -> PlaceTables:
    pairs = [(_even(tensors[a], -2), _even(tensors[b], -1)) for _, (a, b) in found]
    shares_a = {a.ndim == 2 for a, _ in pairs}
    if len(shares_a) > 1:
        raise AdapterError(f"the A of {found[0][0].module} and its neighbour must both be shared or both per expert")
    table = _table(torch.cat([a for a, _ in pairs], dim=-2), experts, dtype)
    sites: list[SiteTables] = []
    start = 0
    for (site, names), (a, b) in zip(found, pairs, strict=True):
        rank = a.shape[-2]
        part = table.part(start, start + rank)
        scale = site_scale(site, experts, spec)
        shared = (a.ndim == 2, b.ndim == 2)
        sites.append(SiteTables(site, names, part, _table(b, experts, dtype), scale, start, rank, *shared))
        start += rank
    return PlaceTables(table, tuple(sites))


def _even(x: Tensor, dim: int) -> Tensor:
    """With a zero row (dim -2) or column (dim -1) after an odd number: products read pairs."""
    x = x.detach()
    if x.shape[dim] % 2 == 0:
        return x
    return torch.nn.functional.pad(x, (0, 1) if dim == -1 else (0, 0, 0, 1))


def _table(x: Tensor, experts: int, dtype: torch.dtype) -> GroupTable:
    rounded = dtype == torch.bfloat16
    if x.ndim == 2:
        return GroupTable.repeated(pack_dense(x, rounded=rounded), experts)
    return GroupTable.of_rows(pack_dense(x.flatten(0, 1), rounded=rounded), experts)


def site_rank(site: ExpertSite, experts: int, spec: LoraSpec) -> int:
    """The rank that all experts of a site share; `AdapterError` when rank_pattern tells them apart."""
    return int(_same([spec.rank(m) for m in site.modules(1 if spec.is_uniform else experts)], site, "rank_pattern"))


def site_scale(site: ExpertSite, experts: int, spec: LoraSpec) -> float:
    """The scale that all experts of a site share; `AdapterError` when a pattern tells them apart."""
    return _same([spec.scale(m) for m in site.modules(1 if spec.is_uniform else experts)], site, "alpha_pattern")


def _same(values: list[float], site: ExpertSite, key: str) -> float:
    if len(set(values)) > 1:
        raise AdapterError(
            f"{key}: the experts of {site.module} share one rank and scale; name the linear, not experts"
        )
    return values[0]


# ---- one tensor an expert


def split_experts(tensors: Mapping[str, Tensor], *, repeat: int = 0) -> dict[str, Tensor]:
    """Views named one by one, as PEFT names linears: A [r, in], B [out, r]. With `repeat` experts, shared tensors are
    repeated under every number too; others pass."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if EXPERT in name:
            out |= {name.replace(EXPERT, str(e)): part for e, part in enumerate(tensor)}
        elif repeat and (shared := re.fullmatch(r"(.*\.experts)\.([^.\d][^.]*\.lora_[AB]\.weight)", name)):
            out |= {f"{shared[1]}.{e}.{shared[2]}": tensor for e in range(repeat)}
        else:
            out[name] = tensor
    return out


def stack_experts(tensors: Mapping[str, Tensor], *, share: bool = False) -> dict[str, Tensor]:
    """The inverse: what `split_experts` took apart is stacked again (copies); other tensors pass.

    With `share`, a block whose outer matrices are equal for all experts becomes shared outer again. `AdapterError` when
    numbers are missing or ranks differ.
    """
    found: dict[str, dict[int, Tensor]] = {}
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        numbered = re.fullmatch(r"(.*\.experts\.)(\d+)(\..+)", name)
        if numbered:
            found.setdefault(f"{numbered[1]}{EXPERT}{numbered[3]}", {})[int(numbered[2])] = tensor
        else:
            out[name] = tensor
    stacked: dict[str, Tensor] = {}
    for name, parts in found.items():
        if sorted(parts) != list(range(len(parts))) or len({tuple(p.shape) for p in parts.values()}) > 1:
            raise AdapterError(f"{name}: {len(parts)} experts, which must be numbered from 0 and of one shape")
        stacked[name] = torch.stack([parts[e] for e in range(len(parts))])
    shared = _shared_blocks(stacked) if share else set[str]()
    for name, tensor in stacked.items():
        if _is_outer(name) and name.partition(EXPERT)[0] in shared:
            out[name.replace(f"{EXPERT}.", "")] = tensor[0].clone()
        else:
            out[name] = tensor
    return out


def _shared_blocks(stacked: Mapping[str, Tensor]) -> set[str]:
    """The blocks whose outer matrices are one for all experts. Zeros tell nothing: a fresh B is equal everywhere."""
    equal: dict[str, list[bool]] = {}
    for name, tensor in stacked.items():
        if _is_outer(name):
            told = equal.setdefault(name.partition(EXPERT)[0], [])
            same = bool((tensor == tensor[0]).all())
            if tensor.any() or not same:
                told.append(same)
    return {block for block, told in equal.items() if told and all(told)}


def share_outer(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stacked tensors in the layout `shared_outer`: of the outer matrices the first expert's is everyone's."""
    return {
        name.replace(f"{EXPERT}.", "") if EXPERT in name and _is_outer(name) else name: (
            tensor[0].clone() if EXPERT in name and _is_outer(name) else tensor
        )
        for name, tensor in tensors.items()
    }


def _is_outer(name: str) -> bool:
    """A of gate and up, B of down."""
    is_down = re.search(r"\.(down_proj|w2)\.lora_", name) is not None
    return is_down == name.endswith("lora_B.weight")
