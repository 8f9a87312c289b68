"""Buffers and launches that forward and backward of an expert block share.

A pair is a row and one of its experts. Pairs are sorted by expert and computed in windows of at most
`Workspace.window`, so that memory does not grow with the batch. A window's bookkeeping is two small kernels (`Pairs`,
`Finder`); everything else is one launch for all active experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tithe.arch import exchange_rows
from tithe.models.expert_adapter import PlaceTables
from tithe.models.expert_bank import ExpertBank, ExpertBlock
from tithe.models.expert_kernels import ROWS_PER_TASK, combine, find_groups, gather_operands, sort_pairs
from tithe.quant import HAS_BF16_DOT, Launch, kernel_threads
from tithe.quant.grouped import (
    GroupedLaunch,
    Groups,
    PanelScratch,
    outer_scratch,
    product,
    product_scratch,
    transposed_scratch,
    turned_columns,
)
from tithe.quant.runtime import TASKS

WINDOW = 8192
"""Pairs computed at a time unless told otherwise."""


class Workspace:
    """One set of buffers for all layers of a model: launches never overlap (one lane), and nothing in them outlives a
    layer. `rows` is the most rows of a batch; on several ranks there is room for what a round brings (`exchange_rows`).

    Operands are stored as bf16 only where the processor has a dot product for them (`stored`; `mode` as in
    `tithe.quant.grouped_kernels`).
    """

    def __init__(self, blocks: Sequence[ExpertBlock], operand: torch.dtype, rows: int, window: int = WINDOW) -> None:
        self.operand, self.rows = operand, rows
        self.stored = torch.bfloat16 if operand == torch.bfloat16 and HAS_BF16_DOT else torch.float32
        self.mode = 1 if self.stored == torch.bfloat16 else 2 if operand == torch.bfloat16 else 0
        pairs = max(_pairs(block, rows) for block in blocks)
        banks = [bank for block in blocks for bank in block.banks()]
        self.window = min(window, pairs)
        self.experts = max(len(bank) for bank in banks)
        self._buffers: dict[str, Tensor] = {}
        hidden, width = max(bank.hidden for bank in banks), max(bank.width for bank in banks)
        for name, (columns, dtype) in forward_buffers(hidden, width, self.stored).items():
            self.view(name, columns, dtype)
        needed = max(product_scratch(max(hidden, width), self.stored), outer_scratch(self.stored))
        self.scratch = PanelScratch(max(needed, transposed_scratch(max(hidden, 2 * width), self.stored)))
        self.row_scratch = torch.empty(kernel_threads(), 3 * width)
        self.logits = torch.empty(rows, max(block.router.n_experts for block in blocks))
        self.pairs = Pairs(pairs, self.experts)

    def view(self, name: str, columns: int, dtype: torch.dtype | None = None) -> Tensor:
        """[window, columns] of the named buffer, stored operands unless `dtype` says otherwise. Views of one name share
        memory, unless a later one is larger."""
        dtype = dtype or self.stored
        size = self.window * columns
        return self._buffer(name, size, dtype)[:size].view(self.window, columns)

    def turned(self, rank: int) -> Tensor:
        """Room for the window's rows by column, [rank, columns]."""
        columns = turned_columns(self.window, self.experts)
        return self._buffer("turned", rank * columns, self.stored)[: rank * columns].view(rank, columns)

    def _buffer(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = torch.empty(size, dtype=dtype)
        return buffer

    @property
    def n_bytes(self) -> int:
        """Bytes of the buffers made so far, without the threads' scratch."""
        tensors = [*self._buffers.values(), self.logits, *self.pairs.tensors()]
        return sum(t.numel() * t.element_size() for t in tensors)


def _pairs(block: ExpertBlock, rows: int) -> int:
    """The most pairs of a block at once: a rank's own, or those that come in one round."""
    k, ranks = block.router.per_token, block.ranks.size
    return max(rows * k, min(rows, exchange_rows(k, ranks)) * k * ranks)


def forward_buffers(hidden: int, width: int, stored: torch.dtype) -> dict[str, tuple[int, torch.dtype]]:
    """Columns and dtype of what a window's pair takes in the forward, without adapters (Σr operands each place)."""
    return {
        "x": (hidden, stored),
        "gate_up": (2 * width, torch.float32),
        "act": (width, stored),
        "y": (hidden, torch.float32),
    }


def backward_buffers(hidden: int, width: int, stored: torch.dtype) -> dict[str, tuple[int, torch.dtype]]:
    """What the backward takes besides, without adapters (2·Σr operands each place, and the turned rows of one site)."""
    return {"dy": (hidden, stored), "d_act": (width, torch.float32), "d_gate_up": (2 * width, stored)}


class Pairs:
    """Which pairs there are, sorted by expert; see `tithe.models.expert_kernels`. `d_weight` is the backward's."""

    def __init__(self, capacity: int, experts: int) -> None:
        self.offsets, self._cursor = (torch.zeros(experts + n, dtype=torch.int64) for n in (1, 0))
        self.row, self.expert, self.position = (torch.zeros(capacity, dtype=torch.int32) for _ in range(3))
        self.weight, self.d_weight = torch.zeros(capacity), torch.zeros(capacity)

    def tensors(self) -> list[Tensor]:
        """All of it."""
        return [self.offsets, self._cursor, self.row, self.expert, self.position, self.weight, self.d_weight]

    def sorting(self, ids: Tensor, weights: Tensor, experts: int) -> Launch:
        """Sorts the pairs of ids int32 [R, k]; argument 5 is the number of rows."""
        args = [ids.data_ptr(), weights.data_ptr(), 0, ids.shape[1], experts, self.offsets.data_ptr()]
        outputs = (self.row, self.expert, self.weight, self.position, self._cursor)
        return sort_pairs.bind(1, [*args, *(t.data_ptr() for t in outputs)], (ids, weights, self))


class Finder:
    """Writes the groups of a range of rows within a window."""

    def __init__(self, pairs: Pairs, experts: int) -> None:
        self.groups = groups = Groups(experts)
        args = [pairs.offsets.data_ptr(), pairs.row.data_ptr(), experts, 0, 0, 0, 0]
        arrays = (groups.begin, groups.end, groups.active, groups.count, groups.start)
        self._launch = find_groups.bind(1, [*args, *(a.ctypes.data for a in arrays)], (pairs, groups))

    def run(self, start: int, stop: int, lo: int, hi: int) -> None:
        """Rows [start, stop), pairs [lo, hi)."""
        self._launch.args[6:10] = (start, stop, lo, hi)
        self._launch.run()


class Gather:
    """out[p] = x[row of pair p] as operands, for the pairs of a window."""

    def __init__(self, x: Tensor, out: Tensor, workspace: Workspace) -> None:
        is_bf16 = int(x.dtype == torch.bfloat16)
        args = [x.data_ptr(), x.stride(0), is_bf16, 0, 0, out.shape[1], out.data_ptr(), workspace.mode]
        self._row = workspace.pairs.row.data_ptr()
        self._launch = gather_operands.bind(0, args, (x, out, workspace))

    def read(self, x: Tensor) -> None:
        """Take rows from another x [R, W], which must stay until they are gathered."""
        self._launch.args[3:6] = x.data_ptr(), x.stride(0), int(x.dtype == torch.bfloat16)

    def run(self, lo: int, hi: int) -> None:
        """Pairs [lo, hi)."""
        args = self._launch.args
        args[TASKS], args[6], args[7] = tasks(hi - lo), self._row + lo * 4, hi - lo
        self._launch.run()


class Combine:
    """out[r] += Σ weight·(y + bias) over a row's pairs in a window, in ascending expert id. Without weights: 1."""

    def __init__(
        self,
        y: Tensor,
        out: Tensor,
        ids: Tensor,
        workspace: Workspace,
        weights: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        bias_at, weights_at = (t.data_ptr() if t is not None else 0 for t in (bias, weights))
        args = [y.data_ptr(), bias_at, ids.data_ptr(), workspace.pairs.position.data_ptr(), weights_at, ids.shape[1]]
        args += [0, 0, out.data_ptr(), out.stride(0), out.shape[1], 0]
        self._launch = combine.bind(0, args, (y, out, ids, workspace, weights, bias))

    def write(self, out: Tensor, ids: Tensor) -> None:
        """Add to another out [R, H] for other ids of the same k, all weights 1; both must stay until then."""
        self._launch.args[5], self._launch.args[7] = ids.data_ptr(), 0
        self._launch.args[11:13] = out.data_ptr(), out.stride(0)

    def run(self, rows: int, lo: int, hi: int) -> None:
        """The first `rows` rows, pairs [lo, hi)."""
        args = self._launch.args
        args[TASKS], args[9], args[10], args[14] = tasks(rows), lo, hi, rows
        self._launch.run()


class BankSteps:
    """What forward and backward both begin with: sort, and for each window gather the rows and multiply by gate_up.

    `ids` int32 and `weights` float32 [R, k] say which pairs there are; `x` [R, H] are the operand rows.
    """

    def __init__(self, bank: ExpertBank, workspace: Workspace, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        self.bank, self.workspace, self.ids, self.weights = bank, workspace, ids, weights
        self._sort = workspace.pairs.sorting(ids, weights, len(bank))
        self._finder = Finder(workspace.pairs, len(bank))
        self.groups = self._finder.groups
        self.x = workspace.view("x", bank.hidden)
        self.hidden = workspace.view("gate_up", 2 * bank.width, torch.float32)
        self.act = workspace.view("act", bank.width)
        self._gather = Gather(x, self.x, workspace)
        self._product = product(bank.gate_up, self.x, self.hidden, self.groups, workspace.scratch)

    def read(self, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        """Take other rows and pairs of the same k, which must stay until they are computed."""
        self._sort.args[3:5] = ids.data_ptr(), weights.data_ptr()
        self._gather.read(x)

    def windows(self, rows: int) -> list[tuple[int, int]]:
        """Sort the pairs of the first `rows` rows; their windows (first pair, last pair)."""
        self._sort.args[5] = rows
        self._sort.run()
        pairs, size = rows * self.ids.shape[1], self.workspace.window
        return [(lo, min(lo + size, pairs)) for lo in range(0, pairs, size)]

    def gate_up(self, rows: int, lo: int, hi: int) -> None:
        """Gather a window's rows and multiply them by gate_up."""
        self._finder.run(0, rows, lo, hi)
        self._gather.run(lo, hi)
        self._product.run()


def low_rank(
    place: PlaceTables, x: Tensor, out: Tensor, groups: Groups, workspace: Workspace, u: Tensor
) -> list[GroupedLaunch]:
    """Launches of u = x·Aᵀ as operands, then out[:, site] += scale·u·Bᵀ site by site."""
    scratch = workspace.scratch
    launches = [product(place.a, x, u, groups, scratch, rounded_out=workspace.mode == 2)]
    for s in place.sites:
        columns, target = u[:, s.start : s.start + s.rank], out[:, s.site.start : s.site.stop]
        launches.append(product(s.b, columns, target, groups, scratch, add=True, factor=s.scale))
    return launches


def tasks(rows: int) -> int:
    """Tasks of a kernel that takes `ROWS_PER_TASK` rows at a time."""
    return -(-rows // ROWS_PER_TASK)
