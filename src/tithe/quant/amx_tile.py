"""The tile of the packed matrix product in matrix registers (Intel AMX), written as one stretch of assembly.

A panel of bf16 pairs is what `tdpbf16ps` takes as its second operand: 16 pairs by 48 columns are three tile registers,
16 rows by 16 pairs of x one, their sums [16, 48] three. Per element the instruction keeps one float32 chain
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

AMX_ROWS = 32
"""Rows of the taller tile: two of sums share what is loaded of a panel."""

_I64 = ir.IntType(64)


def _configuration(rows: int) -> bytes:
    """The 64 bytes that `ldtilecfg` reads: palette 1, then by register bytes a row (uint16) and rows (uint8).

    16 rows or fewer: registers 0 to 2 hold the sums, 3 x, 4 to 6 the panel; 32: 0 to 5 the sums, 6 x, 7 the panel.
    """
    heights = [rows] * 4 + [16] * 4 if rows <= 16 else [16] * 8
    return struct.pack("<BB14x16H16B", 1, 0, *[64] * 8, *[0] * 8, *heights, *[0] * 8)


_CONFIGURATIONS = b"".join(_configuration(max(rows, 1)) for rows in range(17))

# $0 x, $1 panel, $2 turns (all three advance), $3 bytes from row to row of x, $4 of the panel, $5 out, $6 its bytes
# from row to row, $7 configuration, $8 whether the sums begin with what stands in out. `ldtilecfg` clears the sums.
_LOW = """
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
# The same for 32 rows, under `amx_begin`: $8 is the byte from x's first row to its 17th. To clear the sums one by one
# takes a few cycles, to configure again 300.
_HIGH = """
    tilezero %tmm0
    tilezero %tmm1
    tilezero %tmm2
    tilezero %tmm3
    tilezero %tmm4
    tilezero %tmm5
2:
    tileloadd ($1,$4,1), %tmm7
    tileloadd ($0,$3,1), %tmm6
    tdpbf16ps %tmm7, %tmm6, %tmm0
    add $8, $0
    tileloadd ($0,$3,1), %tmm6
    tdpbf16ps %tmm7, %tmm6, %tmm3
    tileloadd 64($1,$4,1), %tmm7
    tdpbf16ps %tmm7, %tmm6, %tmm4
    sub $8, $0
    tileloadd ($0,$3,1), %tmm6
    tdpbf16ps %tmm7, %tmm6, %tmm1
    tileloadd 128($1,$4,1), %tmm7
    tdpbf16ps %tmm7, %tmm6, %tmm2
    add $8, $0
    tileloadd ($0,$3,1), %tmm6
    tdpbf16ps %tmm7, %tmm6, %tmm5
    sub $8, $0
    add $$64, $0
    add $$3072, $1
    dec $2
    jne 2b
    mov $6, $2
    shl $$4, $2
    add $5, $2
    tilestored %tmm0, ($5,$6,1)
    tilestored %tmm1, 64($5,$6,1)
    tilestored %tmm2, 128($5,$6,1)
    tilestored %tmm3, ($2,$6,1)
    tilestored %tmm4, 64($2,$6,1)
    tilestored %tmm5, 128($2,$6,1)
"""
_BEGIN = "ldtilecfg ($7)"
_CONSTRAINTS = "=&r,=&r,=&r,r,r,r,r,r,r,0,1,2,~{memory},~{flags}"


def _configured(builder: Any, rows: Any) -> Any:
    """The address of the configuration for rows ≤ 16 (int64)."""
    content = ir.Constant(ir.ArrayType(ir.IntType(8), len(_CONFIGURATIONS)), bytearray(_CONFIGURATIONS))
    table = cgutils.global_constant(builder, "amx_configurations", content)
    return builder.add(builder.ptrtoint(table, _I64), builder.mul(rows, ir.Constant(_I64, 64)))


def _assemble(builder: Any, text: str, inputs: Any) -> None:
    asm = ir.InlineAsm(
        ir.FunctionType(ir.LiteralStructType([_I64] * 3), [_I64] * 9), text, _CONSTRAINTS, side_effect=True
    )
    builder.call(asm, inputs)


@intrinsic
def amx_begin(typingctx: Any) -> Any:
    """Configure this thread's registers for `amx_high`: as its kernel begins, and after `amx_low`."""

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        none = ir.Constant(_I64, 0)
        _assemble(builder, _BEGIN, [none] * 4 + [_configured(builder, ir.Constant(_I64, 16))] + [none] * 4)
        return context.get_dummy_value()

    return signature(types.void), codegen


@intrinsic
def amx_low(typingctx: Any, x: Any, ldx: Any, rows: Any, panel: Any, turns: Any, out: Any, ldo: Any, keep: Any) -> Any:
    """out [rows, 48] float32 = (keep: out +) x [rows, 32·turns] bf16 by `turns` times 16 pairs of a panel; rows ≤ 16.

    Addresses; strides in elements of 4 bytes. Configures the registers for its rows.
    """

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        at_x, ld_x, n, at_panel, n_turns, at_out, ld_out, keeps = values
        four = ir.Constant(_I64, 4)
        strides = [builder.mul(ld_x, four), ir.Constant(_I64, 192)]
        outs = [at_out, builder.mul(ld_out, four), _configured(builder, n), keeps]
        _assemble(builder, _LOW, [*strides, *outs, at_x, at_panel, n_turns])
        return context.get_dummy_value()

    return signature(types.void, *[types.int64] * 8), codegen


@intrinsic
def amx_high(typingctx: Any, x: Any, ldx: Any, panel: Any, turns: Any, out: Any, ldo: Any) -> Any:
    """The same for 32 rows, which begins at 0, takes at least one turn and wants `amx_begin` before."""

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        at_x, ld_x, at_panel, n_turns, at_out, ld_out = values
        four = ir.Constant(_I64, 4)
        stride = builder.mul(ld_x, four)
        outs = [at_out, builder.mul(ld_out, four), _configured(builder, ir.Constant(_I64, 16))]
        half = builder.mul(stride, ir.Constant(_I64, 16))
        _assemble(builder, _HIGH, [stride, ir.Constant(_I64, 192), *outs, half, at_x, at_panel, n_turns])
        return context.get_dummy_value()

    return signature(types.void, *[types.int64] * 6), codegen
