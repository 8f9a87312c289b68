"""Formats whose elements lie in several tensors of a checkpoint: which tensors, of which dtype and shape.

`shape` is always the logical one, (…, out, in): leading dimensions are stacked matrices, groups run along `in`. Names
begin where the weight's own name ends: ``mlp.up_proj.weight`` in `int4_packed` is ``mlp.up_proj`` + ``.weight_packed``.

    format        codes                                scales                                      source
    ───────────   ──────────────────────────────────   ─────────────────────────────────────────   ────────────────────
    int4_packed   .weight_packed I32 [out, in/8]       .weight_scale BF16 [out, in/group]          compressed-tensors
    fp8_block     .weight F8_E4M3 [out, in]            .weight_scale_inv F32 [⌈out/b⌉, ⌈in/b⌉]     DeepSeek-V3
    mxfp4         _blocks U8 [out, in/32, 16]          _scales U8 (E8M0) [out, in/32]              gpt-oss
    nvfp4         .weight U8 [out, in/2]               .weight_scale F8_E4M3 [out, in/16],         TensorRT ModelOpt
                                                       .weight_scale_2 F32 []
    gptq          .qweight I32 [in/8, out]             .scales F16 [⌈in/group⌉, out],              AutoGPTQ
                                                       .qzeros I32 [⌈in/group⌉, out/8], .g_idx
    awq           .qweight I32 [in, out/8]             .scales, .qzeros as gptq                    AutoAWQ

Bit order and value ranges belong to `tithe.quant`. No numpy, no torch.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Final, NamedTuple

DTYPE_BYTES: Final[dict[str, int]] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of one element by safetensors' dtype name."""


class PartRole(enum.Enum):
    """What a part is to the weight."""

    CODES = "codes"
    """The elements themselves."""
    SCALE = "scale"
    """Scales, zero points and group indices: held beside the codes."""
    NOTE = "note"
    """Read and left behind: a shape that the config gives too, a scale of activations."""


class Part(NamedTuple):
    """One tensor of a weight that lies in several.

    >>> int4_packed((2048, 7168))[0]
    Part(suffix='.weight_packed', dtype='I32', shape=(2048, 896), role=<PartRole.CODES: 'codes'>)
    """

    suffix: str
    dtype: str
    shape: tuple[int, ...]
    role: PartRole

    @property
    def n_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def is_held(self) -> bool:
        """True when a base in memory keeps it."""
        return self.role is not PartRole.NOTE


def int4_packed(shape: Sequence[int], group: int = 32) -> tuple[Part, ...]:
    """compressed-tensors ``pack-quantized``: symmetric 4-bit integers, one bf16 scale per `group` along `in`."""
    *lead, width = shape
    groups, words = _exact(width, group, "int4"), _exact(width, 8, "int4")
    return (
        Part(".weight_packed", "I32", (*lead, words), PartRole.CODES),
        Part(".weight_scale", "BF16", (*lead, groups), PartRole.SCALE),
        Part(".weight_shape", "I64", (2,), PartRole.NOTE),
    )


def fp8_block(shape: Sequence[int], block: int = 128) -> tuple[Part, ...]:
    """8-bit floats with one float32 scale per `block` × `block`; blocks at the edges may be smaller."""
    lead, out, width = _matrix(shape, "fp8")
    scales = (*lead, -(-out // block), -(-width // block))
    return (
        Part(".weight", "F8_E4M3", tuple(shape), PartRole.CODES),
        Part(".weight_scale_inv", "F32", scales, PartRole.SCALE),
    )


def mxfp4(shape: Sequence[int], group: int = 32) -> tuple[Part, ...]:
    """4-bit floats (E2M1) with one power of two (E8M0) per `group`, which the standard fixes at 32."""
    *lead, width = shape
    groups = _exact(width, group, "mxfp4")
    return (
        Part("_blocks", "U8", (*lead, groups, group // 2), PartRole.CODES),
        Part("_scales", "U8", (*lead, groups), PartRole.SCALE),
    )


def nvfp4(shape: Sequence[int], group: int = 16) -> tuple[Part, ...]:
    """4-bit floats (E2M1), one E4M3 scale per `group`, one float32 scale per matrix."""
    *lead, width = shape
    groups = _exact(width, group, "nvfp4")
    matrices = tuple(shape[:-2])
    return (
        Part(".weight", "U8", (*lead, width // 2), PartRole.CODES),
        Part(".weight_scale", "F8_E4M3", (*lead, groups), PartRole.SCALE),
        Part(".weight_scale_2", "F32", matrices, PartRole.SCALE),
        Part(".input_scale", "F32", matrices, PartRole.NOTE),
    )


def gptq(shape: Sequence[int], group: int = 128) -> tuple[Part, ...]:
    """4-bit integers packed along `in`, scale and packed zero point per `group` and output, group index per input."""
    lead, out, width = _matrix(shape, "gptq")
    groups = -(-width // group)
    return (
        Part(".qweight", "I32", (*lead, _exact(width, 8, "gptq"), out), PartRole.CODES),
        Part(".scales", "F16", (*lead, groups, out), PartRole.SCALE),
        Part(".qzeros", "I32", (*lead, groups, _exact(out, 8, "gptq")), PartRole.SCALE),
        Part(".g_idx", "I32", (*lead, width), PartRole.SCALE),
    )


def awq(shape: Sequence[int], group: int = 128) -> tuple[Part, ...]:
    """4-bit integers packed along `out`, scale and packed zero point per `group` and output."""
    lead, out, width = _matrix(shape, "awq")
    groups, words = _exact(width, group, "awq"), _exact(out, 8, "awq")
    return (
        Part(".qweight", "I32", (*lead, width, words), PartRole.CODES),
        Part(".scales", "F16", (*lead, groups, out), PartRole.SCALE),
        Part(".qzeros", "I32", (*lead, groups, words), PartRole.SCALE),
    )


def _matrix(shape: Sequence[int], name: str) -> tuple[tuple[int, ...], int, int]:
    if len(shape) < 2:
        raise ValueError(f"{name} stores matrices; a tensor of shape {tuple(shape)} is none")
    return tuple(shape[:-2]), shape[-2], shape[-1]


def _exact(size: int, unit: int, name: str) -> int:
    number, rest = divmod(size, unit)
    if rest:
        raise ValueError(f"{size} elements are not a whole number of {name} groups of {unit}")
    return number
