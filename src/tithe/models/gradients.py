"""Backward kernels of a decoder layer beside its products and its attention.

A backward kernel needs no bitwise agreement with anything but itself: every sum has a fixed order, so the same batch
gives the same gradient on any number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from tithe.models.kernels import dot_rows, rms_scale
from tithe.quant.runtime import as_float, exp_f32, f32p, kernel, next_slot, next_task, operand, write_row

_ONE = np.float32(1.0)


@njit
def norm_gradient(x: Any, weight: Any, dy: Any, n: Any, eps: Any, out: Any) -> None:
    """out += gradient of weight·x/rms(x) for dy; leaves weight·dy in dy."""
    scale = rms_scale(x, n, eps)
    for i in range(n):
        dy[i] = dy[i] * weight[i]
    share = dot_rows(x, dy, n) * scale * scale / np.float32(n)
    for i in range(n):
        out[i] += scale * (dy[i] - x[i] * share)


# x [R, H], weight, dy [R, H] float32 (overwritten), dx [R, H] (added to), H, eps, rows per task, R
@kernel
def rms_norm_backward(args: Any) -> None:
    """dx += the input gradient of `rms_norm`."""
    weight, width, eps = f32p(args[4]), args[7], np.float32(as_float(args[8]))
    while True:
        t = next_task(args)
        if t >= args[1]:
            break
        for r in range(t * args[9], min((t + 1) * args[9], args[10])):
            offset = r * width * 4
            norm_gradient(f32p(args[3] + offset), weight, f32p(args[5] + offset), width, eps, f32p(args[6] + offset))


# gate_up [R, 2I] operand, d_act [R, I] float32, I, d_gate_up (out) [R, 2I] operand, act (out) [R, I] operand, is_bf16,
# scratch [threads, 3I], rows per task, R
@kernel
def swiglu_backward(args: Any) -> None:
    """Gradient of silu(gate)·up with respect to gate and up, and the activation itself once more."""
    width, is_bf16 = args[5], args[8] != 0
    size = 2 if is_bf16 else 4
    base = args[9] + next_slot(args) * width * 12
    row, act = f32p(base), f32p(base + width * 8)
    while True:
        t = next_task(args)
        if t >= args[1]:
            break
        for r in range(t * args[10], min((t + 1) * args[10], args[11])):
            d = f32p(args[4] + r * width * 4)
            source = args[3] + r * 2 * width * size
            for i in range(width):
                g, u = operand(source, i, is_bf16), operand(source, width + i, is_bf16)
                s = _ONE / (_ONE + exp_f32(-g))
                dy = d[i]
                row[i] = dy * u * s * (_ONE + g * (_ONE - s))
                row[width + i] = dy * g * s
                act[i] = g * s * u
            write_row(row, 2 * width, args[6] + r * 2 * width * size, is_bf16)
            write_row(act, width, args[7] + r * width * size, is_bf16)
