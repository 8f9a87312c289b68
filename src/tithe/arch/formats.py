"""Storage formats of a base tensor and the bytes they take: the one byte accounting of the house.

Planner and loader both call `TensorFormat.n_bytes`. This module imports neither numpy nor torch.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tithe.arch.layouts import Part, PartRole, awq, fp8_block, gptq, int4_packed, mxfp4, nvfp4


class TensorFormat(enum.StrEnum):
    """How the elements of one tensor lie in its file, innermost dimension first.

    A quantized format stores each row as consecutive blocks; a block is never split between rows, so rows can be
    sliced and permuted as bytes. Bit order, scale dtype and value range are in `tithe.quant.formats` (`is_quantized`)
    and `tithe.quant.kquants` (the 5-bit and K formats); `tithe.quant.kinds` says which stay packed in memory.

    The elements of a compound format (`is_compound`: INT4_PACKED to AWQ) lie in several tensors of a safetensors
    checkpoint, which `StoredFormat.parts` lists; sizes here are those of the usual group.

    >>> TensorFormat.Q4_1.block_size, TensorFormat.Q4_1.block_bytes, TensorFormat.Q4_1.n_bytes((1536, 576))
    (32, 20, 552960)
    """

    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"
    Q8_0 = "Q8_0"
    Q5_0 = "Q5_0"
    Q5_1 = "Q5_1"
    Q2_K = "Q2_K"
    Q3_K = "Q3_K"
    Q4_K = "Q4_K"
    Q5_K = "Q5_K"
    Q6_K = "Q6_K"
    F16 = "F16"
    BF16 = "BF16"
    F32 = "F32"
    INT4_PACKED = "INT4_PACKED"
    FP8_BLOCK = "FP8_BLOCK"
    MXFP4 = "MXFP4"
    NVFP4 = "NVFP4"
    GPTQ = "GPTQ"
    AWQ = "AWQ"

    @property
    def block_size(self) -> int:
        """Elements in one block; 1 for the floating-point formats.

        FP8_BLOCK's block is 128 rows high, those of GPTQ and AWQ are 8; all others lie in one row.
        """
        return _LAYOUT[self][0]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return _LAYOUT[self][1]

    @property
    def is_quantized(self) -> bool:
        """True for integers with one half-precision scale per block: Q4_0, Q4_1 and Q8_0."""
        return self in _PLAIN_BLOCKS

    @property
    def is_compound(self) -> bool:
        """True when codes and scales are tensors of their own, so that no single run of bytes is the weight."""
        return self in _COMPOUND

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of one element, its share of the scales included."""
        return self.block_bytes / self.block_size

    def row_bytes(self, width: int) -> int:
        """Bytes of one row of `width` elements; `ValueError` when blocks do not fill the row.

        Also for a compound format whose blocks lie in one row: codes and scales together.
        """
        if self in _SPANS_ROWS:
            raise ValueError(f"{self} shares scales or words between rows; a row alone has no size")
        blocks, rest = divmod(width, self.block_size)
        if rest:
            raise ValueError(f"a row of {width} elements is not a whole number of {self} blocks of {self.block_size}")
        return blocks * self.block_bytes

    def n_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of a tensor of this shape (innermost dimension last); `ValueError` as in `row_bytes`."""
        if self.is_compound:
            return StoredFormat(self).n_bytes(shape)
        if not shape:
            return self.row_bytes(1)
        rows = 1
        for size in shape[:-1]:
            rows *= size
        return rows * self.row_bytes(shape[-1])


_LAYOUT: Final[dict[TensorFormat, tuple[int, int]]] = {
    TensorFormat.Q4_0: (32, 2 + 16),
    TensorFormat.Q4_1: (32, 2 + 2 + 16),
    TensorFormat.Q8_0: (32, 2 + 32),
    TensorFormat.Q5_0: (32, 2 + 4 + 16),
    TensorFormat.Q5_1: (32, 2 + 2 + 4 + 16),
    TensorFormat.Q2_K: (256, 16 + 64 + 2 + 2),
    TensorFormat.Q3_K: (256, 32 + 64 + 12 + 2),
    TensorFormat.Q4_K: (256, 2 + 2 + 12 + 128),
    TensorFormat.Q5_K: (256, 2 + 2 + 12 + 32 + 128),
    TensorFormat.Q6_K: (256, 128 + 64 + 16 + 2),
    TensorFormat.F16: (1, 2),
    TensorFormat.BF16: (1, 2),
    TensorFormat.F32: (1, 4),
    TensorFormat.INT4_PACKED: (32, 16 + 2),
    TensorFormat.FP8_BLOCK: (128 * 128, 128 * 128 + 4),
    TensorFormat.MXFP4: (32, 16 + 1),
    TensorFormat.NVFP4: (16, 8 + 1),
    TensorFormat.GPTQ: (8 * 128, 8 * (64 + 2) + 4),
    TensorFormat.AWQ: (8 * 128, 8 * (64 + 2) + 4),
}

_PLAIN_BLOCKS: Final = frozenset({TensorFormat.Q4_0, TensorFormat.Q4_1, TensorFormat.Q8_0})

_COMPOUND: Final[dict[TensorFormat, Callable[..., tuple[Part, ...]]]] = {
    TensorFormat.INT4_PACKED: int4_packed,
    TensorFormat.FP8_BLOCK: fp8_block,
    TensorFormat.MXFP4: mxfp4,
    TensorFormat.NVFP4: nvfp4,
    TensorFormat.GPTQ: gptq,
    TensorFormat.AWQ: awq,
}

_SPANS_ROWS: Final = frozenset({TensorFormat.FP8_BLOCK, TensorFormat.GPTQ, TensorFormat.AWQ})


@dataclass(frozen=True)
class StoredFormat:
    """A format with what a checkpoint may choose about it.

    Example: Kimi-K2-Thinking's experts are ``StoredFormat(TensorFormat.INT4_PACKED)``, a GPTQ model with groups of 64
    has ``StoredFormat(TensorFormat.GPTQ, group=64)``, and ``StoredFormat(TensorFormat.BF16)`` is plain.

    >>> StoredFormat(TensorFormat.INT4_PACKED).n_bytes((2048, 7168)) / (2048 * 7168)
    0.5625
    """

    kind: TensorFormat
    group: int | None = None
    """Weights along the input that share a scale (FP8_BLOCK: side of the square); `None`: the format's usual number."""
    act_order: bool = False
    """GPTQ only: inputs were sorted by importance, so that every input's group number (`g_idx`) has to be kept."""
    gptq_v2: bool = False
    """GPTQ only: zero points are stored as they are, not less one."""

    def parts(self, shape: Sequence[int]) -> tuple[Part, ...]:
        """The tensors that hold a weight of this logical shape; empty when the format is not compound.

        `ValueError` when groups or words do not fill a dimension that they must fill.
        """
        layout = _COMPOUND.get(self.kind)
        if layout is None:
            return ()
        parts = layout(shape) if self.group is None else layout(shape, self.group)
        if self.kind is TensorFormat.GPTQ and not self.act_order:
            return tuple(p._replace(role=PartRole.NOTE) if p.suffix == ".g_idx" else p for p in parts)
        return parts

    def n_bytes(self, shape: Sequence[int]) -> int:
        """Bytes that a base keeps of a weight of this logical shape. `ValueError` as in `parts`."""
        if not self.kind.is_compound:
            return self.kind.n_bytes(shape)
        return sum(part.n_bytes for part in self.parts(shape) if part.is_held)

    def scale_bytes(self, shape: Sequence[int]) -> int:
        """The part of `n_bytes` that is scales and zero points in tensors of their own."""
        return sum(part.n_bytes for part in self.parts(shape) if part.role is PartRole.SCALE)


