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
