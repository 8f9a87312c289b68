"""The tile of the packed matrix product in matrix registers (Intel AMX), written as one stretch of assembly.

A panel of bf16 pairs is what `tdpbf16ps` takes as its second operand: 16 pairs by 48 columns are three tile registers,
16 rows by 16 pairs of x a fourth, the sums [16, 48] three more. Per element the instruction keeps one float32 chain
over the even and one over the odd elements of 16 pairs, adds the two, and adds that to the sum (Intel SDM, TDPBF16PS:
round to nearest even, subnormals are zero). So a row's result depends on nothing but the row, but it is another result
than `vdpbf16ps` gives: another product kernel in a policy's numeric mode.
"""

from __future__ import annotations

import struct
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing import signature

from tithe.quant.runtime import intrinsic

AMX_ROWS = 16
"""Rows of a tile register."""

_I64 = ir.IntType(64)
_SUMS, _X, _PANEL = (0, 1, 2), 3, (4, 5, 6)
"""Tile registers by what they hold."""


def _configuration(rows: int) -> bytes:
    """The 64 bytes that `ldtilecfg` reads: palette 1, then by register bytes a row (uint16) and rows (uint8)."""
    widths, heights = [64 if i < 7 else 0 for i in range(16)], [0] * 16
    for register in (*_SUMS, _X):
        heights[register] = rows
    for register in _PANEL:
        heights[register] = 16
    return struct.pack("<BB14x16H16B", 1, 0, *widths, *heights)


_CONFIGURATIONS = b"".join(_configuration(max(rows, 1)) for rows in range(AMX_ROWS + 1))

# $0 x, $1 panel, $2 turns (all three advance), $3 bytes from row to row of x, $4 of the panel, $5 out, $6 its bytes
# from row to row, $7 configuration, $8 whether the sums begin with what stands in out. `ldtilecfg` clears the sums.
_ASSEMBLY = """
    ldtilecfg ($7)
    test $8, $8
    je 1f
    tileloadd ($5,$6,1), %tmm0
    tileloadd 64($5,$6,1), %tmm1
    tileloadd 128($5,$6,1), %tmm2
1:
    test $2, $2
    je 3f
2:
    tileloadd ($0,$3,1), %tmm3
    tileloadd ($1,$4,1), %tmm4
    tdpbf16ps %tmm4, %tmm3, %tmm0
    tileloadd 64($1,$4,1), %tmm5
    tdpbf16ps %tmm5, %tmm3, %tmm1
    tileloadd 128($1,$4,1), %tmm6
    tdpbf16ps %tmm6, %tmm3, %tmm2
    add $$64, $0
    add $$3072, $1
    dec $2
    jne 2b
3:
    tilestored %tmm0, ($5,$6,1)
    tilestored %tmm1, 64($5,$6,1)
    tilestored %tmm2, 128($5,$6,1)
"""
_CONSTRAINTS = "=&r,=&r,=&r,r,r,r,r,r,r,0,1,2,~{memory},~{flags}"


@intrinsic
def amx_pairs(
    typingctx: Any, x: Any, ldx: Any, rows: Any, panel: Any, turns: Any, out: Any, ldo: Any, keep: Any
) -> Any:
    """out [rows, 48] float32 = (keep: out +) x [rows, 32·turns] bf16 by `turns` times 16 pairs of a panel.

    Addresses; strides in elements of 4 bytes; rows ≤ 16.
    """

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        at_x, ld_x, n, at_panel, n_turns, at_out, ld_out, keeps = values
        four = ir.Constant(_I64, 4)
        table = cgutils.global_constant(
            builder,
            "amx_configurations",
            ir.Constant(ir.ArrayType(ir.IntType(8), len(_CONFIGURATIONS)), bytearray(_CONFIGURATIONS)),
        )
        of_rows = builder.add(builder.ptrtoint(table, _I64), builder.mul(n, ir.Constant(_I64, 64)))
        result = ir.LiteralStructType([_I64] * 3)
        asm = ir.InlineAsm(ir.FunctionType(result, [_I64] * 9), _ASSEMBLY, _CONSTRAINTS, side_effect=True)
        strides = [builder.mul(ld_x, four), ir.Constant(_I64, 192)]
        outs = [at_out, builder.mul(ld_out, four), of_rows, keeps]
        builder.call(asm, [*strides, *outs, at_x, at_panel, n_turns])
        return context.get_dummy_value()

    return signature(types.void, *[types.int64] * 8), codegen
