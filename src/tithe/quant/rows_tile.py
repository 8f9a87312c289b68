"""Some rows times one panel of 48 columns: the tiles of `tithe.quant.tile` and `amx_tile` behind one signature each.

`dot_*` take bf16 operands and `steps` k-pairs, `fma_*` float32 operands and `steps` elements; both are as high as
`DOT_ROWS` or `FMA_ROWS` rows. A row's bits do not depend on the rows beside it.

Output modes: 0 float32, 1 bf16, 2 float32 rounded to bf16 (operands of processors without a bf16 dot product).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from tithe.quant.amx_tile import AMX_ROWS, amx_begin, amx_high, amx_low
from tithe.quant.codes import round_bf16
from tithe.quant.runtime import HAS_AMX, HAS_AVX512, address_of, f32_to_bf16, f32p, fma, stack_f32, u16p, u32p
from tithe.quant.tile import PANEL, make_tile

DOT_ROWS = AMX_ROWS if HAS_AMX else 8
FMA_ROWS = 8 if HAS_AVX512 else 2  # 48 columns fill three AVX-512 or six AVX2 registers a row
TILE_FLOATS = max(DOT_ROWS, FMA_ROWS) * PANEL
"""What `stack_f32` is asked for where a tile is looked at before it is written."""
_ZERO = np.float32(0.0)


def _make_block(height: int, dot: bool) -> Any:
    """`block(x, ldx, count, panel, steps, out, ldo, add, factor)`: out [count, 48] float32 = x·panel, or
    out = fma(factor, x·panel, out); count ≤ height. Addresses, and strides in elements of 4 bytes."""
    tile, tile_add = make_tile(height, dot, False), make_tile(height, dot, True)
    row, row_add = make_tile(1, dot, False), make_tile(1, dot, True)
    pointer = u32p if dot else f32p

    @njit
    def block(x: Any, ldx: Any, count: Any, panel: Any, steps: Any, out: Any, ldo: Any, add: Any, factor: Any) -> None:
        w = pointer(panel)
        if count == height:
            if add:
                tile_add(pointer(x), ldx, w, steps, f32p(out), ldo, factor)
            else:
                tile(pointer(x), ldx, w, steps, f32p(out), ldo, _ZERO)
            return
        for r in range(count):
            if add:
                row_add(pointer(x + r * ldx * 4), ldx, w, steps, f32p(out + r * ldo * 4), ldo, factor)
            else:
                row(pointer(x + r * ldx * 4), ldx, w, steps, f32p(out + r * ldo * 4), ldo, _ZERO)

    return block


def _make_amx_block() -> Any:
    """The same by matrix registers, of 16 rows by 16 k-pairs; a rest of pairs is filled up by 0."""

    @njit
    def rest(x: Any, ldx: Any, count: Any, panel: Any, spare: Any, out: Any, ldo: Any) -> None:
        """out += x·panel of fewer than 16 pairs and at most 16 rows."""
        some_x, some_w = stack_f32(256), stack_f32(768)
        of_x, of_w = u32p(address_of(some_x)), u32p(address_of(some_w))
        for r in range(count):
            source = u32p(x + r * ldx * 4)
            for p in range(16):
                of_x[r * 16 + p] = source[p] if p < spare else np.uint32(0)
        source = u32p(panel)
        for i in range(768):
            of_w[i] = source[i] if i < spare * 48 else np.uint32(0)
        amx_low(address_of(some_x), 16, count, address_of(some_w), 1, out, ldo, 1)

    @njit
    def block(x: Any, ldx: Any, count: Any, panel: Any, steps: Any, out: Any, ldo: Any, add: Any, factor: Any) -> None:
        answer = stack_f32(TILE_FLOATS)
        target, ldt = out, ldo
        if add:
            target, ldt = address_of(answer), 48
        whole = steps // 16
        spare = steps - whole * 16
        is_high = count == AMX_ROWS and whole > 0
        if is_high:
            amx_high(x, ldx, panel, whole, target, ldt)
        if not is_high or spare > 0:
            for r in range(0, count, 16):
                rows, of_x, of_out = min(16, count - r), x + r * ldx * 4, target + r * ldt * 4
                if not is_high:
                    amx_low(of_x, ldx, rows, panel, whole, of_out, ldt, 0)
                if spare > 0:
                    rest(of_x + whole * 64, ldx, rows, panel + whole * 3072, spare, of_out, ldt)
            amx_begin()
        if add:
            for r in range(count):
                o = f32p(out + r * ldo * 4)
                for c in range(48):
                    o[c] = fma(factor, answer[r * 48 + c], o[c])

    return block


@njit
def begin_tiles() -> None:
    """What every thread of a kernel does before its first `dot_block` or `dot_rows`."""
    if HAS_AMX:
        amx_begin()


dot_block = _make_amx_block() if HAS_AMX else _make_block(DOT_ROWS, True)
fma_block = _make_block(FMA_ROWS, False)


@njit
def _finish(tile: Any, rows: Any, left: Any, right: Any, out: Any, ldo: Any, mode: Any, add: Any, scale: Any) -> None:
    """Write columns left..right of a 48-wide float32 tile to out[:, left:right]."""
    for r in range(rows):
        if mode == 1:
            o16 = u16p(out + r * ldo * 2)
            for c in range(left, right):
                o16[c] = f32_to_bf16(tile[r * 48 + c])
        elif mode == 2:
            o32 = f32p(out + r * ldo * 4)
            for c in range(left, right):
                o32[c] = round_bf16(tile[r * 48 + c])
        else:
            o32 = f32p(out + r * ldo * 4)
            for c in range(left, right):
                o32[c] = fma(scale, tile[r * 48 + c], o32[c]) if add else tile[r * 48 + c]


def _make_rows(block: Any, height: int) -> Any:
    """`rows(x, ldx, begin, end, panel, steps, out, ldo, span, write, tile)`: rows begin..end of x by one panel.

    span = (left, right) columns of the panel that are written; write = (mode, add, factor); tile: `TILE_FLOATS` to use.
    """

    @njit
    def rows(
        x: Any,
        ldx: Any,
        begin: Any,
        end: Any,
        panel: Any,
        steps: Any,
        out: Any,
        ldo: Any,
        span: Any,
        write: Any,
        tile: Any,
    ) -> None:
        left, right = span
        mode, add, factor = write
        size = 2 if mode == 1 else 4
        via_tile = mode != 0 or left > 0 or right < 48
        for i in range(begin, end, height):
            count = min(height, end - i)
            target = out + i * ldo * size
            if via_tile:
                block(x + i * ldx * 4, ldx, count, panel, steps, address_of(tile), 48, False, _ZERO)
                _finish(tile, count, left, right, target, ldo, mode, add, factor)
            else:
                block(x + i * ldx * 4, ldx, count, panel, steps, target, ldo, add, factor)

    return rows


dot_rows, fma_rows = _make_rows(dot_block, DOT_ROWS), _make_rows(fma_block, FMA_ROWS)
