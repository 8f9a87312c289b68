"""Kernels around the products of an expert block: sort rows by expert, gather, activate, combine, and back.

A pair is one row and one of its k experts. Pairs are sorted by expert, within an expert by row; a window is a range
lo ≤ pair < hi of the sorted pairs, whose buffers begin at pair lo. Argument order is written above each kernel; a
pointer is an integer address, a stride counts elements, operand modes are those of `tithe.quant.rows_tile`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from tithe.models.kernels import add_into, dot_rows
from tithe.quant.runtime import (
    as_float,
    bf16_to_f32,
    exp_f32,
    f32p,
    fma,
    i32p,
    i64p,
    kernel,
    next_slot,
    next_task,
    operand,
    put_row,
    u16p,
)

ROWS_PER_TASK = 8
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


# ids [R, k] int32, weights [R, k], R, k, E, offsets out (int64 [E + 1]), row of a pair out (int32), expert of a pair
# out (int32), weight of a pair out, position of row and slot out (int32 [R, k]), scratch (int64 [E])
@kernel
def sort_pairs(args: Any) -> None:
    """Count, then place: stable, so that an expert's rows ascend. One task."""
    ids, weights, rows, k, experts = i32p(args[3]), f32p(args[4]), args[5], args[6], args[7]
    offsets, pair_row, pair_expert, pair_weight = i64p(args[8]), i32p(args[9]), i32p(args[10]), f32p(args[11])
    position, at = i32p(args[12]), i64p(args[13])
    if next_task(args) != 0:
        return
    for e in range(experts):
        at[e] = 0
    for i in range(rows * k):
        at[ids[i]] += 1
    offsets[0] = 0
    for e in range(experts):
        offsets[e + 1] = offsets[e] + at[e]
        at[e] = offsets[e]
    for i in range(rows * k):
        e = ids[i]
        p = at[e]
        at[e] += 1
        pair_row[p], pair_expert[p], pair_weight[p], position[i] = i // k, e, weights[i], p


@njit
def _first_from(pair_row: Any, low: Any, high: Any, row: Any) -> Any:
    """The first pair of low..high (ascending rows) whose row is at least `row`."""
    while low < high:
        middle = (low + high) // 2
        if pair_row[middle] < row:
            low = middle + 1
        else:
            high = middle
    return low


# offsets, row of a pair, E, first row, last row, lo, hi, begin out, end out (int64 [E]), active out (int32 [E]), count
# out (int64), start out (int64 [E])
@kernel
def find_groups(args: Any) -> None:
    """Each expert's pairs of rows first..last within a window, as `tithe.quant.grouped.Groups`. One task."""
    offsets, pair_row, lo, hi = i64p(args[3]), i32p(args[4]), args[8], args[9]
    begin, end, active, count, start = i64p(args[10]), i64p(args[11]), i32p(args[12]), i64p(args[13]), i64p(args[14])
    if next_task(args) != 0:
        return
    found = 0
    for e in range(args[5]):
        a = _first_from(pair_row, offsets[e], offsets[e + 1], args[6])
        b = _first_from(pair_row, a, offsets[e + 1], args[7])
        begin[e] = min(max(a, lo), hi) - lo
        end[e] = min(max(b, lo), hi) - lo
        start[e] = (begin[e] + e + 1) // 2 * 2
        if end[e] > begin[e]:
            active[found] = e
            found += 1
    count[0] = found


# x [R, ld], ld, x is bf16, row of the window's pairs, n, W, out [n, W] operand, mode
@kernel
def gather_operands(args: Any) -> None:
    """out[p] = x[row of p], rounded to operands."""
    ld, is_bf16, pair_row, n, width, mode = args[4], args[5] != 0, i32p(args[6]), args[7], args[8], args[10]
    size = 2 if mode == 1 else 4
    while True:
        t = next_task(args)
        if t >= args[1]:
            break
        for p in range(t * ROWS_PER_TASK, min((t + 1) * ROWS_PER_TASK, n)):
            target = args[9] + p * width * size
            if not is_bf16:
                put_row(f32p(args[3] + pair_row[p] * ld * 4), width, target, mode)
                continue
            x = u16p(args[3] + pair_row[p] * ld * 2)
            if mode == 1:
                o16 = u16p(target)
                for i in range(width):
                    o16[i] = x[i]
            else:
                o32 = f32p(target)
                for i in range(width):
                    o32[i] = bf16_to_f32(x[i])


@njit
def _activate(gate: Any, up: Any, step: Any, n: Any, how: Any, out: Any) -> None:
    """out = (up + offset)·gate·sigmoid(alpha·gate), gate and up clamped at ± limit (gate from above only)."""
    alpha, limit, offset = how
    for i in range(n):
        g, u = min(gate[i * step], limit), max(min(up[i * step], limit), -limit)
        out[i] = g / (_ONE + exp_f32(-alpha * g)) * (u + offset)


