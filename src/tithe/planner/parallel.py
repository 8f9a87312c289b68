"""How a model is divided among GPUs, and what of its base one of them holds.

dp   attention, embedding and head whole on every rank, experts in contiguous blocks (`tithe.arch.Shard`): how
     Tithe's own ranks divide a mixture; each rank has sequences of its own
tp   each matrix divided among the ranks of a replica (`tithe.arch.tensor_parallel_share`): how engines serve dense
     models; the ranks of a replica share their sequences
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tithe.arch import ArchSpec, Base, TensorFamily, TensorGroup, family_bytes, tensor_parallel_share
from tithe.planner.hardware import Hardware
from tithe.planner.request import PlanRequest


@dataclass(frozen=True)
class Parallel:
    """Replicas of a model and the ranks of each."""

    uses_tp: bool
    ranks: int
    """GPUs of one replica."""
    replicas: int
    """GPUs beyond `ranks` × `replicas` hold nothing."""

    @property
    def ways(self) -> int:
        """Ranks that divide a sequence's work."""
        return self.ranks if self.uses_tp else 1

    @property
    def groups(self) -> int:
        """Groups of ranks that have sequences of their own."""
        return self.replicas * (1 if self.uses_tp else self.ranks)

    def share(self, count: int) -> int:
        """Of so many sequences, those of the fullest group."""
        return -(-count // self.groups)


def divide(request: PlanRequest, hardware: Hardware) -> Parallel:
    """The division for so many GPUs, a rule of the request alone, so that more GPUs never hold more each."""
    if not request.uses_tp:
        return Parallel(uses_tp=False, ranks=hardware.gpus, replicas=1)
    ranks = request.tp or power_of_two(hardware.gpus_on_node)
    ranks = min(ranks, hardware.gpus)
    return Parallel(uses_tp=True, ranks=ranks, replicas=hardware.gpus // ranks)


def power_of_two(limit: int) -> int:
    """The largest that is not above `limit` ≥ 1."""
    return 1 << (limit.bit_length() - 1)


def base_rank_bytes(spec: ArchSpec, base: Base, parallel: Parallel) -> int:
    """Bytes of the base on the fullest rank. `ModelError` when a format cannot hold a tensor."""
    return sum(rank_bytes_by_group(spec, base, parallel).values())


def rank_bytes_by_group(spec: ArchSpec, base: Base, parallel: Parallel) -> dict[TensorGroup, int]:
    """Bytes of the base on the fullest rank, by group."""
    groups: dict[TensorGroup, int] = {}
    for family, n_bytes in _families(spec, base):
        if family.group is TensorGroup.ROUTED_EXPERTS:
            held = -(-spec.n_experts // parallel.ranks)
            share = held, spec.n_experts
        elif parallel.uses_tp:
            share = tensor_parallel_share(family, spec, parallel.ranks)
        else:
            share = 1, 1
        groups[family.group] = groups.get(family.group, 0) - (-n_bytes * share[0] // share[1])
    return groups


def whole_bytes(spec: ArchSpec, base: Base) -> int:
    """Bytes of the base once."""
    return sum(n_bytes for _, n_bytes in _families(spec, base))


@lru_cache(maxsize=16)
def _families(spec: ArchSpec, base: Base) -> tuple[tuple[TensorFamily, int], ...]:
    return family_bytes(spec, base)


def kv_ways(spec: ArchSpec, parallel: Parallel) -> int:
    """Ranks that divide one sequence's cache: heads are divided, a latent is whole on every rank."""
    if not parallel.uses_tp or spec.latent is not None:
        return 1
    return min(parallel.ranks, spec.n_kv_heads)
