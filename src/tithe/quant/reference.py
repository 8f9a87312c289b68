"""The slow, plain truth about every format: unpack, dequantize, quantize, round to bf16. numpy only.

Fast kernels are tested against these functions, and these against the `gguf` package and torch. Matrices are rows of
bytes as `TensorEntry.read` gives them: uint8 [N, bytes per row]. The layouts are in `tithe.quant.formats`.
"""

from __future__ import annotations

import numpy as np

from tithe.arch import TensorFormat
from tithe.errors import ModelError
from tithe.quant import kquants
from tithe.quant.formats import GROUP_SIZE, GroupedIntegers

_MAX_HALF = float(np.finfo(np.float16).max)


def unpack(raw: np.ndarray, tensor_format: TensorFormat) -> GroupedIntegers:
    """The integers of a quantized matrix: uint8 [N, bytes per row] → q [N, K] with float16 scale and zero [N, K/32].

    Exact; only Q4_1 has zeros. `ValueError` for a format that is not `is_quantized` or rows of broken blocks;
    `ModelError` when a scale is not finite: such a file is damaged.
    """
    if not tensor_format.is_quantized:
        raise ValueError(f"{tensor_format} does not hold integers with one half-precision scale per block")
    blocks = _blocks(raw, tensor_format)
    scale = _half(blocks, 0)
    if tensor_format is TensorFormat.Q8_0:
        q, zero = blocks[:, :, 2:].view(np.int8), None
    elif tensor_format is TensorFormat.Q4_0:
        q, zero = _nibbles(blocks[:, :, 2:]).astype(np.int8) - np.int8(8), None
    else:
        q, zero = _nibbles(blocks[:, :, 4:]), _half(blocks, 2)
    if not (np.isfinite(scale).all() and (zero is None or np.isfinite(zero).all())):
        raise ModelError(
            f"a {tensor_format} tensor has a scale that is not a finite half-precision number: damaged file"
        )
    return GroupedIntegers(np.ascontiguousarray(q).reshape(len(raw), -1), scale, zero)


def dequantize(raw: np.ndarray, tensor_format: TensorFormat) -> np.ndarray:
    """float32 [N, K]: the exact values of uint8 [N, bytes per row] in any format (F32: a view). Errors as `unpack`."""
    match tensor_format:
        case TensorFormat.F32:
            return _contiguous(raw).view("<f4").astype(np.float32, copy=False)
        case TensorFormat.F16:
            return _contiguous(raw).view("<f2").astype(np.float32)
        case TensorFormat.BF16:
            return from_bf16_bits(_contiguous(raw).view("<u2"))
        case _ if tensor_format.is_quantized:
            return unpack(raw, tensor_format).values()
        case _:
            blocks = _blocks(raw, tensor_format)
            values = kquants.expand(blocks.reshape(-1, tensor_format.block_bytes), tensor_format)
            if not np.isfinite(values).all():
                raise ModelError(f"a {tensor_format} tensor has a scale that is not finite: damaged file")
            return values.reshape(len(raw), -1)


def quantize_int4(w: np.ndarray, group: int = GROUP_SIZE) -> GroupedIntegers:
    """Asymmetric 4-bit: float [N, K] → q uint8 in 0..15 with float16 scale and zero per `group` along K (as Q4_1).

    scale = half((max - min) / 15), zero = half(min), q = the nearest integer (ties to even) to (w - zero) / scale,
    clipped to 0..15, with the scale and zero *as rounded to half*, so that no error of theirs is added twice.
    |w - w̃| ≤ scale / 2 + 2⁻¹¹ · (16 · scale + |zero|) in the normal range of half precision. A group whose scale
    vanishes in half precision (all values equal, or closer than 9e-7 in all) becomes its rounded minimum with q = 0.

    Raises `ModelError` for NaN, infinities and magnitudes beyond 65504, `ValueError` when `group` does not divide K.
    """
    w_NGK = _grouped(w, group)
    low, high = w_NGK.min(axis=2), w_NGK.max(axis=2)
    scale, zero = ((high - low) / 15).astype(np.float16), low.astype(np.float16)
    shifted = w_NGK - zero.astype(np.float32)[..., None]
    q = np.clip(np.rint(_divide(shifted, scale)), 0, 15).astype(np.uint8)
    return GroupedIntegers(q.reshape(w.shape), scale, zero)


