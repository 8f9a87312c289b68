"""Triton kernels of grouped products: x·W̃ᵀ and dy·W̃ over a bank of experts, W̃ made from published bytes in registers.

A program owns one block of at most `ROWS` rows of one expert, and one block of outputs. It reads a tile of the expert's
words and scales, turns it into W̃ rounded to bf16, multiplies, and goes on along the sum; W̃ never lies in global memory.

Words (int32) of expert e and row n, and the bits in them, as published (`tithe.quant.parts`, `tithe.quant.formats`):

| kind | words of a row | weight k | scales of a row |
|---|---|---|---|
| INT4_SYM | K/8 | nibble k%8 of word k//8, less 8 | int16 [K/G]: bf16 bits |
| MXFP4 | K/8 | nibble k%8 of word k//8, E2M1 | uint8 [K/32]: E8M0 |
| INT4 | 5·K/32 | nibble j//16 of byte j%16 of words 1 to 4 of block k//32, j = k%32 | d, m: halves of its word 0 |

Each output is one chain: tiles of `SUM` elements of the sum in ascending order, each added to a float32 accumulator.
No argument depends on how many rows there are, and `ROWS` and `SUM` are fixed: a row's bits do not depend on the rows
around it.

WIDE: operands are float32 that holds bf16 numbers. That is for Triton's interpreter, which multiplies bf16 as the
integers that its bits are, and does not round ties to even. Products of bf16 numbers are exact in float32, so only the
order of a sum differs.
"""

# ruff: noqa: PLR0917 - Triton takes the addresses and sizes of a kernel one by one

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from triton import knobs

from tithe.arch import TensorFormat

INT4_SYM: Final = tl.constexpr(0)
MXFP4: Final = tl.constexpr(1)
INT4: Final = tl.constexpr(2)
KINDS: Final = {
    TensorFormat.INT4_PACKED: INT4_SYM.value,
    TensorFormat.MXFP4: MXFP4.value,
    TensorFormat.Q4_1: INT4.value,
}


@triton.jit
def _bf16(x: tl.tensor, WIDE: tl.constexpr) -> tl.tensor:
    """Finite float32 → the nearest bf16, ties to even; WIDE: as float32."""
    if WIDE:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        nearest = bits.to(tl.float32, bitcast=True)
    else:
        nearest = x.to(tl.bfloat16)
    return nearest


