"""The tensors of a weight that lies in several, as a checkpoint has them: viewed, checked, scales made safe.

Which tensors these are, by the ends of their names, is in `tithe.arch.layouts`; what their bits mean:

| format | codes | number |
|---|---|---|
| INT4_PACKED | int32: weight 8w + i is nibble i (from the lowest) of word w | nibble − 8 |
| FP8_BLOCK | a byte each | E4M3 (no infinities; 0x7F and 0xFF are NaN) |
| MXFP4, NVFP4 | byte b: weight 2b low, weight 2b + 1 high | E2M1: sign, 2 bits of exponent (bias 1), 1 of mantissa |
| GPTQ | int32 [K/8, N]: weight 8w + i of a column is nibble i of its word w | nibble − zero |
| AWQ | int32 [K, N/8]: outputs 8w + (0, 2, 4, 6, 1, 3, 5, 7) are the nibbles of word w, lowest first | nibble − zero |

Zeros are nibbles of int32 [K/G, N/8]: GPTQ's in order and one too low (version 1) or as they are (version 2), AWQ's
in its own order. Arrays may come as their dtype or as bytes (uint8); bf16 as uint16 or bytes.

Scales. W̃ must be zero or normal in float32 and finite in bf16 (`tithe.quant.kinds`), so a scale d is stored as zero
when the format's least number times |d| is below 2⁻¹²⁶, and `ModelError` when its largest times |d| is beyond
bf16, or d is not a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np

from tithe.arch import StoredFormat, TensorFormat
from tithe.errors import ModelError
from tithe.quant.codes import BLOCK_ROWS

_LEAST_NORMAL: Final = 2.0**-126
_LARGEST: Final = float(np.uint32(0x7F7F0000).view(np.float32))
AWQ_NIBBLES: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Nibble of an AWQ word that holds output n, by n % 8."""


class Parts(NamedTuple):
    """A weight [N, K] in pieces, ready to be packed."""

    codes: np.ndarray
    """uint8 [N, K/2] nibbles, or [N, K] bytes, by row; GPTQ and AWQ: int32 as they lie in the file."""
    scale: np.ndarray
    """[N, K/G]: uint16 (bf16 bits), uint8 (E8M0 or E4M3 codes) or float16; FP8_BLOCK: float32 [⌈N/128⌉, ⌈K/128⌉]."""
    zero: np.ndarray | None
    """GPTQ and AWQ: uint8 [N, K/G] in 0..15. NVFP4: float32 [1], the global scale."""
    rows: int
    columns: int

    @property
    def group(self) -> int:
        """Weights per scale along K."""
        return self.columns // self.scale.shape[1]


def check(parts: Mapping[str, np.ndarray], stored: StoredFormat, *, gptq_v2: bool = False) -> Parts:
    """Parts by the end of their names, e.g. ``.weight_packed``; the others (shapes, activation scales) are left alone.

    `ModelError` for parts that are missing, do not fit each other or hold no numbers; `ValueError` for a format
    whose weights lie in one tensor.
    """
    if stored.kind in (TensorFormat.GPTQ, TensorFormat.AWQ):
        return _with_zeros(parts, stored, gptq_v2=gptq_v2)
    if stored.kind not in _BY_ROW:
        raise ValueError(f"a {stored.kind} weight is one tensor")
    found = _BY_ROW[stored.kind](parts)
    if stored.group is not None and stored.group != found.group and stored.kind is not TensorFormat.FP8_BLOCK:
        raise ModelError(f"{stored.kind} scales are for groups of {found.group}, the config says {stored.group}")
    if stored.kind is TensorFormat.FP8_BLOCK and stored.group not in (None, BLOCK_ROWS):
        raise ModelError(f"FP8 blocks of {stored.group}: only weight_block_size [128, 128] is read")
    return found


