"""Integers with a scale per group, as the reference quantizes and unpacks them, as packed matrices."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tithe.quant.formats import GROUP_SIZE
from tithe.quant.kinds import INT4, INT8
from tithe.quant.matrix import PackedMatrix
from tithe.quant.tile import PANEL


def by_panel(x: np.ndarray) -> Tensor:
    """[N, G] → [panels, G, 48], zero-padded."""
    return torch.from_numpy(np.ascontiguousarray(_panelled(x).transpose(0, 2, 1)))


def _panelled(x: np.ndarray) -> np.ndarray:
    """[N, ...] → [panels, 48, ...], zero-padded."""
    n = x.shape[0]
    pad = -n % PANEL
    if pad:
        x = np.concatenate([x, np.zeros((pad, *x.shape[1:]), x.dtype)])
    return x.reshape(-1, PANEL, *x.shape[1:])


def _check_groups(q: np.ndarray, *parts: np.ndarray) -> None:
    rows, columns = q.shape
    if columns % GROUP_SIZE:
        raise ValueError(f"{columns} columns are no whole groups of {GROUP_SIZE}, which share a scale")
    for part in parts:
        if part.shape != (rows, columns // GROUP_SIZE):
            raise ValueError(f"a matrix {q.shape} needs scales {(rows, columns // GROUP_SIZE)}, not {part.shape}")


def pack_int4(q: np.ndarray, scale: np.ndarray, zero: np.ndarray, *, rounded: bool = True) -> PackedMatrix:
    """Pack q uint8 [N, K] in 0..15 with fp16 scale and zero [N, K/32]; `ValueError` unless 32 divides K."""
    rows, columns = q.shape
    _check_groups(q, scale, zero)
    # [panels, 3 registers, low/high half, 8 columns, K/2, k even/odd]
    x = _panelled(q.astype(np.uint8)).reshape(-1, 3, 2, 8, columns // 2, 2)
    nibbles = (x[:, :, 0] | (x[:, :, 1] << 4)).transpose(0, 3, 1, 2, 4)
    data = torch.from_numpy(np.ascontiguousarray(nibbles).reshape(-1, columns // 2, PANEL))
    return PackedMatrix(
        INT4, rows, columns, data, by_panel(scale.astype(np.float16)), by_panel(zero.astype(np.float16)), rounded
    )


def pack_int8(q: np.ndarray, scale: np.ndarray, *, rounded: bool = True) -> PackedMatrix:
    """Pack q int8 [N, K] with fp16 scale [N, K/32]; `ValueError` unless 32 divides K."""
    rows, columns = q.shape
    _check_groups(q, scale)
    pairs = _panelled(q.astype(np.int8)).reshape(-1, PANEL, columns // 2, 2)
    data = torch.from_numpy(np.ascontiguousarray(pairs.transpose(0, 2, 1, 3)))
    return PackedMatrix(INT8, rows, columns, data, by_panel(scale.astype(np.float16)), None, rounded)
