"""Forward kernels of a decoder layer beside its products and its attention, and the sums that all kernels share.

A row is one token position: decode, prefill and training compute it with the same kernels. Argument order of every
kernel is written above it; addresses are int64, strides count elements, slot 0..2 as in `tithe.quant.runtime`.
Reductions use 16 lanes combined in a fixed tree.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from tithe.quant.runtime import (
    as_float,
    exp_f32,
    f32p,
    fma,
    kernel,
    next_slot,
    next_task,
    stack_f32,
    write_row,
)

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@njit(inline="always")
def tree_sum(lanes: Any) -> Any:
    """Sum of 16 lanes in a fixed tree."""
    for width in (8, 4, 2, 1):
        for i in range(width):
            lanes[i] = lanes[i] + lanes[i + width]
    return lanes[0]


@njit
def dot_rows(a: Any, b: Any, n: Any) -> Any:
    """Σ a[i]·b[i] over n float32 values, 16 lanes."""
    lanes = stack_f32(16)
    for j in range(16):
        lanes[j] = _ZERO
    full = n - n % 16
    for i in range(0, full, 16):
        for j in range(16):
            lanes[j] = fma(a[i + j], b[i + j], lanes[j])
    for i in range(full, n):
        lanes[i - full] = fma(a[i], b[i], lanes[i - full])
    return tree_sum(lanes)


@njit(inline="always")
def rms_scale(x: Any, n: Any, eps: Any) -> Any:
    """1 / sqrt(mean(x²) + eps) of one row."""
    return _ONE / np.sqrt(dot_rows(x, x, n) / np.float32(n) + eps)


@njit
def norm_into(x: Any, weight: Any, n: Any, eps: Any, out: Any) -> None:
    """out = weight · x / rms(x); out may be x."""
    scale = rms_scale(x, n, eps)
    for i in range(n):
        out[i] = weight[i] * (x[i] * scale)


@njit
def add_into(x: Any, bias: Any, n: Any) -> None:
    """x += bias."""
    for i in range(n):
        x[i] += bias[i]


# x [R, H], weight [H], out [R, H] operand, H, eps, out_bf16, scratch [threads, H], rows per task, R
@kernel
def rms_norm(args: Any) -> None:
    """out = weight · x / rms(x), float32 inside."""
    weight, width, eps = f32p(args[4]), args[6], np.float32(as_float(args[7]))
    size = 2 if args[8] != 0 else 4
    row = f32p(args[9] + next_slot(args) * width * 4)
    while True:
        t = next_task(args)
        if t >= args[1]:
            break
        for r in range(t * args[10], min((t + 1) * args[10], args[11])):
            x = f32p(args[3] + r * width * 4)
            norm_into(x, weight, width, eps, row)
            write_row(row, width, args[5] + r * width * size, args[8] != 0)


# gate_up [R, 2I], bias or 0, I, out [R, I] operand, out_bf16, scratch [threads, I], rows per task, R
@kernel
def swiglu(args: Any) -> None:
    """out = silu(gate) · up."""
    width = args[5]
    out_bf16 = args[7] != 0
    row = f32p(args[8] + next_slot(args) * width * 4)
    while True:
        t = next_task(args)
        if t >= args[1]:
            break
        for r in range(t * args[9], min((t + 1) * args[9], args[10])):
            gate, up = f32p(args[3] + r * width * 8), f32p(args[3] + (r * 2 + 1) * width * 4)
            if args[4] != 0:
                add_into(gate, f32p(args[4]), 2 * width)
            for i in range(width):
                g = gate[i]
                row[i] = g / (_ONE + exp_f32(-g)) * up[i]
            write_row(row, width, args[6] + r * width * (2 if out_bf16 else 4), out_bf16)