def _int4_packed(parts: Mapping[str, np.ndarray]) -> Parts:
    codes = _bytes(_matrix(parts, ".weight_packed", np.int32))
    scale = _matrix(parts, ".weight_scale", np.uint16)
    values = (scale.astype(np.uint32) << 16).view(np.float32)
    scale = np.where(_vanishes(values, 1.0, 8.0, "INT4_PACKED .weight_scale"), np.uint16(0), scale)
    return _grouped("INT4_PACKED", codes, scale, 32)


def _mxfp4(parts: Mapping[str, np.ndarray]) -> Parts:
    codes, scale = _part(parts, "_blocks", np.uint8), _matrix(parts, "_scales", np.uint8)
    codes = codes.reshape(len(codes), -1)
    if (scale == 255).any():
        raise ModelError("MXFP4 _scales: code 255 is not a number: damaged file")
    if (scale > 252).any():
        raise ModelError("MXFP4 _scales: weights beyond what bf16 can hold: damaged file")
    return _grouped("MXFP4", codes, np.where(scale < 2, np.uint8(0), scale), 32)


def _nvfp4(parts: Mapping[str, np.ndarray]) -> Parts:
    codes, scale = _matrix(parts, ".weight", np.uint8), _matrix(parts, ".weight_scale", np.uint8)
    whole = _part(parts, ".weight_scale_2", np.float32).reshape(-1)
    if whole.size != 1:
        raise ModelError(f"NVFP4 .weight_scale_2: one number expected, not {whole.size}")
    if holds_nan(scale):
        raise ModelError("NVFP4 .weight_scale: a scale is not a number: damaged file")
    if _vanishes(whole, 2.0**-10, 448.0 * 6.0, "NVFP4 .weight_scale_2").any():
        whole = np.zeros_like(whole)
    return _grouped("NVFP4", codes, scale, 16)._replace(zero=whole)


