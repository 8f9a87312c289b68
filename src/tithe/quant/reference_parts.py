"""The slow, plain truth about formats whose weights lie in several tensors: W̃ in float32 before bf16 rounding.

Fast kernels are tested against these functions, and these against transformers' readers. The bits are described in
`tithe.quant.parts`, whose checks come first. numpy only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from tithe.arch import StoredFormat, TensorFormat
from tithe.errors import ModelError
from tithe.quant.parts import AWQ_NIBBLES, Parts, check, holds_nan

E2M1: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The sixteen numbers, by code."""


def dequantize_parts(parts: Mapping[str, np.ndarray], stored: StoredFormat, *, gptq_v2: bool = False) -> np.ndarray:
    """float32 [N, K]: the values of one weight of a compound format. Arguments and errors as `repack_parts`."""
    p = check(parts, stored, gptq_v2=gptq_v2)
    match stored.kind:
        case TensorFormat.INT4_PACKED:
            scale = (p.scale.astype(np.uint32) << 16).view(np.float32)
            return _scaled(_nibbles(p.codes).astype(np.float32) - 8, scale)
        case TensorFormat.MXFP4:
            exponent = p.scale.astype(np.int32) - 127
            scale = np.where(p.scale == 0, np.float32(0), np.ldexp(np.float32(1), exponent))
            return _scaled(E2M1[_nibbles(p.codes)], scale)
        case TensorFormat.NVFP4:
            return _scaled(E2M1[_nibbles(p.codes)], e4m3(p.scale) * p.zero)
        case TensorFormat.FP8_BLOCK:
            if holds_nan(p.codes):
                raise ModelError("FP8 .weight: a weight is not a number: damaged file")
            scale = p.scale.repeat(128, axis=0)[: p.rows].repeat(128, axis=1)[:, : p.columns]
            return e4m3(p.codes) * scale
        case _:
            nibble = _gptq(p) if stored.kind is TensorFormat.GPTQ else _awq(p)
            assert p.zero is not None
            zero = p.zero.astype(np.float32).repeat(p.group, axis=1)
            return _scaled(nibble.astype(np.float32) - zero, p.scale.astype(np.float32))


def e4m3(codes: np.ndarray) -> np.ndarray:
    """float32 of E4M3 codes: sign, four bits of exponent (bias 7), three of mantissa; exponent 0 is subnormal."""
    codes = codes.astype(np.int32)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), np.ldexp(1 + mantissa / 8, exponent - 7))
    return np.where(codes >> 7, -size, size).astype(np.float32)


def _scaled(numbers: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """numbers [N, K] under scale [N, K/G], float32."""
    return numbers * scale.repeat(numbers.shape[1] // scale.shape[1], axis=1)


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """uint8 [N, K/2] → uint8 [N, K]: low nibble, high nibble."""
    return np.stack([codes & 15, codes >> 4], axis=2).reshape(len(codes), -1)


def _gptq(p: Parts) -> np.ndarray:
    words = p.codes.view(np.uint32)  # [K/8, N]
    return np.stack([words >> np.uint32(4 * i) & np.uint32(15) for i in range(8)], axis=1).reshape(p.columns, p.rows).T


def _awq(p: Parts) -> np.ndarray:
    words = p.codes.view(np.uint32)  # [K, N/8]
    nibbles = [words >> np.uint32(4 * i) & np.uint32(15) for i in AWQ_NIBBLES]
    return np.stack(nibbles, axis=2).reshape(p.columns, p.rows).T