def quantize_int8(w: np.ndarray, group: int = GROUP_SIZE) -> GroupedIntegers:
    """Symmetric 8-bit: float [N, K] → q int8 in -127..127 with float16 scale per `group` along K (as Q8_0).

    scale = half(max |w| / 127), q = the nearest integer (ties to even) to w / scale, with the scale as rounded.
    |w - w̃| ≤ scale / 2 + 2⁻¹¹ · 127 · scale in the normal range of half precision. A group whose scale vanishes in
    half precision (max |w| below 3.8e-6) becomes zero. Errors as in `quantize_int4`.
    """
    w_NGK = _grouped(w, group)
    scale = (np.abs(w_NGK).max(axis=2) / 127).astype(np.float16)
    q = np.clip(np.rint(_divide(w_NGK, scale)), -127, 127).astype(np.int8)
    return GroupedIntegers(q.reshape(w.shape), scale, None)


def to_bf16_bits(x: np.ndarray) -> np.ndarray:
    """uint16 bits of float32 rounded to bf16, nearest with ties to even; overflow gives infinity, NaN stays NaN."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(x), quiet_nan, rounded).astype(np.uint16)


def from_bf16_bits(bits: np.ndarray) -> np.ndarray:
    """float32 values of bf16 bits (uint16); exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def round_to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 values rounded to what bf16 can hold, as `to_bf16_bits`."""
    return from_bf16_bits(to_bf16_bits(x))


def _contiguous(raw: np.ndarray) -> np.ndarray:
    """uint8 rows whose bytes can be viewed as wider numbers."""
    if raw.dtype != np.uint8:
        raise ValueError(f"raw bytes should be uint8, not {raw.dtype}")
    return np.ascontiguousarray(raw)


def _blocks(raw: np.ndarray, tensor_format: TensorFormat) -> np.ndarray:
    """uint8 [N, bytes per row] → uint8 [N, blocks, bytes per block]."""
    if raw.ndim != 2 or raw.shape[1] % tensor_format.block_bytes:
        raise ValueError(f"rows of shape {raw.shape} are not whole {tensor_format} blocks")
    return _contiguous(raw).reshape(len(raw), -1, tensor_format.block_bytes)


def _half(blocks: np.ndarray, offset: int) -> np.ndarray:
    """float16 [N, blocks]: the half-precision number at `offset` of every block."""
    return np.ascontiguousarray(blocks[:, :, offset : offset + 2]).view("<f2")[..., 0].astype(np.float16)


def _nibbles(data: np.ndarray) -> np.ndarray:
    """uint8 [N, blocks, 16] → uint8 [N, blocks, 32]: low nibbles first, then high."""
    return np.concatenate([data & np.uint8(0x0F), data >> np.uint8(4)], axis=2)


def _grouped(w: np.ndarray, group: int) -> np.ndarray:
    """float32 [N, groups, group] of a finite matrix [N, K] that half-precision scales can express."""
    if w.ndim != 2 or group < 1 or w.shape[1] % group or not w.size:
        raise ValueError(f"a matrix of shape {w.shape} has no whole groups of {group} along its rows")
    w_NGK = np.asarray(w, dtype=np.float32).reshape(len(w), -1, group)
    if not np.isfinite(w_NGK).all():
        raise ModelError("a weight to be quantized is NaN or infinite: the checkpoint is damaged")
    if np.abs(w_NGK).max() > _MAX_HALF:
        raise ModelError(f"a weight to be quantized is beyond {_MAX_HALF:g}, the limit of half-precision scales")
    return w_NGK


def _divide(values_NGK: np.ndarray, scale_NG: np.ndarray) -> np.ndarray:
    """The quotient by each group's scale, and 0 where the scale is 0."""
    divisor = scale_NG.astype(np.float32)[..., None]
    return np.divide(values_NGK, divisor, out=np.zeros_like(values_NGK), where=divisor != 0)
