"""Packed elements of one group to W̃, written as LLVM IR: 48 rows at a time, d and m held in registers.

`widen(source, d, m, pairs, out)`: the elements of `pairs` k-pairs of a panel (a multiple of four) under the same d and
m (float32 [96], index 2n + odd) → `out`, by `mode`:

* `PAIRS`: bf16 pairs [pairs][48], what the dot product takes. Two registers of w = fma(q, d, m) narrow into one by
  `vcvtne2ps2bf16` (round to nearest even; the results are never subnormal, see `tithe.quant.kinds`). The bytes are laid
  out so that the narrowed register already is the operand. Elsewhere the same bits by integer arithmetic.
* `FLOATS`, `ROUNDED`: float32 [2·pairs][48], as it is or rounded to what bf16 can hold.

With AVX-512 four-bit elements are looked up: `vpermps` takes the low four bits of each lane's index, so that low
nibbles need no mask. All other code is plain vector arithmetic, which LLVM fits to the processor.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.typing import signature

from tithe.quant.codes import E2M1, E4M3, S4, S6, U4
from tithe.quant.runtime import HAS_AVX512, HAS_BF16_DOT, intrinsic
from tithe.quant.tile import load_vector, store_vector, vector_fma

PAIRS, FLOATS, ROUNDED = range(3)
"""What `widen` writes."""

_LANES, _VECTORS = 16, 3
_PAIRS_OF_TURN = 4
"""k-pairs in one turn of the loop: groups and their parts are whole turns."""
_I64, _I32, _F32 = ir.IntType(64), ir.IntType(32), ir.FloatType()
_VF, _VI = ir.VectorType(_F32, _LANES), ir.VectorType(_I32, _LANES)
_V16, _V8 = ir.VectorType(ir.IntType(16), _LANES), ir.VectorType(ir.IntType(8), _LANES)
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_TABLES = {
    U4: tuple(float(q) for q in range(16)),
    S4: tuple(float(q - 8) for q in range(16)),
    E2M1: (*_MAGNITUDES, *(-x for x in _MAGNITUDES)),
}


def _all(vector: Any, value: Any) -> Any:
    return ir.Constant(vector, [value] * _LANES)


def _codes_at(builder: Any, source: Any, at: Any, offset: int) -> Any:
    return load_vector(builder, source, builder.add(at, ir.Constant(_I64, offset)), _V8)


def _masked(builder: Any, value: Any, shift: int, mask: int) -> Any:
    return builder.and_(builder.lshr(value, _all(_VI, shift)), _all(_VI, mask))


def _small_float(builder: Any, code: Any, magnitude: tuple[int, int], sign: tuple[int, int], unit: float) -> Any:
    """A float of a few bits as a half with a lower exponent, (mask, left shift) each; `unit` makes up for it.

    Where such a number is subnormal the half is, too, and conversion from half precision keeps it in any mode.
    """
    wide = builder.zext(code, _V16) if code.type == _V8 else builder.trunc(code, _V16)
    parts = [builder.shl(builder.and_(wide, _all(_V16, mask)), _all(_V16, by)) for mask, by in (magnitude, sign)]
    half = builder.bitcast(builder.or_(*parts), ir.VectorType(ir.HalfType(), _LANES))
    return builder.fmul(builder.fpext(half, _VF), _all(_VF, unit))


def _nibble(builder: Any, element: int, both: Any, shift: int) -> Any:
    """The numbers of the low (shift 0) or high (4) nibbles of bytes in int32 lanes."""
    if HAS_AVX512:
        index = builder.lshr(both, _all(_VI, shift)) if shift else both
        function_type = ir.FunctionType(_VF, [_VI, _VF])
        asm = ir.InlineAsm(function_type, "vpermps $2, $1, $0", "=v,v,v", side_effect=False)
        return builder.call(asm, [index, ir.Constant(_VF, list(_TABLES[element]))])
    code = _masked(builder, both, shift, 15)
    if element == E2M1:
        return _small_float(builder, code, (7, 9), (8, 12), 2.0**14)
    return builder.sitofp(builder.sub(code, _all(_VI, 8)) if element == S4 else code, _VF)


def _nibbles(builder: Any, element: int, source: Any, pair: Any) -> list[Any]:
    """The six half registers of numbers of one pair, in order (register, low or high)."""
    at = builder.mul(pair, ir.Constant(_I64, 48))
    wide = [builder.zext(_codes_at(builder, source, at, 16 * v), _VI) for v in range(_VECTORS)]
    return [_nibble(builder, element, both, shift) for both in wide for shift in (0, 4)]


def _bytes(builder: Any, element: int, source: Any, pair: Any) -> list[Any]:
    at = builder.mul(pair, ir.Constant(_I64, 96))
    codes = [_codes_at(builder, source, at, 16 * h) for h in range(6)]
    if element == E4M3:
        return [_small_float(builder, code, (127, 7), (128, 8), 2.0**8) for code in codes]
    return [builder.sitofp(builder.sext(code, _VI), _VF) for code in codes]


def _sixes(builder: Any, source: Any, two_pairs: Any) -> list[Any]:
    """The twelve half registers of two pairs."""
    at = builder.mul(two_pairs, ir.Constant(_I64, 144))
    wide = [builder.zext(_codes_at(builder, source, at, 16 * i), _VI) for i in range(9)]
    halves: list[Any] = []
    for h in range(12):
        low, top = _masked(builder, wide[h // 2], h % 2 * 4, 15), _masked(builder, wide[6 + h // 4], h % 4 * 2, 3)
        code = builder.or_(low, builder.shl(top, _all(_VI, 4)))
        halves.append(builder.sitofp(builder.sub(code, _all(_VI, 32)), _VF))
    return halves


def _numbers(builder: Any, element: int, source: Any, unit: Any) -> list[Any]:
    """The half registers of a pair, of six bits: of two."""
    if element == S6:
        return _sixes(builder, source, unit)
    return (_nibbles if element in _TABLES else _bytes)(builder, element, source, unit)


def _rounded(builder: Any, weights: Any) -> Any:
    """Bits of float32 rounded to bf16, nearest with ties to even; finite numbers only."""
    bits = builder.bitcast(weights, _VI)
    up = builder.add(_masked(builder, bits, 16, 1), _all(_VI, 0x7FFF))
    return builder.and_(builder.add(bits, up), _all(_VI, 0xFFFF0000))


def _even_odd(builder: Any, low: Any, high: Any) -> list[Any]:
    """16 columns at k even and at k odd, of two half registers."""
    mask = ir.VectorType(_I32, _LANES)
    return [
        builder.shuffle_vector(low, high, ir.Constant(mask, [2 * i + odd for i in range(_LANES)])) for odd in (0, 1)
    ]


def _write(builder: Any, mode: int, low: Any, high: Any, out: Any, place: int) -> None:
    """Two half registers of weights as 16 columns of a pair; `place` counts such stretches of 16 columns."""
    if mode == PAIRS and HAS_BF16_DOT:
        function_type = ir.FunctionType(_VI, [_VF, _VF])
        narrow = ir.InlineAsm(function_type, "vcvtne2ps2bf16 $2, $1, $0", "=v,v,v", side_effect=False)
        store_vector(builder, builder.call(narrow, [high, low]), out, ir.Constant(_I64, 16 * place))
        return
    halves = (low, high) if mode == FLOATS else (_rounded(builder, low), _rounded(builder, high))
    even, odd = _even_odd(builder, *halves)
    if mode == PAIRS:
        pairs = builder.or_(builder.lshr(even, _all(_VI, 16)), odd)
        store_vector(builder, pairs, out, ir.Constant(_I64, 16 * place))
        return
    at = place // _VECTORS * 96 + place % _VECTORS * 16
    store_vector(builder, even, out, ir.Constant(_I64, at))
    store_vector(builder, odd, out, ir.Constant(_I64, at + 48))


def make_widen(element: int, mode: int) -> Any:
    """`widen(source, d, m, pairs, out)` of an element code."""
    units = _PAIRS_OF_TURN // 2 if element == S6 else _PAIRS_OF_TURN
    words_of_turn = _PAIRS_OF_TURN * (48 if mode == PAIRS else 96)

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        source, d, m, pairs, out = values
        scales = [load_vector(builder, d, ir.Constant(_I64, 16 * h), _VF) for h in range(6)]
        zeros = [load_vector(builder, m, ir.Constant(_I64, 16 * h), _VF) for h in range(6)]
        turns = builder.udiv(pairs, ir.Constant(_I64, _PAIRS_OF_TURN))
        entry = builder.block
        head, body, done = (builder.append_basic_block(f"widen.{name}") for name in ("head", "body", "done"))
        builder.branch(head)
        builder.position_at_end(head)
        turn = builder.phi(_I64)
        turn.add_incoming(ir.Constant(_I64, 0), entry)
        builder.cbranch(builder.icmp_signed("<", turn, turns), body, done)
        builder.position_at_end(body)
        first = builder.mul(turn, ir.Constant(_I64, units))
        target = builder.gep(out, [builder.mul(turn, ir.Constant(_I64, words_of_turn))])
        place = 0
        for u in range(units):
            numbers = _numbers(builder, element, source, builder.add(first, ir.Constant(_I64, u)))
            weights = [vector_fma(builder, q, scales[h % 6], zeros[h % 6]) for h, q in enumerate(numbers)]
            for i in range(0, len(weights), 2):
                _write(builder, mode, weights[i], weights[i + 1], target, place)
                place += 1
        turn.add_incoming(builder.add(turn, ir.Constant(_I64, 1)), body)
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
