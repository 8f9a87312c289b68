"""The shard rule: which part of a model each rank holds. Loader and planner both ask here.

Attention is data-parallel, experts are expert-parallel, and the same ranks sample and train:

    routed experts   in contiguous blocks of experts, so that a rank reads one run of names (or one slice of a stacked
                     tensor); when N does not divide them, the first ranks hold one more
    everything else  whole on every rank

Embedding and head are whole too. A split vocabulary would save (N-1)/N of them, for Kimi-K2 on 8 ranks 4.1 of 95 GB,
but every rank has tokens of its own: each lookup would need an exchange, and each log-prob an all-to-all of hidden
states and a reduction over ranks, in another order of summation for every N, which would cost the bitwise agreement of
one rank layout. The planner can afford 4 GB, the certificate cannot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tithe.arch.spec import ArchSpec
from tithe.arch.tensors import TensorFamily, TensorGroup
from tithe.errors import ConfigError


@dataclass(frozen=True)
class Shard:
    """One rank of `n_ranks`.

    >>> [len(Shard(rank, 3).experts(8)) for rank in range(3)]
    [3, 3, 2]
    """

    rank: int
    n_ranks: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.n_ranks:
            raise ConfigError(f"rank {self.rank} of {self.n_ranks}: ranks count from 0 to {self.n_ranks - 1}")

    def experts(self, n_experts: int) -> range:
        """The experts that this rank holds; empty when there are more ranks than experts before it."""
        size, rest = divmod(n_experts, self.n_ranks)
        begin = self.rank * size + min(self.rank, rest)
        return range(begin, begin + size + (self.rank < rest))


def owner_of(expert: int, n_experts: int, n_ranks: int) -> int:
    """The rank that holds an expert."""
    size, rest = divmod(n_experts, n_ranks)
    longer = rest * (size + 1)
    return expert // (size + 1) if expert < longer else rest + (expert - longer) // size


_WHOLE: Final = (".q_a_proj.", ".kv_a_proj_with_mqa.", ".indexer.")
"""Projections into a bottleneck: too narrow to split, and every rank needs their whole result."""


def tensor_parallel_share(family: TensorFamily, spec: ArchSpec, tp: int) -> tuple[int, int]:
    """(numerator, denominator) of a family that one of `tp` ranks holds, when each matrix is split between them.

    The rule of engines such as vLLM, for plans with one; Tithe's own ranks follow `Shard`. Columns of the projections
    into heads and MLPs and rows of those out of them are split, embedding and head by vocabulary. Heads of keys and
    values are split until each rank has one, and repeated beyond.

    >>> from tithe.arch import known_config, tensor_families
    >>> qwen = ArchSpec.from_config(known_config("qwen3-235b-a22b"))
    >>> [f.name for f in tensor_families(qwen) if tensor_parallel_share(f, qwen, 8) == (1, 4)][0][-13:]
    'k_proj.weight'
    """
    is_narrow = any(part in family.name for part in _WHOLE)
    if family.group in (TensorGroup.NORMS, TensorGroup.ROUTER) or is_narrow:
        return 1, 1
    if any(f".{part}_proj." in family.name for part in "kv") and family.group is TensorGroup.ATTENTION:
        return 1, min(tp, spec.n_kv_heads)
    return 1, tp