SUPPORTED_FORMATS: Final = ", ".join(kind for kind in TensorFormat if not kind.is_compound)

GGML_FORMATS: Final[dict[int, TensorFormat]] = {
    0: TensorFormat.F32,
    1: TensorFormat.F16,
    2: TensorFormat.Q4_0,
    3: TensorFormat.Q4_1,
    6: TensorFormat.Q5_0,
    7: TensorFormat.Q5_1,
    8: TensorFormat.Q8_0,
    10: TensorFormat.Q2_K,
    11: TensorFormat.Q3_K,
    12: TensorFormat.Q4_K,
    13: TensorFormat.Q5_K,
    14: TensorFormat.Q6_K,
    30: TensorFormat.BF16,
}
"""GGUF's tensor type numbers that Tithe reads."""

SAFETENSORS_FORMATS: Final[dict[str, TensorFormat]] = {
    "F16": TensorFormat.F16,
    "BF16": TensorFormat.BF16,
    "F32": TensorFormat.F32,
}
"""Safetensors' dtype names that Tithe reads."""

_OTHER_GGML_NAMES: Final[dict[int, str]] = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip


def ggml_type_name(number: int) -> str:
    """Name of a GGUF tensor type, also of those Tithe does not read, for messages."""
    known = GGML_FORMATS.get(number)
    return str(known) if known else _OTHER_GGML_NAMES.get(number, f"number {number}")


def grouped_bytes(n_weights: int, *, bits: int, group: int, scale_bytes: int, zero_bytes: int = 0) -> int:
    """Bytes of `n_weights` integers of `bits` bits with one scale (and zero point) per `group` weights, rounded up.

    >>> grouped_bytes(64, bits=4, group=64, scale_bytes=2) / 64
    0.53125
    """
    groups = -(-n_weights // group)
    return -(-n_weights * bits // 8) + groups * (scale_bytes + zero_bytes)
