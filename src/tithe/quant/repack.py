"""GGUF blocks → panels, without an unpacked copy in between. Bit layouts are in `tithe.quant.formats`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tithe.arch import TensorFormat
from tithe.errors import ModelError
from tithe.quant.codes import GROUP, INT4, INT8
from tithe.quant.matrix import PackedMatrix
from tithe.quant.runtime import kernel, next_task, u8p, u16p
from tithe.quant.tile import PANEL

REPACKED = (TensorFormat.Q4_0, TensorFormat.Q4_1, TensorFormat.Q8_0)


# raw rows (uint8), bytes per row, rows, groups, block bytes, quants offset, data, scale, zero (0: none)
@kernel
def repack_nibbles(args: Any) -> None:
    """Q4_0 and Q4_1: byte j of a block holds weights j (low) and j + 16 (high). One task a panel."""
    row_bytes, rows, groups, block, offset = args[4], args[5], args[6], args[7], args[8]
    while True:
        t = next_task(args)
        if t >= args[1]:
            break
        data = u8p(args[9] + t * groups * 768)
        scale, zero = u16p(args[10] + t * groups * 96), u16p(args[11] + t * groups * 96)
        for n in range(min(48, rows - t * 48)):
            for g in range(groups):
                at = args[3] + (t * 48 + n) * row_bytes + g * block
                q = u8p(at + offset)
                scale[g * 48 + n] = u16p(at)[0]
                if offset == 4:
                    zero[g * 48 + n] = u16p(at)[1]
                shift = np.uint8(0) if n % 16 < 8 else np.uint8(4)
                for k in range(32):
                    x = q[k % 16] & np.uint8(15) if k < 16 else q[k % 16] >> np.uint8(4)
                    place = (g * 16 + k // 2) * 48 + (n // 16) * 16 + (n % 8) * 2 + k % 2
                    data[place] = np.uint8(data[place] | np.uint8(x << shift))


# the same arguments, zero unused
@kernel
def repack_bytes(args: Any) -> None:
    """Q8_0: 32 signed bytes behind one scale. One task a panel."""
    row_bytes, rows, groups = args[4], args[5], args[6]
    while True:
        t = next_task(args)
        if t >= args[1]:
            break
        data, scale = u8p(args[9] + t * groups * 1536), u16p(args[10] + t * groups * 96)
        for n in range(min(48, rows - t * 48)):
            for g in range(groups):
                at = args[3] + (t * 48 + n) * row_bytes + g * 34
                q = u8p(at + 2)
                scale[g * 48 + n] = u16p(at)[0]
                for k in range(32):
                    data[((g * 16 + k // 2) * 48 + n) * 2 + k % 2] = q[k]


def repack(raw: np.ndarray, kind: TensorFormat, *, rounded: bool) -> PackedMatrix:
    """uint8 rows [N, bytes per row] of Q4_0, Q4_1 or Q8_0 as a packed matrix; the scales keep their bits.

    Q4_0's zero point becomes -8·scale, exact in half precision unless it overflows. `ModelError` when a scale is not
    finite.
    """
    rows, row_bytes = raw.shape
    is_byte = kind is TensorFormat.Q8_0
    offset = 4 if kind is TensorFormat.Q4_1 else 2
    block = 34 if is_byte else 16 + offset
    groups, panels = row_bytes // block, -(-rows // PANEL)
    raw = np.ascontiguousarray(raw)
    shape = (panels, groups * 16, PANEL, 2) if is_byte else (panels, groups * 16, PANEL)
    data = torch.zeros(shape, dtype=torch.int8 if is_byte else torch.uint8)
    scale = torch.zeros(panels, groups, PANEL, dtype=torch.float16)
    zero = None if is_byte else torch.zeros_like(scale)
    args = [raw.ctypes.data, row_bytes, rows, groups, block, offset, data.data_ptr(), scale.data_ptr()]
    args.append(0 if zero is None else zero.data_ptr())
    (repack_bytes if is_byte else repack_nibbles).bind(panels, args, raw).run()
    if kind is TensorFormat.Q4_0 and zero is not None:
        zero.copy_(scale * -8)
    if not all(bool(torch.isfinite(t).all()) for t in (scale, zero) if t is not None):
        raise ModelError(f"a {kind} tensor has a scale that is not a finite half-precision number: damaged file")
    return PackedMatrix(INT8 if is_byte else INT4, rows, groups * GROUP, data, scale, zero, rounded)
