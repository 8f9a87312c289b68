"""Turning a page of rows around, 16 × 16 numbers at a time in registers: written as LLVM IR.

Sixteen rows of sixteen columns are loaded, widened, and transposed in four butterfly stages: at step s lanes of row i
and row i + s change places where they differ in bit s.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core.typing import signature

from tithe.models.vector_tile import load_wide
from tithe.quant.runtime import f32p, intrinsic, u16p
from tithe.quant.tile import store_vector

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)


def _shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, 16), lanes))


def _transpose(builder: Any, rows: list[Any]) -> list[Any]:
    for step in (8, 4, 2, 1):
        for i in (i for i in range(16) if not i & step):
            a, b = rows[i], rows[i + step]
            rows[i] = _shuffle(builder, a, b, [16 + n - step if n & step else n for n in range(16)])
            rows[i + step] = _shuffle(builder, a, b, [16 + n if n & step else n + step for n in range(16)])
    return rows


def _make(bf16: bool) -> Any:
    @intrinsic
    def turn(typingctx: Any, source: Any, ld: Any, out: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            rows = [
                load_wide(builder, values[0], builder.mul(values[1], ir.Constant(_I64, r)), bf16) for r in range(16)
            ]
            for i, row in enumerate(_transpose(builder, rows)):
                store_vector(builder, row, values[2], ir.Constant(_I64, i * 16))
            return context.get_dummy_value()

        pointer = types.CPointer(types.uint16 if bf16 else types.float32)
        return signature(types.void, pointer, types.int64, types.CPointer(types.float32)), codegen

    return turn


_turn_bf16, _turn_f32 = _make(True), _make(False)


@njit
def turn_page(page: Any, width: Any, is_bf16: Any, out: Any) -> None:
    """A page's rows [16, width] → out [width, 16] float32; width is a multiple of 16."""
    for i in range(0, width, 16):
        if is_bf16:
            _turn_bf16(u16p(page + i * 2), width, f32p(out + i * 64))
        else:
            _turn_f32(f32p(page + i * 4), width, f32p(out + i * 64))