def _fp8_block(parts: Mapping[str, np.ndarray]) -> Parts:
    codes, scale = _matrix(parts, ".weight", np.uint8), parts.get(".weight_scale_inv")
    if scale is not None and scale.dtype == np.uint16:  # some checkpoints round them to bf16
        scale = (scale.astype(np.uint32) << 16).view(np.float32)
    else:
        scale = _matrix(parts, ".weight_scale_inv", np.float32)
    rows, columns = codes.shape
    blocks = (-(-rows // BLOCK_ROWS), -(-columns // BLOCK_ROWS))
    if columns % 8:
        raise ModelError(f"FP8 .weight has {columns} columns, which is no multiple of 8")
    if scale.shape != blocks:
        raise ModelError(
            f"FP8 .weight_scale_inv has shape {scale.shape}, but {codes.shape} in blocks of 128 × 128 has {blocks}: "
            "only weight_block_size [128, 128] is read"
        )
    scale = np.where(_vanishes(scale, 2.0**-9, 448.0, "FP8 .weight_scale_inv"), np.float32(0), scale)
    return Parts(codes, scale, None, rows, columns)


def _with_zeros(parts: Mapping[str, np.ndarray], stored: StoredFormat, *, gptq_v2: bool) -> Parts:
    """GPTQ and AWQ: by column, with zero points."""
    kind = stored.kind
    codes, words = _matrix(parts, ".qweight", np.int32), _matrix(parts, ".qzeros", np.int32)
    scale = _matrix(parts, ".scales", np.float16)
    groups, rows = scale.shape
    gptq = kind is TensorFormat.GPTQ
    columns = codes.shape[0] * 8 if gptq else codes.shape[0]
    expected = (columns // 8, rows) if gptq else (columns, rows // 8)
    if codes.shape != expected or words.shape != (groups, rows // 8) or rows % 8:
        raise ModelError(f"{kind}: .qweight {codes.shape}, .qzeros {words.shape}, .scales {scale.shape} do not fit")
    if columns % groups or columns // groups % 32 or stored.group not in (None, columns // groups):
        raise ModelError(f"{kind}: {groups} scales for {columns} inputs are no groups of {stored.group or 'n · 32'}")
    if stored.act_order or (gptq and not _is_trivial(parts.get(".g_idx"), columns, groups)):
        raise ModelError("GPTQ with activation order (.g_idx is not ascending) is not read; quantize with desc_act off")
    if not np.isfinite(scale).all():
        raise ModelError(f"{kind} .scales: a scale is not a finite half-precision number: damaged file")
    places = range(8) if gptq else AWQ_NIBBLES
    nibbles = [words.view(np.uint32) >> np.uint32(4 * place) & np.uint32(15) for place in places]
    zero = np.stack(nibbles, axis=-1).astype(np.uint8).reshape(groups, rows)
    if gptq and not gptq_v2:
        if (zero == 15).any():
            raise ModelError("GPTQ .qzeros: 15 means zero point 16 to some readers and 0 to others; convert to gptq_v2")
        zero = zero + np.uint8(1)
    return Parts(codes, np.ascontiguousarray(scale.T), np.ascontiguousarray(zero.T), rows, columns)


_BY_ROW: Final = {
    TensorFormat.INT4_PACKED: _int4_packed,
    TensorFormat.FP8_BLOCK: _fp8_block,
    TensorFormat.MXFP4: _mxfp4,
    TensorFormat.NVFP4: _nvfp4,
}


def holds_nan(codes: np.ndarray) -> bool:
    """Whether E4M3 codes contain a NaN."""
    return bool(((codes & 0x7F) == 0x7F).any())


def _vanishes(scale: np.ndarray, least: float, largest: float, what: str) -> np.ndarray:
    """Which scales become zero. `ModelError` when one is no number or makes weights too large."""
    size = np.abs(scale.astype(np.float64))
    if not np.isfinite(size).all():
        raise ModelError(f"{what}: a scale is not a finite number: damaged file")
    if size.size and size.max() * largest > _LARGEST:
        raise ModelError(f"{what}: weights beyond what bf16 can hold: damaged file")
    return size * least < _LEAST_NORMAL


def _is_trivial(g_idx: np.ndarray | None, columns: int, groups: int) -> bool:
    if g_idx is None:
        return True
    index = np.ascontiguousarray(g_idx).view(np.int32).reshape(-1)
    return np.array_equal(index, np.arange(columns, dtype=np.int32) // (columns // groups))


def _part(parts: Mapping[str, np.ndarray], end: str, dtype: type[np.generic]) -> np.ndarray:
    if end not in parts:
        raise ModelError(f"the checkpoint has no tensor …{end} beside {', '.join('…' + p for p in parts)}")
    array = parts[end]
    if array.dtype not in (np.dtype(dtype), np.dtype(np.uint8)):
        raise ValueError(f"…{end} should be {np.dtype(dtype)} or bytes, not {array.dtype}")
    return array if array.dtype == dtype else np.ascontiguousarray(array).view(dtype)


def _matrix(parts: Mapping[str, np.ndarray], end: str, dtype: type[np.generic]) -> np.ndarray:
    array = _part(parts, end, dtype)
    if array.ndim != 2:
        raise ValueError(f"…{end} of one weight is a matrix, not of shape {array.shape}")
    return array


def _bytes(words: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(words).view(np.uint8)


def _grouped(name: str, codes: np.ndarray, scale: np.ndarray, group: int) -> Parts:
    """Two weights a byte; the group is `group` or, where a format leaves it open, a multiple."""
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    groups = scale.shape[1]
    size, rest = divmod(columns, max(groups, 1))
    allowed = size % group == 0 if name == "INT4_PACKED" else size == group
    if scale.shape[0] != rows or rest or not groups or not allowed:
        raise ModelError(f"{name}: scales {scale.shape} do not fit {rows} × {columns} weights in groups of {group}")
    return Parts(codes, scale, None, rows, columns)
