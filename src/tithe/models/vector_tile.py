"""The inner step of attention: a few rows times 16·v columns, accumulated in registers in a fixed order.

out[r, c] (+)= Σ_k a[r·row_stride + k·k_stride] · B[k·ldb + c] for k = 0, 1, 2 … in order. Scores use it with B = a
transposed page of keys [D, 16], values with B = a page of values [16, D]. Fused multiply-add everywhere, so one answer
everywhere.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core.typing import signature

from tithe.quant.runtime import f32p, intrinsic, u16p
from tithe.quant.tile import load_vector, splat, store_vector, vector_fma

_I64 = ir.IntType(64)
_VF = ir.VectorType(ir.FloatType(), 16)


def load_wide(builder: Any, base: Any, index: Any, bf16: bool) -> Any:
    """16 adjacent numbers from element `index` on, as float32."""
    if not bf16:
        return load_vector(builder, base, index, _VF)
    half = load_vector(builder, base, index, ir.VectorType(ir.IntType(16), 16))
    wide = builder.zext(half, ir.VectorType(ir.IntType(32), 16))
    return builder.bitcast(builder.shl(wide, ir.Constant(wide.type, [16] * 16)), _VF)


def _make(rows: int, vectors: int, bf16: bool, accumulate: bool, chains: int) -> Any:
    """`chains` = 2 keeps even and odd k apart and adds them at the end (k must then be even): it hides latency."""

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        a, row_stride, k_stride, b, ldb, count, out, ldo = values
        zero = ir.Constant(_VF, [0.0] * 16)

        def place(r: int, v: int) -> Any:
            return builder.add(builder.mul(ldo, ir.Constant(_I64, r)), ir.Constant(_I64, 16 * v))

        starts = [
            load_vector(builder, out, place(r, v), _VF) if accumulate and c == 0 else zero
            for c in range(chains)
            for r in range(rows)
            for v in range(vectors)
        ]
        entry = builder.block
        head, body, done = (builder.append_basic_block(f"vec.{n}") for n in ("head", "body", "done"))
        builder.branch(head)
        builder.position_at_end(head)
        k = builder.phi(_I64)
        k.add_incoming(ir.Constant(_I64, 0), entry)
        accs = []
        for start in starts:
            phi = builder.phi(_VF)
            phi.add_incoming(start, entry)
            accs.append(phi)
        builder.cbranch(builder.icmp_signed("<", k, count), body, done)
        builder.position_at_end(body)
        for c in range(chains):
            kc = builder.add(k, ir.Constant(_I64, c))
            base = builder.mul(kc, ldb)
            at = [builder.add(base, ir.Constant(_I64, 16 * v)) for v in range(vectors)]
            columns = [load_wide(builder, b, index, bf16) for index in at]
            for r in range(rows):
                index = builder.add(builder.mul(row_stride, ir.Constant(_I64, r)), builder.mul(kc, k_stride))
                x = splat(builder, builder.load(builder.gep(a, [index])), _VF)
                for v in range(vectors):
                    slot = (c * rows + r) * vectors + v
                    accs[slot].add_incoming(vector_fma(builder, x, columns[v], accs[slot]), body)
        k.add_incoming(builder.add(k, ir.Constant(_I64, chains)), body)
        builder.branch(head)
        builder.position_at_end(done)
        for r in range(rows):
            for v in range(vectors):
                value = accs[r * vectors + v]
                if chains == 2:
                    value = builder.fadd(value, accs[(rows + r) * vectors + v])
                store_vector(builder, value, out, place(r, v))
        return context.get_dummy_value()

    floats = types.CPointer(types.float32)
    b_type = types.CPointer(types.uint16 if bf16 else types.float32)
    result = signature(
        types.void, floats, types.int64, types.int64, b_type, types.int64, types.int64, floats, types.int64
    )

    @intrinsic
    def tile(
        typingctx: Any, a: Any, row_stride: Any, k_stride: Any, b: Any, ldb: Any, count: Any, out: Any, ldo: Any
    ) -> Any:
        return result, codegen

    return tile


_score = {(r, b): _make(r, 1, b, False, 2) for r in (1, 2, 3, 4) for b in (False, True)}
_s1h, _s2h, _s3h, _s4h = (_score[r, True] for r in (1, 2, 3, 4))
_s1f, _s2f, _s3f, _s4f = (_score[r, False] for r in (1, 2, 3, 4))
_value = {(r, v, b): _make(r, v, b, True, 1) for r in (1, 2, 3, 4) for v in (1, 4) for b in (False, True)}
_v14h, _v24h, _v34h, _v44h = (_value[r, 4, True] for r in (1, 2, 3, 4))
_v14f, _v24f, _v34f, _v44f = (_value[r, 4, False] for r in (1, 2, 3, 4))
_v11h, _v11f = _value[1, 1, True], _value[1, 1, False]


# All pointers below are integer addresses, all strides count elements.


@njit
def score_block(a: Any, lda: Any, rows: Any, page: Any, dim: Any, out: Any, ldo: Any, bf16: Any) -> None:
    """out[r, 0:16] = a[r, 0:dim] · page[dim, 16] for r < rows; a and out float32, page bf16 or float32; dim is even."""
    r = 0
    while r < rows:
        left = rows - r
        x, o = f32p(a + r * lda * 4), f32p(out + r * ldo * 4)
        if left >= 4:
            if bf16:
                _s4h(x, lda, 1, u16p(page), 16, dim, o, ldo)
            else:
                _s4f(x, lda, 1, f32p(page), 16, dim, o, ldo)
        elif left == 3:
            if bf16:
                _s3h(x, lda, 1, u16p(page), 16, dim, o, ldo)
            else:
                _s3f(x, lda, 1, f32p(page), 16, dim, o, ldo)
        elif left == 2:
            if bf16:
                _s2h(x, lda, 1, u16p(page), 16, dim, o, ldo)
            else:
                _s2f(x, lda, 1, f32p(page), 16, dim, o, ldo)
        elif bf16:
            _s1h(x, lda, 1, u16p(page), 16, dim, o, ldo)
        else:
            _s1f(x, lda, 1, f32p(page), 16, dim, o, ldo)
        r += min(left, 4)


@njit
def value_block(
    a: Any,
    row_stride: Any,
    k_stride: Any,
    rows: Any,
    b: Any,
    ldb: Any,
    count: Any,
    dim: Any,
    out: Any,
    ldo: Any,
    bf16: Any,
) -> None:
    """out[r, 0:dim] += Σ_k a[r·row_stride + k·k_stride] · b[k·ldb, 0:dim], k < count; dim is a multiple of 16."""
    size = 2 if bf16 else 4
    column = 0
    while column + 64 <= dim:
        r = 0
        while r < rows:
            left = rows - r
            x, o = f32p(a + r * row_stride * 4), f32p(out + (r * ldo + column) * 4)
            y = b + column * size
            if left >= 4:
                if bf16:
                    _v44h(x, row_stride, k_stride, u16p(y), ldb, count, o, ldo)
                else:
                    _v44f(x, row_stride, k_stride, f32p(y), ldb, count, o, ldo)
            elif left == 3:
                if bf16:
                    _v34h(x, row_stride, k_stride, u16p(y), ldb, count, o, ldo)
                else:
                    _v34f(x, row_stride, k_stride, f32p(y), ldb, count, o, ldo)
            elif left == 2:
                if bf16:
                    _v24h(x, row_stride, k_stride, u16p(y), ldb, count, o, ldo)
                else:
                    _v24f(x, row_stride, k_stride, f32p(y), ldb, count, o, ldo)
            elif bf16:
                _v14h(x, row_stride, k_stride, u16p(y), ldb, count, o, ldo)
            else:
                _v14f(x, row_stride, k_stride, f32p(y), ldb, count, o, ldo)
            r += min(left, 4)
        column += 64
    while column < dim:
        for r in range(rows):
            x, o = f32p(a + r * row_stride * 4), f32p(out + (r * ldo + column) * 4)
            if bf16:
                _v11h(x, row_stride, k_stride, u16p(b + column * size), ldb, count, o, ldo)
            else:
                _v11f(x, row_stride, k_stride, f32p(b + column * size), ldb, count, o, ldo)
        column += 16
