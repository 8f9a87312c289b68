"""Weights as they lie in a checkpoint → packed matrices, without an unpacked copy in between.

`repack` takes a tensor that holds its own scales (GGUF, bit layouts in `tithe.quant.formats` and
`tithe.quant.kquants`), `repack_parts` a weight that lies in several tensors (`tithe.quant.parts`). Only the order of
the elements changes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from tithe.arch import StoredFormat, TensorFormat
from tithe.errors import ModelError
from tithe.quant import kinds
from tithe.quant.matrix import PackedMatrix, scratch
from tithe.quant.pack import by_panel
from tithe.quant.parts import Parts, check
from tithe.quant.repack_kernels import (
    BY_OUTPUT,
    BY_WORD,
    IN_ORDER,
    IN_RUNS,
    repack_bytes,
    repack_nibbles,
    repack_six,
)
from tithe.quant.tile import PANEL

REPACKED = (TensorFormat.Q4_0, TensorFormat.Q4_1, TensorFormat.Q8_0, TensorFormat.Q4_K, TensorFormat.Q6_K)


def repack(raw: np.ndarray, tensor_format: TensorFormat, *, rounded: bool) -> PackedMatrix:
    """uint8 rows [N, bytes per row] of a format in `REPACKED` as a packed matrix; scales keep their bits.

    `ModelError` when a scale is not finite, `ValueError` for rows of broken blocks or another format.
    """
    if tensor_format not in REPACKED or raw.ndim != 2 or raw.shape[1] % tensor_format.block_bytes:
        raise ValueError(f"rows of shape {raw.shape} are no whole blocks of one of {', '.join(REPACKED)}")
    raw = np.ascontiguousarray(raw)
    blocks = raw.reshape(len(raw), -1, tensor_format.block_bytes)
    rows, columns = len(raw), blocks.shape[1] * tensor_format.block_size
    zero = None
    match tensor_format:
        case TensorFormat.Q4_0:
            kind, data = kinds.Q4_0, _nibbles(raw, rows, columns, IN_RUNS, (18, 2, 16, 1))
            scale = _halves(blocks, 0, tensor_format)
        case TensorFormat.Q4_1:
            kind, data = kinds.INT4, _nibbles(raw, rows, columns, IN_RUNS, (20, 4, 16, 1))
            scale, zero = _halves(blocks, 0, tensor_format), _halves(blocks, 2, tensor_format)
        case TensorFormat.Q8_0:
            kind, data = kinds.INT8, _bytes(raw, rows, columns, (34, 2, 32)).view(torch.int8)
            scale = _halves(blocks, 0, tensor_format)
        case TensorFormat.Q4_K:
            kind, data = kinds.KQUANT4, _nibbles(raw, rows, columns, IN_RUNS, (144, 16, 32, 4))
            halves = [_halves(blocks, at, tensor_format) for at in (0, 2)]
            scale = torch.cat([*(h.view(torch.uint8) for h in halves), _fields(blocks[:, :, 4:16])], dim=2)
        case _:
            kind, data = kinds.KQUANT6, _six(raw, rows, columns)
            d = _halves(blocks, 208, tensor_format)
            scale = torch.cat([_fields(blocks[:, :, 192:208]), d.view(torch.uint8)], dim=2)
    return PackedMatrix(kind, rows, columns, data, scale, zero, rounded)


def repack_parts(
    parts: Mapping[str, np.ndarray], stored: StoredFormat, *, rounded: bool, gptq_v2: bool = False
) -> PackedMatrix:
    """One weight [N, K] of a compound format as a packed matrix.

    `parts` maps the ends of the tensors' names (``.weight_packed``, ``_blocks``, …: `StoredFormat.parts`) to arrays as
    they lie in the file, of one matrix (of a stack, one slice). `gptq_v2`: GPTQ zeros are stored as they are.
    `ModelError` for damage and for what is not read (see `tithe.quant.parts`).
    """
    p = check(parts, stored, gptq_v2=gptq_v2)
    zero = None
    match stored.kind:
        case TensorFormat.FP8_BLOCK:
            kind, data = kinds.FP8, _bytes(np.ascontiguousarray(p.codes), p.rows, p.columns, None)
            scale = torch.from_numpy(np.array(p.scale, order="C"))
        case TensorFormat.INT4_PACKED:
            kind, data = kinds.INT4_SYM.of_group(p.group), _in_order(p)
            scale = by_panel(p.scale.view(np.int16)).view(torch.bfloat16)
        case TensorFormat.MXFP4:
            kind, data, scale = kinds.MXFP4, _in_order(p), by_panel(p.scale)
        case TensorFormat.NVFP4:
            kind, data, scale = kinds.NVFP4, _in_order(p), by_panel(p.scale)
            zero = torch.from_numpy(np.array(p.zero))
        case _:
            kind = kinds.INT4_ZP.of_group(p.group)
            form = BY_WORD if stored.kind is TensorFormat.GPTQ else BY_OUTPUT
            data = _nibbles(np.ascontiguousarray(p.codes), p.rows, p.columns, form)
            scale, zero = by_panel(p.scale), _packed_zeros(p)
    return PackedMatrix(kind, p.rows, p.columns, data, scale, zero, rounded)


def _panels(rows: int) -> int:
    return -(-rows // PANEL)


def _nibbles(
    source: np.ndarray, rows: int, columns: int, form: int, blocks: tuple[int, int, int, int] = (0, 0, 0, 0)
) -> Tensor:
    """uint8 [panels, K/2, 48]; `blocks`: block bytes, offset of the nibbles, bytes of a run, runs (GGUF)."""
    panels, steps = _panels(rows), columns // 2
    data = torch.empty(panels, steps, PANEL, dtype=torch.uint8)
    address, stride = scratch.reserve(steps * PANEL)
    args = [source.ctypes.data, source.strides[0], rows, steps, form, *blocks, data.data_ptr(), address, stride]
    repack_nibbles.bind(panels, args, (source, scratch.buffer)).run()
    return data


def _in_order(p: Parts) -> Tensor:
    return _nibbles(np.ascontiguousarray(p.codes), p.rows, p.columns, IN_ORDER)


def _bytes(source: np.ndarray, rows: int, columns: int, blocks: tuple[int, int, int] | None) -> Tensor:
    """uint8 [panels, K/2, 48, 2]; `blocks`: block bytes, offset, weights in a block; `None`: E4M3 in whole rows."""
    panels = _panels(rows)
    data = torch.zeros(panels, columns // 2, PANEL, 2, dtype=torch.uint8)
    bad = np.zeros(panels, np.uint8)
    block, offset, run = blocks or (0, 0, columns)
    args = [source.ctypes.data, source.strides[0], rows, columns // 2, block, offset, run, data.data_ptr()]
    repack_bytes.bind(panels, [*args, 0 if blocks else bad.ctypes.data], (source, bad)).run()
    if bad.any():
        raise ModelError("FP8 .weight: a weight is not a number: damaged file")
    return data


def _six(source: np.ndarray, rows: int, columns: int) -> Tensor:
    """uint8 [panels, K/4, 144]."""
    panels = _panels(rows)
    data = torch.zeros(panels, columns // 4, 3 * PANEL, dtype=torch.uint8)
    args = [source.ctypes.data, source.strides[0], rows, columns // 256, data.data_ptr()]
    repack_six.bind(panels, args, source).run()
    return data


def _halves(blocks: np.ndarray, offset: int, tensor_format: TensorFormat) -> Tensor:
    """Half precision [panels, blocks, 48] of the numbers at `offset` of every block; `ModelError` unless finite."""
    halves = np.ascontiguousarray(blocks[:, :, offset : offset + 2]).view("<f2")[..., 0]
    if not np.isfinite(halves).all():
        raise ModelError(
            f"a {tensor_format} tensor has a scale that is not a finite half-precision number: damaged file"
        )
    return by_panel(halves)


def _fields(fields: np.ndarray) -> Tensor:
    """uint8 [N, blocks, F] → [panels, blocks, F · 48]."""
    rows, blocks, n_fields = fields.shape
    return by_panel(fields.reshape(rows, -1)).view(_panels(rows), blocks, n_fields * PANEL)


def _packed_zeros(p: Parts) -> Tensor:
    """Zeros uint8 [N, K/G] in 0..15 → [panels, K/G, 24]."""
    assert p.zero is not None
    zeros = by_panel(p.zero)
    return zeros[:, :, :24] | zeros[:, :, 24:] << 4
