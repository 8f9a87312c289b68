"""Packed elements to bf16 pairs, written as LLVM IR for processors with the narrowing instruction.

`widen(source, d, m, pairs, out)`: the elements of `pairs` k-pairs of a panel → [pairs][48] bf16 pairs (uint32), all
under the same d and m (float32 [96], held in registers). w = fma(q, d, m) in float32, then two registers narrow into
one by `vcvtne2ps2bf16` (round to nearest even; the results are never subnormal, see `tithe.quant.kinds`). The bytes are
laid out so that the narrowed register already is the operand of the dot product.

Four-bit elements are looked up: `vpermps` takes the low four bits of each lane's index, so that low nibbles need no
mask.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.typing import signature

from tithe.quant.codes import E2M1, E4M3, S4, S6, S8, U4
from tithe.quant.runtime import intrinsic
from tithe.quant.tile import load_vector, store_vector, vector_fma

_LANES, _VECTORS = 16, 3
_I64, _I32, _F32 = ir.IntType(64), ir.IntType(32), ir.FloatType()
_VF, _VI = ir.VectorType(_F32, _LANES), ir.VectorType(_I32, _LANES)
_V16, _V8 = ir.VectorType(ir.IntType(16), _LANES), ir.VectorType(ir.IntType(8), _LANES)
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_TABLES = {
    U4: tuple(float(q) for q in range(16)),
    S4: tuple(float(q - 8) for q in range(16)),
    E2M1: (*_MAGNITUDES, *(-x for x in _MAGNITUDES)),
}


_PAIRS_OF_STEP = {U4: 4, S4: 4, E2M1: 4, S8: 4, E4M3: 4, S6: 2}
"""k-pairs in one turn of the loop: groups and their parts are whole turns."""


def _all(vector: Any, value: Any) -> Any:
    return ir.Constant(vector, [value] * _LANES)


def _bytes_at(builder: Any, source: Any, at: Any) -> Any:
    return load_vector(builder, source, at, _V8)


def _looked_up(builder: Any, table: tuple[float, ...], index: Any) -> Any:
    function_type = ir.FunctionType(_VF, [_VI, _VF])
    asm = ir.InlineAsm(function_type, "vpermps $2, $1, $0", "=v,v,v", side_effect=False)
    return builder.call(asm, [index, ir.Constant(_VF, list(table))])


def _nibbles(builder: Any, element: int, source: Any, pair: Any) -> list[Any]:
    """The six half registers of numbers of one pair, in order (register, low or high)."""
    halves: list[Any] = []
    base = builder.mul(pair, ir.Constant(_I64, 48))
    for v in range(_VECTORS):
        both = builder.zext(_bytes_at(builder, source, builder.add(base, ir.Constant(_I64, 16 * v))), _VI)
        halves.append(_looked_up(builder, _TABLES[element], both))
        halves.append(_looked_up(builder, _TABLES[element], builder.lshr(both, _all(_VI, 4))))
    return halves


def _e4m3(builder: Any, code: Any) -> Any:
    """As a half with the exponent 8 too low; conversion from half precision keeps subnormal numbers in any mode."""
    wide = builder.zext(code, _V16)
    magnitude = builder.shl(builder.and_(wide, _all(_V16, 127)), _all(_V16, 7))
    sign = builder.shl(builder.and_(wide, _all(_V16, 128)), _all(_V16, 8))
    half = builder.bitcast(builder.or_(magnitude, sign), ir.VectorType(ir.HalfType(), _LANES))
    return builder.fmul(builder.fpext(half, _VF), _all(_VF, 256.0))


def _bytes(builder: Any, element: int, source: Any, pair: Any) -> list[Any]:
    base = builder.mul(pair, ir.Constant(_I64, 96))
    codes = [_bytes_at(builder, source, builder.add(base, ir.Constant(_I64, 16 * h))) for h in range(6)]
    if element == E4M3:
        return [_e4m3(builder, code) for code in codes]
    return [builder.sitofp(builder.sext(code, _VI), _VF) for code in codes]


def _sixes(builder: Any, source: Any, two_pairs: Any) -> list[Any]:
    """The twelve half registers of two pairs."""
    base = builder.mul(two_pairs, ir.Constant(_I64, 144))
    wide = [
        builder.zext(_bytes_at(builder, source, builder.add(base, ir.Constant(_I64, 16 * i))), _VI) for i in range(9)
    ]
    halves: list[Any] = []
    for h in range(12):
        low = builder.and_(builder.lshr(wide[h // 2], _all(_VI, h % 2 * 4)), _all(_VI, 15))
        top = builder.and_(builder.lshr(wide[6 + h // 4], _all(_VI, h % 4 * 2)), _all(_VI, 3))
        code = builder.or_(low, builder.shl(top, _all(_VI, 4)))
        halves.append(builder.sitofp(builder.sub(code, _all(_VI, 32)), _VF))
    return halves


def _numbers(builder: Any, element: int, source: Any, step: Any) -> list[Any]:
    """The half registers of one step's pairs."""
    if element == S6:
        return _sixes(builder, source, step)
    one = _nibbles if element in _TABLES else _bytes
    first = builder.mul(step, ir.Constant(_I64, _PAIRS_OF_STEP[element]))
    return [
        h
        for i in range(_PAIRS_OF_STEP[element])
        for h in one(builder, element, source, builder.add(first, ir.Constant(_I64, i)))
    ]


