"""The byte account of a base: every tensor that each rank holds, summed by group. Loader and planner share it.

    account(spec, base, n_ranks)           sums, without listing what one number covers
    iter_held(spec, base, Shard(0, 8))     the same tensors one by one, as a loader would read them

Bytes are those of the formats as stored. A shape or an activation scale that a checkpoint holds beside a packed weight
is read and not kept, and layers for predicting further tokens are not loaded: neither is counted.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from tithe.arch.bases import Base, Grain
from tithe.arch.formats import StoredFormat
from tithe.arch.sharding import Shard
from tithe.arch.spec import ArchSpec
from tithe.arch.tensors import TensorFamily, TensorGroup, iter_tensors, tensor_families
from tithe.errors import ModelError

_MAX_ASKED: Final = 5_000_000
"""Tensors whose formats are asked one by one; the largest models have 70 thousand."""


@dataclass(frozen=True)
class Tally:
    """A sum over tensors. `weight_bytes` are elements (with what GGUF keeps inside its blocks), `scale_bytes` the
    scales and zero points that lie in tensors of their own."""

    tensors: int = 0
    """Logical tensors: a packed weight with its scales is one."""
    parameters: int = 0
    weight_bytes: int = 0
    scale_bytes: int = 0

    @property
    def n_bytes(self) -> int:
        """All that is held."""
        return self.weight_bytes + self.scale_bytes

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.tensors + other.tensors,
            self.parameters + other.parameters,
            self.weight_bytes + other.weight_bytes,
            self.scale_bytes + other.scale_bytes,
        )


Groups = dict[TensorGroup, Tally]
"""Only groups that have tensors."""


@dataclass(frozen=True)
class RankAccount:
    """What one rank holds."""

    rank: int
    experts: range
    """Of each mixture layer."""
    groups: Groups

    @property
    def total(self) -> Tally:
        """All groups together."""
        return sum(self.groups.values(), Tally())


@dataclass(frozen=True)
class Account:
    """What a model holds once, and what each rank holds.

    Example: Kimi-K2-Thinking as published, ``account(spec, base, 8)``: ``total.parameters`` is 1026408232448, and of
    594 GB each of 8 ranks holds 95.
    """

    spec: ArchSpec
    base: str
    groups: Groups
    ranks: tuple[RankAccount, ...]

    @property
    def total(self) -> Tally:
        """The whole model, every tensor once."""
        return sum(self.groups.values(), Tally())

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes, embedding and head included."""
        routed = self.groups.get(TensorGroup.ROUTED_EXPERTS, Tally()).parameters
        idle = routed * (self.spec.n_experts - self.spec.n_experts_per_token)
        return self.total.parameters - (idle // self.spec.n_experts if routed else 0)


class HeldTensor(NamedTuple):
    """One tensor, or one rank's slice of a stacked one."""

    name: str
    group: TensorGroup
    shape: tuple[int, ...]
    """Logical, (…, out, in), of what this rank holds."""
    stored: StoredFormat
    n_bytes: int
    experts: range | None
    """Slice along the first dimension of a stacked tensor; `None`: the whole tensor."""


class _Lot(NamedTuple):
    """So many layers have tensors of one family and format, for these experts (an empty range: of no expert)."""

    family: TensorFamily
    stored: StoredFormat
    experts: range
    n_layers: int


def account(spec: ArchSpec, base: Base, n_ranks: int = 1) -> Account:
    """The account of a model on `n_ranks`. `ModelError` when a format cannot hold a tensor of that shape."""
    shards = [Shard(rank, n_ranks) for rank in range(n_ranks)]
    whole: Groups = {}
    ranks = [RankAccount(shard.rank, shard.experts(spec.n_experts), {}) for shard in shards]
    for lot in _lots(spec, base):
        _add(whole, lot, lot.experts)
        for rank in ranks:
            _add(rank.groups, lot, _overlap(lot.experts, rank.experts))
    return Account(spec, base.name, whole, tuple(ranks))


def family_bytes(spec: ArchSpec, base: Base) -> tuple[tuple[TensorFamily, int], ...]:
    """(family, bytes of all its tensors), each tensor once. `ModelError` as in `account`."""
    sums: dict[TensorFamily, int] = {}
    for lot in _lots(spec, base):
        shares = lot.n_layers * (len(lot.experts) if lot.family.n_experts else 1)
        n_bytes = shares * _n_bytes(lot.family.name, lot.stored, lot.family.one_expert)[0]
        sums[lot.family] = sums.get(lot.family, 0) + n_bytes
    return tuple(sums.items())


def iter_held(spec: ArchSpec, base: Base, shard: Shard) -> Iterator[HeldTensor]:
    """Every tensor that a rank holds, in canonical order. `ModelError` as in `account`."""
    mine = shard.experts(spec.n_experts)
    for tensor in iter_tensors(spec):
        family = tensor.family
        if tensor.expert is not None and tensor.expert not in mine:
            continue
        stored = base.format_of(tensor)
        if not family.is_stacked:
            n_bytes = _n_bytes(tensor.name, stored, family.matrix)[0]
            yield HeldTensor(tensor.name, family.group, family.matrix, stored, n_bytes, None)
        elif mine:
            shape = (len(mine), *family.one_expert)
            n_bytes = len(mine) * _n_bytes(tensor.name, stored, family.one_expert)[0]
            yield HeldTensor(tensor.name, family.group, shape, stored, n_bytes, mine)


def _lots(spec: ArchSpec, base: Base) -> Iterator[_Lot]:
    """The model's tensors in as few lots as the base allows."""
    if base.grain is Grain.TENSOR:
        yield from _counted_lots(spec, base)
        return
    key = _digits if base.grain is Grain.DIGITS else _same
    for family in tensor_families(spec):
        for layers in _runs(family.layers, key) or [()]:
            layer = layers[0] if layers else None
            numbers = range(family.n_experts)
            for experts in _runs(numbers, key) if family.is_per_expert else [numbers]:
                stored = base.format_of(family.member(layer, experts[0] if family.is_per_expert else None))
                yield _Lot(family, stored, range(experts[0], experts[-1] + 1) if experts else numbers, len(layers) or 1)


def _counted_lots(spec: ArchSpec, base: Base) -> Iterator[_Lot]:
    """One lot for each expert, and those of no expert together, after every tensor has been asked."""
    n_tensors = sum(family.n_tensors for family in tensor_families(spec))
    if n_tensors > _MAX_ASKED:
        raise ModelError(
            f"the config claims {n_tensors} tensors, and its quantization_config distinguishes layers or experts by "
            f"number; more than {_MAX_ASKED} are not asked one by one: check num_hidden_layers and the experts"
        )
    counts: Counter[tuple[TensorFamily, StoredFormat, int | None]] = Counter()
    for tensor in iter_tensors(spec):
        counts[tensor.family, base.format_of(tensor), tensor.expert] += 1
    for (family, stored, expert), n_layers in counts.items():
        yield _Lot(family, stored, range(family.n_experts) if expert is None else range(expert, expert + 1), n_layers)


def _runs(numbers: Sequence[int], key: Callable[[int], int]) -> list[tuple[int, ...]]:
    return [tuple(run) for _, run in itertools.groupby(numbers, key)]


def _digits(number: int) -> int:
    return len(str(number))


def _same(_number: int) -> int:
    return 0


def _add(groups: Groups, lot: _Lot, experts: range) -> None:
    """Add a lot's tensors of these experts; all of it when it belongs to none."""
    family = lot.family
    if family.n_experts and not experts:
        return
    shares = lot.n_layers * (len(experts) if family.n_experts else 1)
    n_bytes, scale_bytes = _n_bytes(family.name, lot.stored, family.one_expert)
    tally = Tally(
        tensors=lot.n_layers if family.is_stacked else shares,
        parameters=shares * math.prod(family.one_expert),
        weight_bytes=shares * (n_bytes - scale_bytes),
        scale_bytes=shares * scale_bytes,
    )
    groups[family.group] = groups.get(family.group, Tally()) + tally


def _n_bytes(name: str, stored: StoredFormat, shape: tuple[int, ...]) -> tuple[int, int]:
    """(all bytes, those of scales) of one tensor."""
    try:
        return stored.n_bytes(shape), stored.scale_bytes(shape)
    except ValueError as error:
        raise ModelError(f"{name} of shape {shape} cannot be kept as {stored.kind}: {error}") from error


def _overlap(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))
