"""Random weights of every published format, as a checkpoint would hold them: any codes under any scales.

Scales are moderate, or `extreme`: zero, subnormal, from the least to the largest that a reader takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tithe.arch import StoredFormat, TensorFormat
from tithe.quant import PackedMatrix
from tithe.quant.reference import dequantize
from tithe.quant.reference_parts import dequantize_parts
from tithe.quant.repack import repack, repack_parts

BF16_MAX = float(np.uint32(0x7F7F0000).view(np.float32))
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q6_K": [208]}
"""Where a block of a GGUF format keeps its half-precision numbers."""
FORMATS = {
    **{name: StoredFormat(TensorFormat(name)) for name in HALVES},
    "INT4_PACKED": StoredFormat(TensorFormat.INT4_PACKED),
    "INT4_PACKED-128": StoredFormat(TensorFormat.INT4_PACKED, group=128),
    "FP8_BLOCK": StoredFormat(TensorFormat.FP8_BLOCK),
    "MXFP4": StoredFormat(TensorFormat.MXFP4),
    "NVFP4": StoredFormat(TensorFormat.NVFP4),
    **{f"GPTQ-{group}": StoredFormat(TensorFormat.GPTQ, group=group) for group in (32, 64, 128)},
    "AWQ-128": StoredFormat(TensorFormat.AWQ, group=128),
}


@dataclass(frozen=True)
class Published:
    """One weight [N, K] as published."""

    stored: StoredFormat
    parts: Mapping[str, np.ndarray]
    """By the ends of names; GGUF's one tensor under the empty name."""
    shape: tuple[int, int]

    def pack(self, *, rounded: bool) -> PackedMatrix:
        if "" in self.parts:
            return repack(self.parts[""], self.stored.kind, rounded=rounded)
        return repack_parts(self.parts, self.stored, rounded=rounded)

    def values(self) -> np.ndarray:
        """float32 [N, K] by the reference."""
        if "" in self.parts:
            return dequantize(self.parts[""], self.stored.kind)
        return dequantize_parts(self.parts, self.stored)

    @property
    def n_bytes(self) -> int:
        return self.stored.n_bytes(self.shape)


def publish(name: str, rows: int, columns: int, seed: int = 0, *, extreme: bool = False) -> Published:
    stored, rng = FORMATS[name], np.random.default_rng([seed, rows, columns])
    if stored.kind.is_compound:
        parts = _COMPOUND[stored.kind](rng, rows, columns, stored.group, extreme)
    else:
        parts = {"": _gguf(rng, stored.kind, rows, columns, extreme)}
    return Published(stored, parts, (rows, columns))


def _halves(rng: np.random.Generator, shape: tuple[int, ...], extreme: bool) -> np.ndarray:
    if not extreme:
        return (rng.normal(0, 1, shape) * 0.01).astype(np.float16)
    halves = rng.integers(0, 2**16, shape).astype(np.uint16).view(np.float16)  # zeros and subnormals, too
    return np.where(np.isfinite(halves), halves, np.float16(0))


def _f32(rng: np.random.Generator, shape: tuple[int, ...], extreme: bool, largest: float) -> np.ndarray:
    """Scales; the largest makes a weight of `largest` times itself that bf16 just holds."""
    if not extreme:
        return rng.uniform(0.001, 0.02, shape).astype(np.float32)
    scale = 2.0 ** rng.uniform(-149, np.log2(BF16_MAX / largest), shape) * rng.choice(
        [1, -1, 0], shape, p=[0.6, 0.3, 0.1]
    )
    return scale.astype(np.float32)


def _gguf(rng: np.random.Generator, kind: TensorFormat, rows: int, columns: int, extreme: bool) -> np.ndarray:
    raw = rng.integers(0, 256, (rows, columns // kind.block_size, kind.block_bytes), dtype=np.uint8)
    for offset in HALVES[kind]:
        raw[:, :, offset : offset + 2] = _halves(rng, raw.shape[:2], extreme)[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


def _words(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.int32)


def _int4_packed(rng, rows, columns, group, extreme):
    scale = _f32(rng, (rows, columns // (group or 32)), extreme, 8.0)
    bits = (scale.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return {
        ".weight_packed": _words(rng, rows, columns // 8),
        ".weight_scale": bits,
        ".weight_shape": np.array([rows, columns], np.int32),
    }


def _fp8_block(rng, rows, columns, group, extreme):
    codes = rng.integers(0, 256, (rows, columns), dtype=np.uint8)
    codes[codes & 127 == 127] -= 1
    scale = _f32(rng, (-(-rows // 128), -(-columns // 128)), extreme, 448.0)
    return {".weight": codes, ".weight_scale_inv": scale}


def _mxfp4(rng, rows, columns, group, extreme):
    low, high = (0, 253) if extreme else (115, 125)
    return {
        "_blocks": rng.integers(0, 256, (rows, columns // 32, 16), dtype=np.uint8),
        "_scales": rng.integers(low, high, (rows, columns // 32), dtype=np.uint8),
    }


def _nvfp4(rng, rows, columns, group, extreme):
    scale = rng.integers(0, 256, (rows, columns // 16), dtype=np.uint8)
    scale[scale & 127 == 127] = 0
    return {
        ".weight": rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8),
        ".weight_scale": scale,
        ".weight_scale_2": np.abs(_f32(rng, (), extreme, 448.0 * 6.0)),
        ".input_scale": np.float32(1.0).reshape(()),
    }


def _gptq(rng, rows, columns, group, extreme):
    zeros = rng.integers(0, 15, (columns // group, rows // 8, 8), dtype=np.uint32)  # 15 is ambiguous
    words = np.bitwise_or.reduce(zeros << (np.arange(8, dtype=np.uint32) * 4), axis=2)
    return {
        ".qweight": _words(rng, columns // 8, rows),
        ".qzeros": words.view(np.int32),
        ".scales": _halves(rng, (columns // group, rows), extreme),
        ".g_idx": np.arange(columns, dtype=np.int32) // group,
    }


def _awq(rng, rows, columns, group, extreme):
    return {
        ".qweight": _words(rng, columns, rows // 8),
        ".qzeros": _words(rng, columns // group, rows // 8),
        ".scales": _halves(rng, (columns // group, rows), extreme),
    }


_COMPOUND = {
    TensorFormat.INT4_PACKED: _int4_packed,
    TensorFormat.FP8_BLOCK: _fp8_block,
    TensorFormat.MXFP4: _mxfp4,
    TensorFormat.NVFP4: _nvfp4,
    TensorFormat.GPTQ: _gptq,
    TensorFormat.AWQ: _awq,
}