def make_widen(element: int) -> Any:
    """`widen(source, d, m, pairs, out)` of an element code; `pairs` is a multiple of four."""
    narrow = ir.InlineAsm(ir.FunctionType(_VI, [_VF, _VF]), "vcvtne2ps2bf16 $2, $1, $0", "=v,v,v", side_effect=False)
    pairs_of_step = _PAIRS_OF_STEP[element]

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        source, d, m, pairs, out = values
        scales = [load_vector(builder, d, ir.Constant(_I64, 16 * h), _VF) for h in range(6)]
        zeros = [load_vector(builder, m, ir.Constant(_I64, 16 * h), _VF) for h in range(6)]
        steps = builder.udiv(pairs, ir.Constant(_I64, pairs_of_step))
        entry = builder.block
        head, body, done = (builder.append_basic_block(f"widen.{name}") for name in ("head", "body", "done"))
        builder.branch(head)
        builder.position_at_end(head)
        step = builder.phi(_I64)
        step.add_incoming(ir.Constant(_I64, 0), entry)
        builder.cbranch(builder.icmp_signed("<", step, steps), body, done)
        builder.position_at_end(body)
        numbers = _numbers(builder, element, source, step)
        weights = [vector_fma(builder, q, scales[h % 6], zeros[h % 6]) for h, q in enumerate(numbers)]
        base = builder.mul(step, ir.Constant(_I64, 48 * pairs_of_step))
        for i in range(len(weights) // 2):
            narrowed = builder.call(narrow, [weights[2 * i + 1], weights[2 * i]])
            store_vector(builder, narrowed, out, builder.add(base, ir.Constant(_I64, 16 * i)))
        step.add_incoming(builder.add(step, ir.Constant(_I64, 1)), body)
        builder.branch(head)
        builder.position_at_end(done)
        return context.get_dummy_value()

    floats = types.CPointer(types.float32)
    result = signature(
        types.void, types.CPointer(types.uint8), floats, floats, types.int64, types.CPointer(types.uint32)
    )

    @intrinsic
    def widen(typingctx: Any, source: Any, d: Any, m: Any, pairs: Any, out: Any) -> Any:
        return result, codegen

    return widen


WIDEN = {element: make_widen(element) for element in (U4, S4, E2M1, S8, E4M3, S6)}
"""`widen` by element."""