# gate_up [n, 2I], bias [E, 2I] or 0, expert of the window's pairs, n, I, out [n, I] operand, mode, interleaved, alpha,
# limit, offset, scratch [threads, I]
@kernel
def activate(args: Any) -> None:
    """The activation of every pair; the bias is left in gate_up."""
    experts, n, width, mode = i32p(args[5]), args[6], args[7], args[9]
    step, up = (2, 1) if args[10] != 0 else (1, width)
    how = (np.float32(as_float(args[11])), np.float32(as_float(args[12])), np.float32(as_float(args[13])))
    row = f32p(args[14] + next_slot(args) * width * 4)
    size = 2 if mode == 1 else 4
    while True:
        t = next_task(args)
        if t >= args[1]:
            break
        for p in range(t * ROWS_PER_TASK, min((t + 1) * ROWS_PER_TASK, n)):
            x = args[3] + p * width * 8
            if args[4] != 0:
                add_into(f32p(x), f32p(args[4] + np.int64(experts[p]) * width * 8), 2 * width)
            _activate(f32p(x), f32p(x + up * 4), step, width, how, row)
            put_row(row, width, args[8] + p * width * size, mode)


@njit
def _activation_gradients(gate: Any, up: Any, step: Any, n: Any, how: Any, d: Any, dg: Any, du: Any) -> None:
    """dg, du = d · the derivatives of `_activate`; 0 where a clamp holds."""
    alpha, limit, offset = how
    for i in range(n):
        g, u = min(gate[i * step], limit), max(min(up[i * step], limit), -limit)
        s = _ONE / (_ONE + exp_f32(-alpha * g))
        along_gate = d[i] * (u + offset) * s * (_ONE + alpha * g * (_ONE - s))
        dg[i * step] = along_gate if gate[i * step] <= limit else _ZERO
        du[i * step] = d[i] * g * s if abs(up[i * step]) <= limit else _ZERO


# gate_up [n, 2I], bias [E, 2I] or 0, expert and weight of the window's pairs, n, I, d_act [n, I] (of the unweighted
# output, overwritten), act out [n, I] operand, d_gate_up out [n, 2I] operand, mode, interleaved, alpha, limit, offset,
# scratch [threads, 3I], d_weight of the window's pairs out, down bias [E, H] or 0, dy [n, H] operand, H
@kernel
def activate_backward(args: Any) -> None:
    """The activation once more, its gradient times the pair's weight, and the weight's own gradient ⟨dy, y⟩.

    ⟨dy, W̃·act⟩ = ⟨dy·W̃, act⟩, so that the output y itself is never computed again.
    """
    experts, weights, n, width, mode = i32p(args[5]), f32p(args[6]), args[7], args[8], args[12]
    step, up = (2, 1) if args[13] != 0 else (1, width)
    how = (np.float32(as_float(args[14])), np.float32(as_float(args[15])), np.float32(as_float(args[16])))
    base = args[17] + next_slot(args) * width * 12
    row, d_row = f32p(base), f32p(base + width * 4)
    size, hidden = 2 if mode == 1 else 4, args[21]
    while True:
        t = next_task(args)
        if t >= args[1]:
            break
        for p in range(t * ROWS_PER_TASK, min((t + 1) * ROWS_PER_TASK, n)):
            x, d = args[3] + p * width * 8, f32p(args[9] + p * width * 4)
            if args[4] != 0:
                add_into(f32p(x), f32p(args[4] + np.int64(experts[p]) * width * 8), 2 * width)
            gate, upper = f32p(x), f32p(x + up * 4)
            _activate(gate, upper, step, width, how, row)
            act = args[10] + p * width * size
            put_row(row, width, act, mode)
            d_weight = dot_rows(row, d, width)
            if args[19] != 0:
                bias, dy = f32p(args[19] + np.int64(experts[p]) * hidden * 4), args[20] + p * hidden * size
                for i in range(hidden):
                    d_weight += bias[i] * operand(dy, i, mode == 1)
            f32p(args[18])[p] = d_weight
            for i in range(width):
                d[i] *= weights[p]
            _activation_gradients(gate, upper, step, width, how, d, d_row, f32p(base + (width + up) * 4))
            put_row(d_row, 2 * width, args[11] + p * 2 * width * size, mode)


# y [n, H], bias [E, H] or 0, ids [R, k], position [R, k], weights [R, k] or 0 (all 1), k, lo, hi, out [R, ld], ld, H, R
@kernel
def combine(args: Any) -> None:
    """out[r] += Σ weight·(y + bias) over the row's pairs within the window, in ascending expert id."""
    ids, position, k, lo, hi = i32p(args[5]), i32p(args[6]), args[8], args[9], args[10]
    ld, width = args[12], args[13]
    while True:
        t = next_task(args)
        if t >= args[1]:
            break
        for r in range(t * ROWS_PER_TASK, min((t + 1) * ROWS_PER_TASK, args[14])):
            out = f32p(args[11] + r * ld * 4)
            for j in range(r * k, r * k + k):
                p = np.int64(position[j])
                if p < lo or p >= hi:
                    continue
                y = f32p(args[3] + (p - lo) * width * 4)
                weight = f32p(args[7])[j] if args[7] != 0 else _ONE
                if args[4] != 0:
                    b = f32p(args[4] + np.int64(ids[j]) * width * 4)
                    for i in range(width):
                        out[i] = fma(weight, y[i] + b[i], out[i])
                else:
                    for i in range(width):
                        out[i] = fma(weight, y[i], out[i])
