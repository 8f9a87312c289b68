"""Exact values of llama.cpp's 5-bit formats and K-quants.

Files named Q4_K_M and the like mix these, and nearly every low-bit file stores its head as Q6_K. Q4_K and Q6_K stay
packed (`tithe.quant.kinds`); a loader expands the others.

A K-quant's super-block holds 256 weights with half-precision scales d (and dmin) and small integer scales s (and m) per
sub-block; fields in order, bits from the lowest:

| format | fields (bytes) | weight |
|---|---|---|
| Q5_0 | d, high bits (4), nibbles (16); 32 weights | d · (q - 16) |
| Q5_1 | d, m, high bits (4), nibbles (16); 32 weights | d · q + m |
| Q2_K | s and m nibbles (16), 2-bit (64), d, dmin | d · s · q - dmin · m, 16 per sub-block |
| Q3_K | high bits (32), 2-bit (64), 6-bit scales (12), d | d · (s - 32) · (q - 4), 16 per sub-block |
| Q4_K | d, dmin, 6-bit s and m (12), nibbles (128) | d · s · q - dmin · m, 32 per sub-block |
| Q5_K | d, dmin, 6-bit s and m (12), high bits (32), nibbles (128) | as Q4_K |
| Q6_K | nibbles (128), 2 high bits (64), signed scales (16), d | d · s · (q - 32), 16 per sub-block |

Every product is exact in float32, so the values are those of any other reader, bit for bit.
Shape suffixes: _N blocks, _S sub-blocks, _J weights within.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from tithe.arch import TensorFormat

_TWO_BIT_SHIFTS: Final = np.arange(0, 8, 2, dtype=np.uint8)
_BITS: Final = np.arange(8, dtype=np.uint8)


def expand(blocks: np.ndarray, tensor_format: TensorFormat) -> np.ndarray:
    """uint8 [N, bytes per block] → float32 [N, weights per block]; `KeyError` for a format that is not in the table."""
    return _EXPAND[tensor_format](blocks).reshape(len(blocks), -1)


def _half(blocks: np.ndarray, offset: int) -> np.ndarray:
    """float32 [N, 1, 1]: the half-precision number at `offset`."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2").astype(np.float32)[:, :, None]


def _nibbles(data: np.ndarray, run: int) -> np.ndarray:
    """Uint8 [N, S, J] of bytes taken `run` at a time: first all low nibbles of a run, then all high ones."""
    runs = data.reshape(len(data), -1, 1, run)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(len(data), -1, run)


def _q5(blocks: np.ndarray, offset: int) -> np.ndarray:
    """5-bit integers, float32 [N, 1, 32]: high bits at `offset`, nibbles after them."""
    high = np.unpackbits(blocks[:, offset : offset + 4], axis=1, bitorder="little")
    low = _nibbles(blocks[:, offset + 4 :], 16).reshape(len(blocks), 32)
    return (low | high << 4).astype(np.float32)[:, None, :]


def _q5_0(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * (_q5(blocks, 2) - 16)


def _q5_1(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * _q5(blocks, 4) + _half(blocks, 2)


def _two_bit(data: np.ndarray) -> np.ndarray:
    """Uint8 [N, 8, 32] from 64 bytes: each half of 32 bytes gives four runs, lowest bits first."""
    return (data.reshape(len(data), 2, 1, 32) >> _TWO_BIT_SHIFTS[:, None] & 3).reshape(len(data), 8, 32)


def _q2_k(blocks: np.ndarray) -> np.ndarray:
    both_NS, q_NSJ = blocks[:, :16, None], _two_bit(blocks[:, 16:80]).reshape(-1, 16, 16)
    scale = _half(blocks, 80) * (both_NS & 15).astype(np.float32)
    return scale * q_NSJ - _half(blocks, 82) * (both_NS >> 4).astype(np.float32)


def _q3_k(blocks: np.ndarray) -> np.ndarray:
    high_NSJ = blocks[:, None, :32] >> _BITS[:, None] & 1
    q_NSJ = (_two_bit(blocks[:, 32:96]) | high_NSJ << 2).astype(np.float32).reshape(-1, 16, 16) - 4
    packed = blocks[:, 96:108]
    low_NS = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    high_NS = (packed[:, None, 8:] >> _TWO_BIT_SHIFTS[:, None] & 3).reshape(-1, 16)
    scales_NS = (low_NS | high_NS << 4).astype(np.float32) - 32
    return _half(blocks, 108) * scales_NS[:, :, None] * q_NSJ


def _six_bit_pairs(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(s, m), float32 [N, 8, 1] each, from 12 bytes: the last four of each keep their two high bits in the first."""
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    s_NS = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    m_NS = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    return s_NS.astype(np.float32)[:, :, None], m_NS.astype(np.float32)[:, :, None]


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    s, m = _six_bit_pairs(blocks[:, 4:16])
    return _half(blocks, 0) * s * _nibbles(blocks[:, 16:], 32) - _half(blocks, 2) * m


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    s, m = _six_bit_pairs(blocks[:, 4:16])
    high_NSJ = blocks[:, None, 16:48] >> _BITS[:, None] & 1
    return _half(blocks, 0) * s * (_nibbles(blocks[:, 48:], 32) | high_NSJ << 4) - _half(blocks, 2) * m


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    low = _nibbles(blocks[:, :128], 64).reshape(-1, 256)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> _TWO_BIT_SHIFTS[:, None] & 3).reshape(-1, 256)
    scales_NS = blocks[:, 192:208].view(np.int8).astype(np.float32)
    q_NSJ = (low | high << 4).astype(np.float32).reshape(-1, 16, 16) - 32
    return _half(blocks, 208) * scales_NS[:, :, None] * q_NSJ


_EXPAND: Final[dict[TensorFormat, Callable[[np.ndarray], np.ndarray]]] = {
    TensorFormat.Q5_0: _q5_0,
    TensorFormat.Q5_1: _q5_1,
    TensorFormat.Q2_K: _q2_k,
    TensorFormat.Q3_K: _q3_k,
    TensorFormat.Q4_K: _q4_k,
    TensorFormat.Q5_K: _q5_k,
    TensorFormat.Q6_K: _q6_k,
}
