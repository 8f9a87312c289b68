"""Where the rows of a micro-batch live: block tables, shared prompt pages, forks. The sampler's own offsets and pages.

Shape legend: _R rows, _S segments.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tithe.models.kv import PAGE
from tithe.packing import MicroBatch


@dataclass(frozen=True, eq=False)
class PageLayout:
    """int32 arrays. `table` [S, widest]; `first` [S] is a segment's first position.

    A rollout's segment shares its prompt's full pages and forks the partly filled one (`fork_source` → `fork_target`,
    `fork_slots` positions).
    """

    segment: Tensor
    position: Tensor
    table: Tensor
    first: Tensor
    start: Tensor
    length: Tensor
    prefix: Tensor
    fork_source: Tensor
    fork_target: Tensor
    fork_slots: Tensor
    pages: int
    positions: int

    @property
    def sequences(self) -> int:
        """S."""
        return self.table.shape[0]

    @property
    def rows(self) -> int:
        """Rows that belong to a segment; padding comes behind them."""
        return int(self.length.sum())


def page_layout(micro: MicroBatch) -> PageLayout:
    """Assign pages to every segment of a micro-batch, in order."""
    prefix, length = micro.seg_prefix.astype(np.int64), micro.seg_len.astype(np.int64)
    first = np.where(prefix < 0, 0, length[prefix])
    last = first + length  # one past the last position
    widest = int(max(-(-last.max() // PAGE), 1))
    table = np.zeros((len(prefix), widest), np.int32)
    forks: list[tuple[int, int, int]] = []
    taken = 0
    for s in range(len(prefix)):
        full = 0 if prefix[s] < 0 else int(first[s]) // PAGE
        table[s, :full] = table[prefix[s], :full]
        own = -(-int(last[s]) // PAGE) - full if length[s] else 0
        table[s, full : full + own] = np.arange(taken, taken + own)
        slots = int(first[s]) % PAGE
        if own and slots:
            forks.append((int(table[prefix[s], full]), int(table[s, full]), slots))
        taken += own
    segment = np.full(len(micro.input_ids), -1, np.int32)
    segment[: micro.n_rows] = np.repeat(np.arange(len(prefix)), length)
    columns = np.array(forks, np.int32).reshape(-1, 3)

    def tensor(x: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x, np.int32))

    return PageLayout(
        segment=tensor(segment),
        position=tensor(micro.positions),
        table=tensor(table),
        first=tensor(first),
        start=tensor(micro.seg_start),
        length=tensor(length),
        prefix=tensor(prefix),
        fork_source=tensor(columns[:, 0]),
        fork_target=tensor(columns[:, 1]),
        fork_slots=tensor(columns[:, 2]),
        pages=max(taken, 1),
        positions=int(max(last.max(), 1)),
    )
