"""Stored rows → packed matrices and banks of them, a block of rows at a time.

What is in memory at once: what stays, some blocks' worth of temporaries (`SCRATCH_BYTES` in float32 each, or
`ROWS_AT_ONCE` rows where those are more), and the pages of the tensor that is being read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from tithe.arch import TensorFormat
from tithe.errors import ModelError
from tithe.models.loader_rows import BLOCK_SIDE, Block, Rows
from tithe.models.options import ModelOptions
from tithe.quant import PackedBank, PackedMatrix, pack_dense, pack_int4, pack_int8
from tithe.quant.codes import E2M1, E4M3, E4M3_GLOBAL, E8M0, F16_ZERO, F32_BLOCK, Q4_K, Q6_K, S4, S6, S8, U4
from tithe.quant.reference import dequantize, quantize_int4, quantize_int8
from tithe.quant.repack import REPACKED, repack, repack_parts
from tithe.quant.tile import PANEL
from tithe.utils.memory import release_unused

ROWS_AT_ONCE: Final = math.lcm(PANEL, BLOCK_SIDE)
"""Blocks are multiples of this, so that they begin with whole panels and whole scales."""
SCRATCH_BYTES: Final = 2 * 2**20
_TRIM_BYTES: Final = 16 * 2**20
"""Freed blocks lie between what stays, where the C library keeps them; every so many bytes it is told not to."""
_LARGEST_NUMBER: Final = {U4: 15.0, S4: 8.0, S8: 128.0, S6: 32.0, E2M1: 6.0, E4M3: 448.0}
"""By element code."""


class Packer:
    """Packs under one set of options. `max_abs_error` is the largest |W̃ − value in the file| so far."""

    def __init__(self, options: ModelOptions) -> None:
        self.options = options
        self.max_abs_error = 0.0
        self._untrimmed = 0

    def matrix(self, rows: Rows, *, is_linear: bool = True) -> PackedMatrix:
        """One matrix. `ModelError` names the tensor that is damaged or cannot be packed.

        Formats that kernels read stay as published; others become dense, or are quantized when the options ask for it
        and `is_linear`.
        """
        whole: PackedMatrix | None = None
        for start, block in self._blocks(rows, is_linear):
            if block.rows == rows.rows:
                whole = block
                break
            if whole is None:
                like = _of_rows(block, rows.rows)
                whole = replace(like, **{name: part.new_zeros(part.shape) for name, part in like.parts().items()})
            _put_rows(whole, start, block)
        assert whole is not None
        self._settle(rows, whole)
        return whole

    def bank(self, experts: Sequence[Rows]) -> PackedBank:
        """A matrix for each expert, all of one shape and format, written in place one after the other."""
        bank: PackedBank | None = None
        for e, rows in enumerate(experts):
            for start, block in self._blocks(rows, is_linear=True):
                if bank is None:
                    bank = PackedBank.allocate(_of_rows(block, rows.rows), len(experts))
                _put_rows(bank[e], start, block)
            assert bank is not None
            self._settle(rows, bank[e])
        assert bank is not None
        return bank

    def dense(self, matrices: Sequence[PackedMatrix]) -> PackedMatrix:
        """The W̃ of several matrices as one, where their formats cannot be one."""
        rounded = self.options.rounded
        dtype = torch.bfloat16 if rounded else torch.float32
        return pack_dense(torch.cat([m.expand(dtype) for m in matrices]), rounded=rounded)

    def _settle(self, rows: Rows, packed: PackedMatrix) -> None:
        """Let go of what is no longer needed."""
        rows.release()
        self._untrimmed += packed.n_bytes
        if self._untrimmed > _TRIM_BYTES:
            self._untrimmed = 0
            release_unused()

    # ---- blocks

    def _blocks(self, rows: Rows, is_linear: bool) -> Iterator[tuple[int, PackedMatrix]]:
        """(first row, packed block)."""
        step = max(SCRATCH_BYTES // (4 * rows.columns) // ROWS_AT_ONCE, 1) * ROWS_AT_ONCE
        for start in range(0, rows.rows, step):
            try:
                packed = self._pack(rows, rows.read(start, min(start + step, rows.rows)), is_linear)
            except (ModelError, ValueError) as error:
                raise ModelError(f"{rows.name}: {error}") from error
            yield start, packed.dequantized() if self.options.compute == "dequantized" else packed

    def _pack(self, rows: Rows, block: Block, is_linear: bool) -> PackedMatrix:
        kind, rounded = rows.stored.kind, self.options.rounded
        if kind.is_compound or kind in REPACKED:
            if kind.is_compound:
                packed = repack_parts(block, rows.stored, rounded=rounded, gptq_v2=rows.stored.gptq_v2)
            else:
                packed = repack(block[""], kind, rounded=rounded)
            self._note_rounding(packed)
            return packed
        if is_linear and self.options.quantize != "none":
            return self._quantized(dequantize(block[""], kind))
        if kind is TensorFormat.BF16:
            bits = np.ascontiguousarray(block[""]).view(np.int16)
            return pack_dense(torch.from_numpy(bits).view(torch.bfloat16), rounded=rounded)
        exact = torch.from_numpy(np.ascontiguousarray(dequantize(block[""], kind)))
        if rounded:
            self._note(exact, exact.bfloat16().float())
        return pack_dense(exact, rounded=rounded)

    def _quantized(self, exact: np.ndarray) -> PackedMatrix:
        if exact.shape[1] % 32:
            raise ModelError(f"{exact.shape[1]} columns are no whole groups of 32; set model.quantize: none")
        if self.options.quantize == "int4":
            g = quantize_int4(exact)
            assert g.zero is not None
            packed = pack_int4(g.q, g.scale, g.zero, rounded=self.options.rounded)
        else:
            g = quantize_int8(exact)
            packed = pack_int8(g.q, g.scale, rounded=self.options.rounded)
        self._note(torch.from_numpy(exact), packed.expand(torch.float32))
        return packed

    # ---- the error figure

    def _note(self, exact: Tensor, mine: Tensor) -> None:
        """Note the largest difference; `mine` is overwritten."""
        low, high = mine.sub_(exact).aminmax()
        self.max_abs_error = max(self.max_abs_error, -float(low), float(high))

    def _note_rounding(self, packed: PackedMatrix) -> None:
        """Note what rounding W̃ to bf16 changes; without it W̃ is the file's own number.

        Half a unit in the last place bounds it, so blocks whose scales are small are not looked at.
        """
        if not packed.rounded:
            return
        largest = _largest(packed)
        if largest == 0.0 or 2.0 ** (math.floor(math.log2(largest)) - 8) <= self.max_abs_error:
            return
        exact = replace(packed, rounded=False).expand(torch.float32)
        self._note(exact, exact.bfloat16().float())


def _largest(packed: PackedMatrix) -> float:
    """A bound of |W̃| from the scales of a published kind; 0 where bf16 holds every weight exactly."""
    kind, scale, zero = packed.kind, packed.scale, packed.zero
    assert scale is not None
    number = _LARGEST_NUMBER[kind.element]
    if kind.scales == E8M0:
        return 0.0
    if kind.scales == Q4_K:
        return 63.0 * (number * _size(_halves(scale, 0)) + _size(_halves(scale, 2 * PANEL)))
    if kind.scales == Q6_K:
        return number * 128.0 * _size(_halves(scale, 16 * PANEL))
    if kind.scales == E4M3_GLOBAL:
        assert zero is not None
        return number * 448.0 * _size(zero)
    least = _size(zero) if kind.scales == F16_ZERO and zero is not None else 0.0
    return number * _size(scale) + least


def _size(numbers: Tensor) -> float:
    return float(numbers.float().abs().max())


def _halves(fields: Tensor, at: int) -> Tensor:
    """Half precision [.., 48] at byte `at` of the last dimension."""
    return fields[..., at : at + 2 * PANEL].contiguous().view(torch.float16)


# ---------------------------------------------------------------- blocks of rows in a larger matrix


def _of_rows(block: PackedMatrix, rows: int) -> PackedMatrix:
    """A matrix of more rows of the block's kind as shapes and dtypes alone: its elements are all one number."""
    parts: dict[str, Tensor] = {}
    for name, part in block.parts().items():
        unit = _rows_of_entry(block, name)
        parts[name] = part[:1].expand(-(-rows // unit) if unit else 1, *part.shape[1:])
    return replace(block, rows=rows, **parts)


def _rows_of_entry(like: PackedMatrix, name: str) -> int:
    """Rows that one entry of a part is about; 0: all of them."""
    if name in like.kind.panelled:
        return PANEL
    return BLOCK_SIDE if like.kind.scales == F32_BLOCK else 0


def _put_rows(whole: PackedMatrix, start: int, block: PackedMatrix) -> None:
    """Copy a block in; `start` is a multiple of `ROWS_AT_ONCE`."""
    if whole.kind != block.kind or whole.columns != block.columns:
        raise ValueError(f"rows of {block.kind.name} do not fit a matrix of {whole.kind.name}")
    mine = whole.parts()
    for name, part in block.parts().items():
        unit = _rows_of_entry(whole, name)
        first = start // unit if unit else 0
        mine[name][first : first + len(part)].copy_(part)
