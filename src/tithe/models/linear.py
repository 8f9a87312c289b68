"""A frozen linear (several fused ones share an input) and the adapters that ride on it.

y = x·W̃ᵀ, then y += (α/r)·u·Bᵀ with u = x·Aᵀ rounded to the operand dtype, site by site in this order, in decode,
prefill and training alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tithe.lora import LoraSpec, tensor_names
from tithe.quant import HAS_BF16_DOT, Launch, PackedMatrix, pack_dense
from tithe.quant.matrix import can_ride, rider


class CopyStep:
    """A tensor copy with a launch's face: widens bf16 operands where the processor has no bf16 dot product."""

    __slots__ = ("args", "source", "target")

    def __init__(self, target: Tensor, source: Tensor) -> None:
        self.target, self.source, self.args = target, source, None

    def run(self) -> None:
        """target ← source."""
        self.target.copy_(self.source)


Step = Launch | CopyStep


@dataclass(frozen=True)
class Site:
    """One linear of a fused matrix: its canonical module path and its rows [start, stop)."""

    module: str
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class SiteAdapter:
    """The adapter on one site in kernel layout: `b` [out, r]; `a_start` is where its rows begin in the group's A."""

    site: Site
    b: PackedMatrix
    scale: float
    a_start: int
    rank: int


@dataclass(frozen=True, eq=False)
class LinearAdapter:
    """All adapters on one fused linear: A stacked [Σr, in], B per site. Ranks are padded to even with zeros."""

    a: PackedMatrix
    sites: tuple[SiteAdapter, ...]

    @property
    def width(self) -> int:
        """Σr, the columns of u."""
        return self.a.rows


@dataclass(frozen=True, eq=False)
class Linear:
    """A frozen weight W [out, in]. `parts` are stored matrices stacked along the output (one when formats agree)."""

    sites: tuple[Site, ...]
    parts: tuple[PackedMatrix, ...]

    @property
    def rows(self) -> int:
        """Outputs."""
        return sum(p.rows for p in self.parts)

    @property
    def columns(self) -> int:
        """Inputs."""
        return self.parts[0].columns

    def steps(self, x: Tensor, out: Tensor, *, add: bool = False) -> list[Step]:
        """Launches for out (+)= x·W̃ᵀ on fixed buffers."""
        x, steps = operand_steps(x)
        start = 0
        for part in self.parts:
            steps.append(part.product(x, out[:, start : start + part.rows], add=add))
            start += part.rows
        return steps

    def expand(self, dtype: torch.dtype) -> Tensor:
        """Row-major W̃ [out, in] for the input gradient."""
        if len(self.parts) == 1:
            return self.parts[0].expand(dtype)
        return torch.cat([p.expand(dtype) for p in self.parts])

    def storages(self) -> list[Tensor]:
        """The tensors that hold the weight."""
        return [t for p in self.parts for t in p.storages()]


def operand_steps(x: Tensor) -> tuple[Tensor, list[Step]]:
    """x as the kernels take it on this processor, and the steps that bring it there."""
    if x.dtype != torch.bfloat16 or HAS_BF16_DOT:
        return x, []
    wide = torch.empty(x.shape)
    return wide, [CopyStep(wide, x)]


def build_adapter(
    linear: Linear, tensors: Mapping[str, Tensor], spec: LoraSpec, dtype: torch.dtype
) -> LinearAdapter | None:
    """The adapter of a fused linear in the published cast (`dtype`); None when none of its sites is adapted."""
    rows: list[Tensor] = []
    sites: list[SiteAdapter] = []
    start = 0
    rounded = dtype == torch.bfloat16
    for site in linear.sites:
        name_a, name_b = tensor_names(site.module)
        if name_a not in tensors:
            continue
        a, b = tensors[name_a].detach(), tensors[name_b].detach()
        if a.shape[0] % 2:
            a, b = torch.nn.functional.pad(a, (0, 0, 0, 1)), torch.nn.functional.pad(b, (0, 1))
        rows.append(a)
        packed = pack_dense(b, rounded=rounded)
        sites.append(SiteAdapter(site, packed, spec.scale(site.module), start, a.shape[0]))
        start += a.shape[0]
    return LinearAdapter(pack_dense(torch.cat(rows), rounded=rounded), tuple(sites)) if rows else None


@dataclass(frozen=True, eq=False)
class AdapterSteps:
    """An adapter's launches on fixed buffers: `before` the base product u = x·Aᵀ, and then each site's
    out[:, site] += scale·u·Bᵀ, either riding on the base product (`riders`, int64 [n, 9]) or `after` it. Same numbers.
    """

    before: list[Step]
    riders: np.ndarray
    after: list[Step]


def adapter_steps(adapter: LinearAdapter, x: Tensor, u: Tensor, out: Tensor, base: Sequence[Step]) -> AdapterSteps:
    """Steps of an adapter on a linear whose own steps are `base`; u is an operand buffer of at least Σr columns."""
    x, before = operand_steps(x)
    u = u[:, : adapter.width]
    before.append(adapter.a.product(x, u))
    wide, after = operand_steps(u)
    riders: list[list[int]] = []
    alone = base[0] if len(base) == 1 and isinstance(base[0], Launch) else None
    for s in adapter.sites:
        columns = wide[:, s.a_start : s.a_start + s.rank]
        if alone is not None and can_ride(alone, s.site.start, s.site.stop):
            riders.append(rider(columns, s.b, s.scale, s.site.start, s.site.stop))
        else:
            target = out[:, s.site.start : s.site.stop]
            after.append(s.b.product(columns, target, add=True, factor=s.scale))
    return AdapterSteps(before, np.array(riders, np.int64).reshape(-1, 9), after)


def fuse(sites: Sequence[tuple[str, PackedMatrix]]) -> Linear:
    """A fused linear from separately stored matrices."""
    start = 0
    placed: list[Site] = []
    for module, matrix in sites:
        placed.append(Site(module, start, start + matrix.rows))
        start += matrix.rows
    return Linear(tuple(placed), tuple(m for _, m in sites))
