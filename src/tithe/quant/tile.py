"""The inner tile of the packed matrix product, written as LLVM IR: rows by 48 columns, in registers over all of K.

Each output element is one chain of fused operations over k = 0, 1, 2 … in order, whatever tile it falls in. That is
what makes a row's result independent of the batch it rides in (design: "rows do not depend on the batch").

* `dot_tile`: operands bf16. x is read as pairs (uint32: element 2i in the low half), the panel holds the matching
  pairs of 48 columns: [K/2][48] uint32. One `vdpbf16ps` per 16 columns: acc + x1·w1 + x0·w0, accumulated in float32
  (Intel SDM).
* `fma_tile`: operands float32, panel [K][48]; any processor.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core.typing import signature

from tithe.quant.runtime import intrinsic

PANEL = 48
"""Columns of a panel: three AVX-512 registers."""

binding.initialize_native_asmparser()  # the dot product is one inline instruction

_LANES = 16
_VECTORS = PANEL // _LANES
_I64 = ir.IntType(64)
_F32 = ir.FloatType()
_VF = ir.VectorType(_F32, _LANES)
_VI = ir.VectorType(ir.IntType(32), _LANES)


def splat(builder: Any, scalar: Any, vector_type: Any) -> Any:
    """A vector of 16 times `scalar`."""
    undef = ir.Constant(vector_type, ir.Undefined)
    one = builder.insert_element(undef, scalar, ir.Constant(ir.IntType(32), 0))
    mask = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [0] * _LANES)
    return builder.shuffle_vector(one, undef, mask)


def load_vector(builder: Any, base: Any, index: Any, vector_type: Any) -> Any:
    """The vector at base[index], aligned to an element only."""
    pointer = builder.bitcast(builder.gep(base, [index]), ir.PointerType(vector_type))
    value = builder.load(pointer)
    value.align = 4
    return value


def store_vector(builder: Any, value: Any, base: Any, index: Any) -> None:
    """base[index …] ← a vector, aligned to an element only."""
    pointer = builder.bitcast(builder.gep(base, [index]), ir.PointerType(value.type))
    builder.store(value, pointer).align = 4


def vector_fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a·b + c in each of 16 float32 lanes, rounded once."""
    name = f"llvm.fma.v{_LANES}f32"  # llvmlite's own fma takes scalars only
    function = builder.module.globals.get(name) or ir.Function(
        builder.module, ir.FunctionType(_VF, [_VF, _VF, _VF]), name
    )
    return builder.call(function, [a, b, c])


def _accumulate(builder: Any, acc: Any, x: Any, w: Any, dot: bool) -> Any:
    if not dot:
        return vector_fma(builder, x, w, acc)
    function_type = ir.FunctionType(_VF, [_VF, _VI, _VI])
    asm = ir.InlineAsm(function_type, "vdpbf16ps $3, $2, $0", "=v,0,v,v", side_effect=False)
    return builder.call(asm, [acc, x, w])


def make_tile(rows: int, dot: bool, accumulate: bool) -> Any:
    """`tile(x, ldx, panel, steps, out, ldo, scale)`: x, ldx count uint32 (dot) or float32 elements; `out` is float32.

    accumulate False: out = acc.  True: out = fma(scale, acc, out).
    """
    vector = _VI if dot else _VF

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        x, ldx, panel, steps, out, ldo, scale = values
        zero = ir.Constant(_VF, [0.0] * _LANES)
        entry = builder.block
        head = builder.append_basic_block("tile.head")
        body = builder.append_basic_block("tile.body")
        done = builder.append_basic_block("tile.done")
        row_pointers = [builder.gep(x, [builder.mul(ldx, ir.Constant(_I64, r))]) for r in range(rows)]
        builder.branch(head)
        builder.position_at_end(head)
        k = builder.phi(_I64)
        k.add_incoming(ir.Constant(_I64, 0), entry)
        accs = []
        for _ in range(rows * _VECTORS):
            phi = builder.phi(_VF)
            phi.add_incoming(zero, entry)
            accs.append(phi)
        builder.cbranch(builder.icmp_signed("<", k, steps), body, done)
        builder.position_at_end(body)
        base = builder.mul(k, ir.Constant(_I64, PANEL))
        columns = [
            load_vector(builder, panel, builder.add(base, ir.Constant(_I64, _LANES * v)), vector)
            for v in range(_VECTORS)
        ]
        for r in range(rows):
            value = splat(builder, builder.load(builder.gep(row_pointers[r], [k])), vector)
            for v in range(_VECTORS):
                slot = r * _VECTORS + v
                accs[slot].add_incoming(_accumulate(builder, accs[slot], value, columns[v], dot), body)
        k.add_incoming(builder.add(k, ir.Constant(_I64, 1)), body)
        builder.branch(head)
        builder.position_at_end(done)
        for r in range(rows):
            for v in range(_VECTORS):
                index = builder.add(builder.mul(ldo, ir.Constant(_I64, r)), ir.Constant(_I64, _LANES * v))
                value = accs[r * _VECTORS + v]
                if accumulate:
                    old = load_vector(builder, out, index, _VF)
                    value = vector_fma(builder, splat(builder, scale, _VF), value, old)
                store_vector(builder, value, out, index)
        return context.get_dummy_value()

    element_type = types.uint32 if dot else types.float32
    pointer = types.CPointer(element_type)
    result = signature(
        types.void,
        pointer,
        types.int64,
        pointer,
        types.int64,
        types.CPointer(types.float32),
        types.int64,
        types.float32,
    )

    @intrinsic
    def tile(typingctx: Any, x: Any, ldx: Any, panel: Any, steps: Any, out: Any, ldo: Any, scale: Any) -> Any:
        return result, codegen

    return tile
