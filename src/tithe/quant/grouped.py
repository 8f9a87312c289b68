"""Grouped products: the rows of every expert times that expert's packed matrix, one launch for all of them.

Rows lie sorted by group (`Groups`); a `GroupTable` says where each group's matrix lies. Three launches: x·W̃ᵀ
(`product`), dy·W̃ (`transposed_product`), and the weight gradients of low-rank matrices (`outer`). A row's bits equal
those of `PackedMatrix.matmul` (of `PackedMatrix.transposed` for dy·W̃) on that row alone.

Scratch is per thread and holds what one task expands, never a matrix: K·96 bytes for a product of bf16 operands, N·192
+ 9 KiB for a transposed one (twice that for float32 operands), whatever the number of experts: `product_scratch`,
`transposed_scratch`, `outer_scratch` are exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tithe.quant.bank import PackedBank
from tithe.quant.grouped_gradient_kernels import (
    BLOCK_PAIRS,
    OUTER_ROWS,
    grouped_outer_dot,
    grouped_outer_fma,
    grouped_transposed_dot,
    grouped_transposed_fma,
    turn_rows,
)
from tithe.quant.grouped_kernels import grouped_dot, grouped_fma
from tithe.quant.kinds import DENSE_FP32
from tithe.quant.matrix import PackedMatrix
from tithe.quant.runtime import HAS_BF16_DOT, TASKS, Launch, kernel_threads
from tithe.quant.tile import PANEL


class GroupTable:
    """Addresses of E packed matrices [rows N, columns K], one a group; `addresses` is int64 [E, 5] (see
    `tithe.quant.grouped_kernels`), `panels` how many panels of 48 rows a group touches at most.

    Example: 8 experts of a bank, and one low-rank matrix that all 8 share::

        table = GroupTable.of_bank(bank)
        shared = GroupTable.repeated(pack_dense(a), 8)
    """

    def __init__(self, matrices: Sequence[PackedMatrix], addresses: np.ndarray, rows: int, panels: int) -> None:
        self.addresses, self.rows, self.panels = addresses, rows, panels
        self.columns, self.rounded = matrices[0].columns, matrices[0].rounded
        self.matrices = tuple(matrices)

    @classmethod
    def of_matrices(cls, matrices: Sequence[PackedMatrix]) -> GroupTable:
        """Matrices of one shape, which may differ in storage; `ValueError` for others or none."""
        shapes = {(m.rows, m.columns, m.rounded) for m in matrices}
        if len(shapes) != 1:
            raise ValueError(f"a group table needs matrices of one shape and rounding, not {sorted(shapes)}")
        addresses = np.array([[*m.source(), 0] for m in matrices], np.int64)
        return cls(matrices, addresses, matrices[0].rows, matrices[0].panels)

    @classmethod
    def of_bank(cls, bank: PackedBank) -> GroupTable:
        """The matrices of a bank."""
        kind, *start = bank.source()
        steps = np.arange(len(bank), dtype=np.int64)[:, None] * np.array(bank.strides(), np.int64)
        addresses = np.zeros((len(bank), 5), np.int64)
        addresses[:, 0], addresses[:, 1:4] = kind, np.array(start, np.int64) + steps
        return cls([bank.stacked], addresses, bank.rows, bank.panels)

    @classmethod
    def of_rows(cls, tall: PackedMatrix, groups: int) -> GroupTable:
        """Dense matrices one below the other in one of [groups·N, K]: small ones then share panels."""
        rows = tall.rows // groups
        if rows * groups != tall.rows or tall.scale is not None:
            raise ValueError(f"{tall.rows} rows of {tall.name} are no {groups} dense matrices of one height")
        begin = np.arange(groups, dtype=np.int64) * rows
        addresses = np.zeros((groups, 5), np.int64)
        panel_bytes = tall.columns * PANEL * tall.data.element_size()
        addresses[:, 0], addresses[:, 1] = tall.kind.word, tall.data.data_ptr() + begin // PANEL * panel_bytes
        addresses[:, 4] = begin % PANEL
        return cls([tall], addresses, rows, int((-(-(begin % PANEL + rows) // PANEL)).max()))

    @classmethod
    def repeated(cls, matrix: PackedMatrix, groups: int) -> GroupTable:
        """One matrix that all groups share."""
        return cls([matrix], np.array([[*matrix.source(), 0]] * groups, np.int64), matrix.rows, matrix.panels)

    def __len__(self) -> int:
        """Number of groups E."""
        return len(self.addresses)

    def storages(self) -> list[Tensor]:
        """The tensors that hold the matrices."""
        return [t for m in self.matrices for t in m.storages()]


class Groups:
    """Which rows are whose: group e owns begin[e] ≤ row < end[e]; `active[:count]` are the groups with rows.

    The arrays stay where they are (launches hold their addresses); kernels or `set` write them. `start` gives every
    group an even first column in arrays by column (`turn`), [0, rows + E + 2).
    """

    def __init__(self, groups: int) -> None:
        self.begin, self.end, self.start = (np.zeros(groups, np.int64) for _ in range(3))
        self.active = np.zeros(groups, np.int32)
        self.count = np.zeros(1, np.int64)

    def set(self, begin: np.ndarray, end: np.ndarray) -> None:
        """Take ranges from Python: ascending, disjoint, int64 [E]."""
        self.begin[:], self.end[:] = begin, end
        active = np.flatnonzero(end > begin)
        self.count[0] = len(active)
        self.active[: len(active)] = active
        self.place_columns()

    def place_columns(self) -> None:
        """Write `start` for the ranges."""
        np.bitwise_and(self.begin + np.arange(1, len(self.begin) + 1), ~1, out=self.start)

    def addresses(self) -> list[int]:
        """Where active, begin and end lie."""
        return [self.active.ctypes.data, self.begin.ctypes.data, self.end.ctypes.data]


def turned_columns(rows: int, groups: int) -> int:
    """Columns of an array by column for `rows` rows of `groups` groups: even."""
    return (rows + groups + 3) // 2 * 2


class PanelScratch:
    """What each kernel thread expands into: `bytes_per_thread`, made when the number of threads is known."""

    def __init__(self, bytes_per_thread: int) -> None:
        self.stride = -(-bytes_per_thread // 4096) * 4096 + 4096  # threads never meet in a page
        self.buffer = torch.empty(self.stride * kernel_threads() + 64, dtype=torch.uint8)
        self.bytes_per_thread = bytes_per_thread

    def place(self, needed: int) -> list[int]:
        """Address and stride; `ValueError` when it is too small."""
        if needed > self.bytes_per_thread:
            raise ValueError(f"a task needs {needed} bytes of scratch, not {self.bytes_per_thread}")
        address = self.buffer.data_ptr()
        return [address + (-address) % 64, self.stride]


def product_scratch(columns: int, dtype: torch.dtype) -> int:
    """Bytes a thread needs for x·W̃ᵀ: one panel of 48 rows."""
    return columns * PANEL * dtype.itemsize


def transposed_scratch(rows: int, dtype: torch.dtype) -> int:
    """Bytes a thread needs for dy·W̃: 96 columns of W̃ turned around, and 48 rows of them as they are stored."""
    return (rows + PANEL) * 2 * BLOCK_PAIRS * dtype.itemsize


def outer_scratch(dtype: torch.dtype) -> int:
    """Bytes a thread needs for a weight gradient."""
    return OUTER_ROWS * PANEL * dtype.itemsize


class GroupedLaunch:
    """A grouped kernel on fixed buffers; `run` computes the groups that are active then."""

    __slots__ = ("groups", "launch", "tasks_per_group")

    def __init__(self, launch: Launch, groups: Groups, tasks_per_group: int) -> None:
        self.launch, self.groups, self.tasks_per_group = launch, groups, tasks_per_group

    def run(self) -> None:
        """Run all tasks of the active groups and return."""
        tasks = int(self.groups.count[0]) * self.tasks_per_group
        if tasks:
            self.launch.args[TASKS] = tasks
            self.launch.run()


def product(
    table: GroupTable,
    x: Tensor,
    out: Tensor,
    groups: Groups,
    scratch: PanelScratch,
    *,
    add: bool = False,
    factor: float = 1.0,
    rounded_out: bool = False,
) -> GroupedLaunch:
    """out (+= factor·) x·W̃ᵀ: x [P, K] bf16 or float32, out [P, N] float32 or bf16 (`rounded_out`: float32 rounded to
    bf16). Rows of no group are left alone. `ValueError` for what would be read or written wrongly."""
    _check(x, out, table, (table.columns, table.rows), add=add)
    dot = x.dtype == torch.bfloat16
    args = _operands(x, table.columns, out, table.rows, table, groups)
    args += [table.panels, *scratch.place(product_scratch(table.columns, x.dtype))]
    values = [*args, int(add), float(factor), _mode(out, rounded_out), int(table.rounded)]
    launch = (grouped_dot if dot else grouped_fma).bind(0, values, (table, x, out, groups, scratch))
    return GroupedLaunch(launch, groups, table.panels)


def transposed_product(
    table: GroupTable,
    dy: Tensor,
    out: Tensor,
    groups: Groups,
    scratch: PanelScratch,
    *,
    add: bool = False,
    factor: float = 1.0,
    rounded_out: bool = False,
) -> GroupedLaunch:
    """out (+= factor·) dy·W̃: dy [P, N], out [P, K]; N must be even. Otherwise as `product`."""
    if table.rows % 2 or (table.addresses[:, 4] % 2).any():
        raise ValueError(f"input gradients read the rows of W̃ in pairs: {table.rows} rows cannot be")
    _check(dy, out, table, (table.rows, table.columns), add=add)
    dot = dy.dtype == torch.bfloat16
    blocks = -(-table.columns // (2 * BLOCK_PAIRS))
    args = _operands(dy, table.columns, out, table.rows, table, groups)
    args += [blocks, *scratch.place(transposed_scratch(table.rows, dy.dtype))]
    values = [*args, int(add), float(factor), _mode(out, rounded_out), int(table.rounded)]
    chosen = grouped_transposed_dot if dot else grouped_transposed_fma
    return GroupedLaunch(chosen.bind(0, values, (table, dy, out, groups, scratch)), groups, blocks)


def turn(
    source: Tensor, out: Tensor, groups: Groups, *, weights: Tensor | None = None, rounded: bool = False
) -> GroupedLaunch:
    """out [r, ≥ `turned_columns`] = the operand rows source [P, r] by column, times weights [P] when given. `rounded`:
    float32 that holds bf16 values."""
    if source.dtype != out.dtype or out.shape[0] < source.shape[1] or out.stride(1) != 1 or source.stride(1) != 1:
        raise ValueError(f"rows {tuple(source.shape)} of {source.dtype} do not fit {tuple(out.shape)} of {out.dtype}")
    if out.shape[1] < turned_columns(source.shape[0], len(groups.begin)) or out.stride(0) % 2:
        raise ValueError(f"{source.shape[0]} rows need more columns than {out.shape[1]}, at an even stride")
    args = [source.data_ptr(), source.stride(0), source.shape[1], weights.data_ptr() if weights is not None else 0]
    args += [out.data_ptr(), out.stride(0), *groups.addresses(), groups.start.ctypes.data]
    keep = (source, weights, out, groups)
    return GroupedLaunch(turn_rows.bind(0, [*args, _mode(out, rounded)], keep), groups, 1)


def outer(
    turned: Tensor, x: Tensor, out: Tensor, groups: Groups, scratch: PanelScratch, *, factor: float = 1.0
) -> GroupedLaunch:
    """out[e] [r, W] += factor·Σ_p a[p]·x[p] over each group's rows: `turned` holds a by column (`turn`), x is [P, W],
    out float32 [E, r, W]. Sums run over rows in ascending order, in steps of 256: the same on any number of threads."""
    if out.dtype != torch.float32 or not out.is_contiguous() or out.shape[2] != x.shape[1]:
        raise ValueError(f"sums of {tuple(x.shape)} need float32 [E, r, {x.shape[1]}] side by side")
    if turned.dtype != x.dtype or x.stride(1) != 1 or out.shape[:2] != (len(groups.begin), turned.shape[0]):
        raise ValueError(f"{tuple(turned.shape)} of {turned.dtype} does not fit {tuple(out.shape)}, {x.dtype}")
    dot = x.dtype == torch.bfloat16
    lda = turned.stride(0) // 2 if dot else turned.stride(0)
    args = [turned.data_ptr(), lda, turned.shape[0], groups.start.ctypes.data, x.data_ptr(), x.stride(0), x.shape[1]]
    args += [out.data_ptr(), out.stride(0) * 4, *groups.addresses(), *scratch.place(outer_scratch(x.dtype))]
    chosen = grouped_outer_dot if dot else grouped_outer_fma
    launch = chosen.bind(0, [*args, float(factor)], (turned, x, out, groups, scratch))
    return GroupedLaunch(launch, groups, -(-x.shape[1] // PANEL))


def _mode(out: Tensor, rounded: bool) -> int:
    return 1 if out.dtype == torch.bfloat16 else 2 if rounded else 0


def _operands(x: Tensor, columns: int, out: Tensor, rows: int, table: GroupTable, groups: Groups) -> list[int]:
    stride = x.stride(0) * x.element_size() // 4
    args = [x.data_ptr(), stride, columns // 2, out.data_ptr(), out.stride(0), rows]
    return [*args, table.addresses.ctypes.data, *groups.addresses()]


def _check(x: Tensor, out: Tensor, table: GroupTable, shape: tuple[int, int], *, add: bool) -> None:
    if x.ndim != 2 or (x.shape[1], out.shape[1]) != shape or out.shape[0] != x.shape[0]:
        raise ValueError(f"x {tuple(x.shape)} and out {tuple(out.shape)} do not fit a product {shape[0]} → {shape[1]}")
    if x.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("the elements of a row of x and of out must be adjacent")
    if x.dtype == torch.bfloat16:
        if not (table.rounded and HAS_BF16_DOT) or any(m.kind == DENSE_FP32 for m in table.matrices):
            raise ValueError("bf16 operands need a W̃ rounded to bf16 and a processor with a bf16 dot product")
        if x.stride(0) % 2:
            raise ValueError(f"bf16 rows are read in pairs, so {x.stride(0)} elements from row to row cannot be")
    if add and out.dtype != torch.float32:
        raise ValueError("only a float32 output can be added to")
