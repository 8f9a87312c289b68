"""The inner step of turning a packed matrix around, written as LLVM IR: 16 rows of W̃ at 16 adjacent k, in registers.

A product with W̃ pairs k, a product with its transpose pairs rows. Within 64 bits, two rows at two k change places
([a0 a1 b0 b1] → [a0 b0 a1 b1]); then the 64-bit lanes of eight registers are transposed in three butterfly stages.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.typing import signature

from tithe.quant.runtime import intrinsic, u32p
from tithe.quant.tile import PANEL, load_vector, store_vector

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_WORDS = ir.VectorType(_I32, 16)
_HALVES = ir.VectorType(ir.IntType(16), 32)
_LANES = ir.VectorType(_I64, 8)


def _shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))


def _transpose(builder: Any, rows: list[Any]) -> list[Any]:
    """Eight registers of eight 64-bit lanes, rows and lanes exchanged."""
    for step in (4, 2, 1):
        for i in (i for i in range(8) if not i & step):
            a, b = rows[i], rows[i + step]
            rows[i] = _shuffle(builder, a, b, [8 + n - step if n & step else n for n in range(8)])
            rows[i + step] = _shuffle(builder, a, b, [8 + n if n & step else n + step for n in range(8)])
    return rows


@intrinsic
def turn_tile(typingctx: Any, w: Any, out: Any) -> Any:
    """`turn_tile(w, out)`: w [8 k-pairs][PANEL rows] uint32, its first 16 rows → out [8 row pairs][PANEL k], 16 k."""
    pointer = types.CPointer(types.uint32)

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        source, target = values
        exchange = [4 * i + j for i in range(8) for j in (0, 2, 1, 3)]
        rows = []
        for pair in range(8):
            words = load_vector(builder, source, ir.Constant(_I64, pair * PANEL), _WORDS)
            halves = builder.bitcast(words, _HALVES)
            rows.append(builder.bitcast(_shuffle(builder, halves, halves, exchange), _LANES))
        for i, row in enumerate(_transpose(builder, rows)):
            store_vector(builder, builder.bitcast(row, _WORDS), target, ir.Constant(_I64, i * PANEL))
        return context.get_dummy_value()

    return signature(types.void, pointer, pointer), codegen


@njit
def _turn_some(w: Any, first: Any, last: Any, left: Any, right: Any, out: Any) -> None:
    """k-pairs first..last of 48 rows at row pairs left..right, one by one: what no tile covers."""
    low, high = np.uint32(0xFFFF), np.uint32(0xFFFF0000)
    for p in range(left, right):
        o = u32p(out + p * 192)
        for c in range(first, last):
            a, b = w[c * 48 + 2 * p], w[c * 48 + 2 * p + 1]
            o[2 * c] = (a & low) | (b << np.uint32(16))
            o[2 * c + 1] = (a >> np.uint32(16)) | (b & high)


@njit
def turn_pairs(w: Any, count: Any, left: Any, right: Any, out: Any, at: Any, pairs: Any) -> None:
    """48 rows of W̃ at `count` k-pairs, [k-pair][48 rows], into panels [k / 48][pairs along N][48 k] from pair `at` on.

    Rows left..right of the 48 (both even) belong to the matrix.
    """
    begin, end = (left + 15) // 16 * 16, right // 16 * 16
    for q in range((count + 23) // 24):
        source = w + q * 24 * 192
        target = out + (q * pairs + at) * 192
        width = min(24, count - q * 24)
        full = width // 8 * 8 if end > begin else 0
        for n in range(begin, end, 16):
            for c in range(0, full, 8):
                turn_tile(u32p(source + (c * 48 + n) * 4), u32p(target + (n * 24 + 2 * c) * 4))
        words = u32p(source)
        if full > 0:
            _turn_some(words, 0, full, left // 2, begin // 2, target)
            _turn_some(words, 0, full, end // 2, right // 2, target)
        _turn_some(words, full, width, left // 2, right // 2, target)