@triton.jit
def _half(bits: tl.tensor) -> tl.tensor:
    """float32 of the half in the low 16 bits of an int32."""
    return (bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _e2m1(code: tl.tensor) -> tl.tensor:
    """As a half with the exponent 14 too low, where halves of E2M1's subnormal are subnormal, too."""
    return _half(((code & 7) << 9) | ((code & 8) << 12)) * 16384.0


@triton.jit
def _blocks(
    words: tl.tensor,
    n: tl.tensor,
    inside: tl.tensor,
    k: tl.tensor,
    K: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
) -> tl.tensor:
    """INT4: float32 [TILE_N, TILE_K/32, 32] = fma(q, d, m); q · d is exact."""
    row = words + n[:, None] * (K // 32 * 5)
    block = k // 32 + tl.arange(0, TILE_K // 32)
    both = tl.load(row + block[None, :] * 5, mask=inside[:, None] & (block < K // 32)[None, :], other=0)
    word = k // 8 + tl.arange(0, TILE_K // 8)
    at = word // 4 * 5 + 1 + word % 4
    packed = tl.load(row + at[None, :], mask=inside[:, None] & (word < K // 8)[None, :], other=0)
    packed = tl.reshape(packed, (TILE_N, TILE_K // 32, 1, 4, 1))
    shift = (tl.arange(0, 2) * 4)[:, None, None] + (tl.arange(0, 4) * 8)[None, None, :]
    q = tl.reshape((packed >> shift[None, None, :, :, :]) & 15, (TILE_N, TILE_K // 32, 32))
    return q.to(tl.float32) * _half(both)[:, :, None] + _half(both >> 16)[:, :, None]


@triton.jit
def _in_order(
    words: tl.tensor,
    scale: tl.tensor,
    n: tl.tensor,
    inside: tl.tensor,
    k: tl.tensor,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
) -> tl.tensor:
    """INT4_SYM and MXFP4: float32 [TILE_N, TILE_K/32, 32] = q · d, exact."""
    word = k // 8 + tl.arange(0, TILE_K // 8)
    held = inside[:, None] & (word < K // 8)[None, :]
    packed = tl.load(words + n[:, None] * (K // 8) + word[None, :], mask=held, other=0)
    nibble = (packed[:, :, None] >> (tl.arange(0, 8) * 4)[None, None, :]) & 15
    code = tl.reshape(nibble, (TILE_N, TILE_K // 32, 32))
    run = k // 32 + tl.arange(0, TILE_K // 32)
    held = inside[:, None] & (run < K // 32)[None, :]
    bits = tl.load(scale + n[:, None] * (K // GROUP) + (run // (GROUP // 32))[None, :], mask=held, other=0)
    if KIND == INT4_SYM:
        q, d = (code - 8).to(tl.float32), (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        q, d = _e2m1(code), (bits.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return q * d[:, :, None]


@triton.jit
def _weights(
    words: tl.tensor,
    scale: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    WIDE: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
) -> tl.tensor:
    """W̃ [TILE_N, TILE_K] at rows n and columns k onwards, rounded to bf16. Beyond N and K it is ±0."""
    if KIND == INT4:
        w = _blocks(words, n, n < N, k, K, TILE_N, TILE_K)
    else:
        w = _in_order(words, scale, n, n < N, k, K, GROUP, KIND, TILE_N, TILE_K)
    return _bf16(tl.reshape(w, (TILE_N, TILE_K)), WIDE)


@triton.jit
def _rows_of(
    x: tl.tensor,
    stride: tl.tensor,
    p: tl.tensor,
    stop: tl.tensor,
    at: tl.tensor,
    LENGTH: tl.constexpr,
    WIDE: tl.constexpr,
) -> tl.tensor:
    """Operand rows p < stop at columns `at` < LENGTH, zero elsewhere."""
    held = (p < stop)[:, None] & (at < LENGTH)[None, :]
    tile = tl.load(x + p.to(tl.int64)[:, None] * stride + at[None, :], mask=held, other=0.0)
    if WIDE:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def _write(
    out: tl.tensor,
    stride: tl.tensor,
    p: tl.tensor,
    stop: tl.tensor,
    at: tl.tensor,
    value: tl.tensor,
    LENGTH: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Outputs of rows p < stop at columns `at` < LENGTH, float32 or bf16."""
    held = (p < stop)[:, None] & (at < LENGTH)[None, :]
    place = out + p.to(tl.int64)[:, None] * stride + at[None, :]
    if out.dtype.element_ty == tl.bfloat16:  # pyright: ignore[reportAttributeAccessIssue]  pointers have one
        value = _bf16(value, WIDE)
    tl.store(place, value, mask=held)


@triton.jit
def product(
    x: tl.tensor,
    x_stride: tl.tensor,
    words: tl.tensor,
    scale: tl.tensor,
    block_expert: tl.tensor,
    block_start: tl.tensor,
    block_stop: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    EXPERT_WORDS: tl.constexpr,
    EXPERT_SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    SUM: tl.constexpr,
    OUTPUTS: tl.constexpr,
) -> None:
    """out [P, N] = x [P, K] · W̃ᵀ. Program: block of rows, OUTPUTS rows of W̃; the sum runs along K."""
    start = tl.load(block_start + tl.program_id(0))
    stop = tl.load(block_stop + tl.program_id(0))
    if start < stop:
        expert = tl.load(block_expert + tl.program_id(0)).to(tl.int64)
        words += expert * EXPERT_WORDS
        scale += expert * EXPERT_SCALES
        p = start + tl.arange(0, ROWS)
        n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        total = tl.full((OUTPUTS, ROWS), 0.0, tl.float32)
        for k in range(0, K, SUM):
            rows = _rows_of(x, x_stride, p, stop, k + tl.arange(0, SUM), K, WIDE)
            w = _weights(words, scale, n, k, N, K, GROUP, KIND, WIDE, OUTPUTS, SUM)
            total = tl.dot(w, tl.trans(rows), total)
        _write(out, out_stride, p, stop, n, tl.trans(total), N, WIDE)


@triton.jit
def input_gradient(
    dy: tl.tensor,
    dy_stride: tl.tensor,
    words: tl.tensor,
    scale: tl.tensor,
    block_expert: tl.tensor,
    block_start: tl.tensor,
    block_stop: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    EXPERT_WORDS: tl.constexpr,
    EXPERT_SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    SUM: tl.constexpr,
    OUTPUTS: tl.constexpr,
) -> None:
    """out [P, K] = dy [P, N] · W̃. Program: block of rows, OUTPUTS columns of W̃; the sum runs along N."""
    start = tl.load(block_start + tl.program_id(0))
    stop = tl.load(block_stop + tl.program_id(0))
    if start < stop:
        expert = tl.load(block_expert + tl.program_id(0)).to(tl.int64)
        words += expert * EXPERT_WORDS
        scale += expert * EXPERT_SCALES
        p = start + tl.arange(0, ROWS)
        k = tl.program_id(1) * OUTPUTS
        total = tl.full((ROWS, OUTPUTS), 0.0, tl.float32)
        for n in range(0, N, SUM):
            at = n + tl.arange(0, SUM)
            rows = _rows_of(dy, dy_stride, p, stop, at, N, WIDE)
            w = _weights(words, scale, at, k, N, K, GROUP, KIND, WIDE, SUM, OUTPUTS)
            total = tl.dot(rows, w, total)
        _write(out, out_stride, p, stop, k + tl.arange(0, OUTPUTS), total, K, WIDE)


INTERPRETED: Final = knobs.runtime.interpret
"""Whether TRITON_INTERPRET was set when this file was imported: then the kernels above run on the CPU, in numpy."""
CONFIGS: Final = [
    triton.Config({"OUTPUTS": outputs}, num_warps=warps, num_stages=stages)
    for outputs, warps, stages in ((64, 4, 3), (128, 4, 3), (128, 8, 3), (128, 8, 4))
]
"""What is tried once for a shape, whatever the number of rows: only which outputs a program owns and how its loads run
ahead. Nothing here spills registers or takes more than 68 KiB of shared memory on sm_80 to sm_120."""
_SHAPE = ["N", "K", "GROUP", "KIND"]
tuned_product: Final = triton.autotune(CONFIGS, key=_SHAPE)(product)
tuned_input_gradient: Final = triton.autotune(CONFIGS, key=_SHAPE)(input_gradient)
