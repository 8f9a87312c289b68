"""The gated MLP's first half in one launch: gate and up products, their adapters, silu(gate)·up.

The float32 products stay in the cache: at decode sizes writing and reading them again costs a tenth of the product. The
numbers are those of the separate launches, bit for bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from tithe.quant import Launch, PackedMatrix
from tithe.quant.expand import panel_pairs
from tithe.quant.matrix import panel_scratch, set_product_rows
from tithe.quant.product import ahead, ride
from tithe.quant.rows_tile import DOT_ROWS, begin_tiles, dot_block
from tithe.quant.runtime import (
    carrier,
    exp_f32,
    f32_to_bf16,
    f32p,
    next_slot,
    next_task,
    prefetch,
    u16p,
    write_row,
)
from tithe.quant.tile import PANEL

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_TILE_BYTES = DOT_ROWS * PANEL * 4


@njit
def _activate(gate: Any, up: Any, out: Any) -> None:
    """out[0:48] = bf16(silu(gate)·up)."""
    g, u, o = f32p(gate), f32p(up), u16p(out)
    for c in range(48):
        o[c] = f32_to_bf16(g[c] / (_ONE + exp_f32(-g[c])) * u[c])


# as matmul_dot: x, ldx (pairs), rows, steps (K/2), act (bf16 [R, I]), ld act, 2I, kind, data, scale, zero, scratch,
# scratch_stride, kept (bf16 [R, 2I], or 0), unused ×3, rows per task, riders, number of riders
@carrier
def gated_dot(args: Any) -> None:
    """act = silu(gate)·up with [gate | up] = x·W̃ᵀ + what rides on it; `kept` gets gate and up for a backward.

    A task: a panel of gate with its panel of up × block of rows.
    """
    x, ldx, rows, steps, act, ldo, columns = args[3], args[4], args[5], args[6], args[7], args[8], args[9]
    kind, data, scale, zero, kept = args[10], args[11], args[12], args[13], args[16]
    scratch = args[14] + next_slot(args) * args[15]
    gate, up = scratch, scratch + _TILE_BYTES
    spare = scratch + 2 * _TILE_BYTES
    blocks = (rows + args[20] - 1) // args[20]
    half = columns // 96
    begin_tiles()
    while True:
        task = next_task(args)
        if task >= args[1]:
            break
        t, begin = task // blocks, (task % blocks) * args[20]
        end = min(rows, begin + args[20])
        left = panel_pairs(data, scale, zero, kind, t, steps, spare)
        right = panel_pairs(data, scale, zero, kind, half + t, steps, spare + steps * 192)
        ahead_gate, share = ahead(kind, data, scale, zero, t, steps, columns // 2, end - begin)
        ahead_up, _ = ahead(kind, data, scale, zero, half + t, steps, columns, end - begin)
        for i in range(begin, end, DOT_ROWS):
            prefetch(ahead_gate, share)
            prefetch(ahead_up, share)
            ahead_gate += share
            ahead_up += share
            count = min(DOT_ROWS, end - i)
            dot_block(x + i * ldx * 4, ldx, count, left, steps, gate, 48, False, _ZERO)
            ride(args[21], args[22], t, i, count, gate, 48)
            dot_block(x + i * ldx * 4, ldx, count, right, steps, up, 48, False, _ZERO)
            ride(args[21], args[22], half + t, i, count, up, 48)
            for r in range(count):
                _activate(gate + r * 192, up + r * 192, act + ((i + r) * ldo + t * 48) * 2)
            if kept != 0:
                for r in range(count):
                    row = kept + ((i + r) * columns + t * 48) * 2
                    write_row(f32p(gate + r * 192), 48, row, True)
                    write_row(f32p(up + r * 192), 48, row + columns, True)


def can_gate(matrix: PackedMatrix, dtype: torch.dtype) -> bool:
    """Whether `gated_launch` runs a stacked [gate | up] matrix on these operands: bf16, no panel of both halves."""
    return dtype == torch.bfloat16 and matrix.takes_bf16() and matrix.rows % (2 * PANEL) == 0


def gated_launch(matrix: PackedMatrix, x: Tensor, act: Tensor, kept: Tensor | None) -> Launch:
    """act [R, I] bf16 = silu(gate)·up for x [R, H] bf16; `kept` [R, 2I] bf16 receives gate and up. See `can_gate`."""
    steps = matrix.columns // 2
    address, stride, buffer = panel_scratch(2 * (_TILE_BYTES + steps * PANEL * 4))
    values = [x.data_ptr(), x.stride(0) // 2, x.shape[0], steps, act.data_ptr(), act.stride(0), matrix.rows]
    values += [*matrix.source(), address, stride, kept.data_ptr() if kept is not None else 0]
    launch = gated_dot.bind(1, [*values, 0, 0, 0, 1, 0, 0], (matrix, x, act, kept, buffer))
    set_gated_rows(launch.args, x.shape[0])
    return launch


def set_gated_rows(args: np.ndarray, rows: int) -> None:
    """Let a gated launch compute the first `rows` rows of its buffers."""
    set_product_rows(args, rows, 2 * PANEL)
