"""`PackedMatrix`: one frozen weight matrix W [N out, K in] in the layout its kernels read (`tithe.quant.kinds`).

Scales are the file's own bytes and the elements its own codes; only their order changes, so a packed matrix of whole
panels takes exactly the bytes of its tensor in the checkpoint.

W̃, what the kernels multiply by, is written there, too. It is the same in packed and in dequantized (BF16, FP32)
storage, bit for bit: one policy, two layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tithe.quant.expand import expand_rows_bf16, expand_transposed, pack_transposed_kernel
from tithe.quant.gather import expand_rows_f32, gather_rows
from tithe.quant.kinds import DENSE_BF16, DENSE_FP32, Kind
from tithe.quant.product import matmul_dot, matmul_fma
from tithe.quant.rows_tile import DOT_ROWS
from tithe.quant.runtime import HAS_BF16_DOT, TASKS, Launch, set_kernel_threads
from tithe.quant.tile import PANEL


class _Scratch:
    """Per-thread panel buffers, grown on demand and shared by every launch (launches never overlap: one lane)."""

    def __init__(self) -> None:
        self.threads = 1
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.stride = 0

    def reserve(self, panel_bytes: int) -> tuple[int, int]:
        if panel_bytes > self.stride:
            self.stride = -(-panel_bytes // 4096) * 4096 + 4096
            self.buffer = torch.empty(self.stride * self.threads + 64, dtype=torch.uint8)
        address = self.buffer.data_ptr()
        return address + (-address) % 64, self.stride


scratch = _Scratch()
"""The buffers of every launch in this process."""


def panel_scratch(n_bytes: int) -> tuple[int, int, Tensor]:
    """(address, stride, what to keep alive) of at least `n_bytes` for every kernel thread, in the shared buffers."""
    return *scratch.reserve(n_bytes), scratch.buffer


def set_threads(n: int) -> None:
    """Use n threads in torch and in the kernels alike. Call it in the thread that computes; others `stay_serial`."""
    torch.set_num_threads(n)
    torch.get_num_threads()  # from now on this thread keeps its number, whatever another thread sets
    set_kernel_threads(n)
    scratch.threads = n
    scratch.stride = 0
    scratch.reserve(1)


def stay_serial() -> None:
    """Keep torch at one thread in this thread and in all that first use it later; to be called after `set_threads`.

    libgomp keeps a team per calling thread, and when the teams together outnumber the processors their workers stop
    waiting actively: every small kernel then pays for waking one, 55,000 times in a step of 64 completions. A thread
    takes torch's last set number when it first computes, its own setting before notwithstanding: hence the first line.
    """
    torch.get_num_threads()
    torch.set_num_threads(1)


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """A frozen matrix W [rows N, columns K]; `rounded` says that W̃ is rounded to bf16."""

    kind: Kind
    rows: int
    columns: int
    data: Tensor
    scale: Tensor | None = None
    zero: Tensor | None = None
    rounded: bool = True
    first_panel: int = 0
    """Where a block of a larger matrix begins in it, for scales that are not stored by panel."""

    @property
    def name(self) -> str:
        """What the elements are: int4, int6, int8, fp4, fp8, bf16 or fp32; with its scales: `kind.name`."""
        return self.kind.elements

    @property
    def panels(self) -> int:
        """Number of 48-row panels."""
        return -(-self.rows // PANEL)

    @property
    def n_bytes(self) -> int:
        """Resident bytes of data, scales and zeros."""
        return sum(t.numel() * t.element_size() for t in self.storages())

    def storages(self) -> list[Tensor]:
        """The tensors that hold the matrix."""
        return list(self.parts().values())

    def parts(self) -> dict[str, Tensor]:
        """The same by field: data, and scale and zero where the kind has them."""
        fields = {"data": self.data, "scale": self.scale, "zero": self.zero}
        return {name: part for name, part in fields.items() if part is not None}

    def source(self) -> list[int]:
        """What kernels are told of the matrix: kind and the addresses of data, scales and zeros (0: none)."""
        first = 0 if self.kind.is_dense else self.first_panel  # dense kinds are told by their whole word
        return [
            self.kind.word | first << 40,
            self.data.data_ptr(),
            self.scale.data_ptr() if self.scale is not None else 0,
            self.zero.data_ptr() if self.zero is not None else 0,
        ]

    def product(self, x: Tensor, out: Tensor, *, add: bool = False, factor: float = 1.0) -> Launch:
        """The launch of one product on fixed buffers (see `matmul`), which must be rows of adjacent elements.

        x may be bf16 only when W̃ is (`rounded`) and where `HAS_BF16_DOT`. `ValueError` for what would be read or
        written wrongly.
        """
        dot = x.dtype == torch.bfloat16
        self._check_product(x, out, dot, add)
        steps = self.columns // 2
        address, stride = scratch.reserve(steps * PANEL * (4 if dot else 8))
        args = [x.data_ptr(), x.stride(0) * x.element_size() // 4, x.shape[0], steps]
        args += [out.data_ptr(), out.stride(0), self.rows, *self.source(), address, stride, int(add)]
        values = [*args, float(factor), int(out.dtype == torch.bfloat16), int(self.rounded), 1, 0, 0]
        chosen = matmul_dot if dot else matmul_fma
        launch = chosen.bind(self.panels, values, (self, x, out, scratch.buffer))
        set_product_rows(launch.args, x.shape[0])
        return launch

    def _check_product(self, x: Tensor, out: Tensor, dot: bool, add: bool) -> None:
        if x.ndim != 2 or x.shape[1] != self.columns:
            raise ValueError(f"x has shape {tuple(x.shape)}, the matrix {self.columns} columns")
        if out.shape != (x.shape[0], self.rows):
            raise ValueError(f"out has shape {tuple(out.shape)}, the product {(x.shape[0], self.rows)}")
        if x.stride(1) != 1 or out.stride(1) != 1:
            raise ValueError("the elements of a row of x and of out must be adjacent")
        if dot and not (self.rounded and HAS_BF16_DOT):
            raise ValueError("bf16 operands need a W̃ rounded to bf16 and a processor with a bf16 dot product")
        if dot and x.stride(0) % 2 and x.shape[0] > 1:
            raise ValueError(f"bf16 rows are read in pairs, so {x.stride(0)} elements from row to row cannot be")
        if add and out.dtype != torch.float32:
            raise ValueError("only a float32 output can be added to")

    def takes_bf16(self) -> bool:
        """Whether products read bf16 operands as they are."""
        return self.rounded and HAS_BF16_DOT

    def matmul(
        self,
        x: Tensor,
        out: Tensor | None = None,
        *,
        add: bool = False,
        factor: float = 1.0,
        low_rank: Sequence[LowRank] = (),
    ) -> Tensor:
        """x·W̃ᵀ: x [M, K] bf16 or float32 → out [M, N] float32 (or bf16), accumulated in float32.

        With `add`, out += factor·x·W̃ᵀ in one fused step. Then out += scale·u·Bᵀ for each (u, B, scale) of `low_rank`,
        in that order, on the way where the kernel can: the same numbers. A row's result does not depend on M. bf16 x
        on a processor without a bf16 dot product is widened first; W̃ is the same there. `ValueError` for shapes that do
        not fit.
        """
        if x.dtype == torch.bfloat16 and not (HAS_BF16_DOT and self.rounded):
            x = x.float()
        if x.stride(-1) != 1 or (x.dtype == torch.bfloat16 and x.stride(0) % 2):
            x = x.contiguous()
        if out is None:
            out = torch.empty(x.shape[0], self.rows)
        launch = self.product(x, out, add=add, factor=factor)
        riding = low_rank if can_ride(launch, 0, self.rows) else ()
        riders = np.array([rider(u, b, scale, 0, self.rows) for u, b, scale in riding], np.int64)
        set_riders(launch, riders if riding else None)
        launch.run()
        for u, b, scale in low_rank[len(riding) :]:
            b.matmul(u, out, add=True, factor=scale)
        return out

    def gather(self, ids: Tensor) -> Tensor:
        """W̃[ids]: int32 [R] → float32 [R, K]. Ids must be valid (checked by the caller once per request)."""
        out = torch.empty(len(ids), self.columns)
        args = [ids.data_ptr(), self.columns // 2, out.data_ptr(), *self.source(), int(self.rounded)]
        gather_rows.bind(len(ids), args).run()
        return out

    def expand(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Row-major W̃ [N, K] as bf16 or float32, for the input gradient and for tests."""
        out = torch.empty(self.rows, self.columns, dtype=dtype) if out is None else out
        head = [self.columns // 2, self.rows, out.data_ptr(), *self.source()]
        if dtype == torch.bfloat16 and self.kind != DENSE_FP32:
            address, stride = scratch.reserve(self.columns // 2 * PANEL * 4)
            expand_rows_bf16.bind(self.panels, [*head, address, stride]).run()
        elif dtype == torch.bfloat16:
            out.copy_(self.expand(torch.float32))
        else:
            expand_rows_f32.bind(self.rows, [*head, int(self.rounded)]).run()
        return out

    def transposed(self, out: Tensor) -> PackedMatrix:
        """W̃ᵀ [K, N] for products with W̃ (input gradients), in the buffer `out`; valid until it is used again.

        `out` has at least `transposed_numel` operand entries, bf16 or float32. An odd N is made even by zeros.
        """
        _check_panels(out, self.rows, self.columns, out.dtype)
        steps = self.columns // 2
        if self.kind == DENSE_FP32 and out.dtype == torch.bfloat16:
            return pack_transposed(self.expand(torch.bfloat16), out)
        if out.dtype == torch.bfloat16:
            address, stride = scratch.reserve(steps * PANEL * 4)
            head = [steps, self.rows, out.data_ptr(), *self.source(), address, stride]
            expand_transposed.bind(self.panels, head).run()
            return PackedMatrix(DENSE_BF16, self.columns, self.rows + self.rows % 2, out, rounded=True)
        return pack_transposed(self.expand(torch.float32), out)

    def blocks(self, panels: int) -> Iterator[tuple[int, PackedMatrix]]:
        """The matrix cut into blocks of at most `panels` panels of rows: (first row, view), for work in bounded
        memory."""
        for first in range(0, self.panels, panels):
            part = slice(first, first + panels)
            rows = min(self.rows - first * PANEL, panels * PANEL)
            cut = {name: t[part] for name, t in self.parts().items() if name in self.kind.panelled}
            yield first * PANEL, replace(self, rows=rows, first_panel=self.first_panel + first, **cut)

    @property
    def transposed_numel(self) -> int:
        """Operand entries that `transposed` needs."""
        return transposed_numel(self.rows, self.columns)

    def dequantized(self) -> PackedMatrix:
        """The same W̃ in BF16 storage (or FP32 when W̃ is not rounded); the products keep their bits."""
        if self.kind.is_dense:
            return self
        dtype = torch.bfloat16 if self.rounded else torch.float32
        return pack_dense(self.expand(dtype), rounded=self.rounded)


LowRank = tuple[Tensor, PackedMatrix, float]
"""u [M, r], B [N, r] and the scale of a product that is added to another's output."""


def row_block(panels: int, rows: int) -> int:
    """Rows per task: all where there are panels enough for every thread, else blocks, so that no thread idles."""
    if panels >= 4 * scratch.threads or rows <= 16:
        return max(rows, 1)
    return max(16, -(-rows // (4 * scratch.threads)) + DOT_ROWS - 1 & -DOT_ROWS)


def set_product_rows(args: np.ndarray, rows: int, width: int = PANEL) -> None:
    """Let a product's argument block compute the first `rows` rows of its buffers; a task takes `width` columns."""
    args[5] = rows
    panels = -(-int(args[9]) // width)
    args[20] = row_block(panels, rows)
    args[TASKS] = panels * -(-rows // int(args[20]))


def can_ride(base: Launch, start: int, stop: int) -> bool:
    """Whether products on the outputs [start, stop) of a base product may ride on it: whole panels, bf16 operands."""
    return base.of.carries_riders and int(base.args[9]) % PANEL == 0 and start % PANEL == 0 and stop % PANEL == 0


def rider(u: Tensor, b: PackedMatrix, scale: float, start: int, stop: int) -> list[int]:
    """The nine numbers of a product out[:, start:stop] += scale·u·Bᵀ that rides on another (see `product.ride`)."""
    bits = int(np.float64(scale).view(np.int64))
    rows = [0, u.shape[0], start // PANEL, stop // PANEL]
    return [u.data_ptr(), u.stride(0) // 2, b.data.data_ptr(), b.columns // 2, bits, *rows]


def set_riders(base: Launch, riders: np.ndarray | None) -> None:
    """Let products ride on a base product: int64 [n, 9], kept alive by the caller; None for none."""
    base.args[21] = 0 if riders is None else riders.ctypes.data
    base.args[22] = 0 if riders is None else len(riders)


def transposed_numel(rows: int, columns: int) -> int:
    """Entries of the panels of a transposed [rows, columns] array."""
    return -(-columns // PANEL) * PANEL * (rows + rows % 2)


def _check_panels(out: Tensor, rows: int, columns: int, dtype: torch.dtype) -> None:
    if out.dtype != dtype or not out.is_contiguous() or out.numel() < transposed_numel(rows, columns):
        raise ValueError(
            f"the panels of a transposed {(rows, columns)} array need {transposed_numel(rows, columns)} adjacent "
            f"entries of {dtype}, not {tuple(out.shape)} of {out.dtype}"
        )


def pack_transposed(source: Tensor, out: Tensor | None = None) -> PackedMatrix:
    """The transpose of a row-major operand array [R, C] as a matrix [C, R]: a product with it is x·source for x [M, R].

    bf16 or float32; an odd R is made even by a zero row. `out` is a buffer of at least `transposed_numel` entries.
    """
    rows, columns = source.shape
    source = source if source.stride(1) == 1 else source.contiguous()
    bf16 = source.dtype == torch.bfloat16
    if out is None:
        out = torch.empty(transposed_numel(rows, columns), dtype=source.dtype)
    _check_panels(out, rows, columns, source.dtype)
    args = [source.data_ptr(), source.stride(0), rows, columns, out.data_ptr(), int(bf16)]
    pack_transposed_kernel.bind(-(-columns // PANEL), args).run()
    return PackedMatrix(DENSE_BF16 if bf16 else DENSE_FP32, columns, rows + rows % 2, out, rounded=bf16)


def pack_dense(w: Tensor, *, rounded: bool = True) -> PackedMatrix:
    """Store w [N, K] as BF16 (`rounded`) or FP32. An odd K is refused (pairs)."""
    rows, columns = w.shape
    if columns % 2:
        raise ValueError(f"a matrix of {columns} columns cannot be stored in pairs")
    pad = -rows % PANEL
    dtype = torch.bfloat16 if rounded else torch.float32
    full = torch.zeros(rows + pad, columns, dtype=dtype)
    full[:rows] = w
    if rounded:
        data = full.view(-1, PANEL, columns // 2, 2).permute(0, 2, 1, 3).contiguous()
        return PackedMatrix(DENSE_BF16, rows, columns, data, rounded=True)
    data = full.view(-1, PANEL, columns).permute(0, 2, 1).contiguous()
    return PackedMatrix(DENSE_FP32, rows, columns, data, rounded=False)
