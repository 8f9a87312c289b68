"""`RowBlocks`: which rows of which expert a program of the kernels owns, found on the device without waiting for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

ROWS: Final = 64
"""Rows of a block at most: by counting operations, the least at which multiplying by a tile of W̃ takes about as long as
expanding it. One number for sampler and trainer, because with another the compiler may choose instructions that sum in
another order."""


@dataclass(frozen=True, eq=False)
class RowBlocks:
    """Blocks of at most `ROWS` rows, each of one expert; the last ones may be empty (start = stop = 0).

    Example: 3 rows of expert 0 and 70 of expert 2 make three blocks, and a fourth that is empty::

        RowBlocks.of_ranges(torch.tensor([0, 3, 3]), torch.tensor([3, 3, 73]), rows=73)
        # expert [0, 2, 2, 0]  start [0, 3, 67, 0]  stop [3, 67, 73, 0]
    """

    expert: Tensor
    """int32 [B]."""
    start: Tensor
    """int32 [B]: first row."""
    stop: Tensor
    """int32 [B]: one past the last row."""

    @classmethod
    def of_ranges(cls, begin: Tensor, end: Tensor, rows: int) -> RowBlocks:
        """Expert e owns rows begin[e] ≤ p < end[e] of `rows`: int64 or int32 [E], ascending and disjoint, unchecked.

        B depends on E and `rows` alone, so that the host need not wait: rows // ROWS full blocks and one more for each
        expert that can have rows.
        """
        experts = begin.shape[0]
        full = (end - begin + (ROWS - 1)) // ROWS
        last = torch.cumsum(full, 0)
        block = torch.arange(rows // ROWS + min(experts, rows), device=begin.device)
        expert = torch.searchsorted(last, block, right=True)
        empty = expert == experts
        expert = expert.masked_fill(empty, 0)
        start = begin[expert] + (block - (last - full)[expert]) * ROWS
        stop = torch.minimum(start + ROWS, end[expert])
        parts = (expert, start.masked_fill(empty, 0), stop.masked_fill(empty, 0))
        return cls(*(part.to(torch.int32) for part in parts))

    def __len__(self) -> int:
        """Number of blocks B, empty ones included."""
        return self.expert.shape[0]
