"""Elements as they lie in a file → panels, without an unpacked copy in between. Layouts: `tithe.quant.kinds`.

Nibbles go through one panel's rows in a common order first, byte p holding k = 2p low and 2p + 1 high.
Argument order of every kernel is written above it; one task a panel, rows beyond the last stay zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from tithe.quant.runtime import kernel, next_slot, next_task, u8p, u32p

IN_ORDER, IN_RUNS, BY_WORD, BY_OUTPUT = range(4)
"""Where a file keeps nibbles: as here; runs of low nibbles before high ones, in blocks; GPTQ; AWQ."""


@njit
def _from_runs(row: Any, blocks: Any, block: Any, offset: Any, run: Any, runs: Any, out: Any) -> None:
    """GGUF: each run of bytes holds `run` weights in its low nibbles, then as many in its high ones."""
    half = run // 2
    for b in range(blocks):
        for r in range(runs):
            q, o = u8p(row + b * block + offset + r * run), u8p(out + (b * runs + r) * run)
            for j in range(half):
                first, second = np.uint32(q[2 * j]), np.uint32(q[2 * j + 1])
                o[j] = np.uint8((first & np.uint32(15)) | (second << np.uint32(4)))
                o[half + j] = np.uint8((first >> np.uint32(4)) | (second & np.uint32(240)))


@njit
def _rows_in_order(args: Any, t: Any, width: Any, steps: Any, out: Any) -> None:
    """The `width` rows of panel t in common order, `steps` bytes each."""
    source, stride, form = args[3], args[4], args[7]
    for n in range(width):
        row, o = source + (t * 48 + n) * stride, u8p(out + n * steps)
        if form == IN_ORDER:
            q = u8p(row)
            for p in range(steps):
                o[p] = q[p]
        elif form == IN_RUNS:
            blocks = steps // (args[10] * args[11])
            _from_runs(row, blocks, args[8], args[9], args[10], args[11], out + n * steps)
        elif form == BY_WORD:  # `stride` is that of eight inputs; a word holds them for one output
            for p in range(steps):
                o[p] = u8p(source + p // 4 * stride + (t * 48 + n) * 4)[p % 4]
        else:  # `stride` is that of one input; a word holds eight outputs: 0, 2, 4, 6, 1, 3, 5, 7
            word, output = (t * 48 + n) // 8, n % 8
            shift = np.uint32(4 * (output // 2 + output % 2 * 4))
            for p in range(steps):
                low = u32p(source + 2 * p * stride)[word] >> shift
                high = u32p(source + (2 * p + 1) * stride)[word] >> shift
                o[p] = np.uint8((low & np.uint32(15)) | ((high & np.uint32(15)) << np.uint32(4)))


# source, stride (bytes of a row), rows, steps, form, block, offset, run, runs (GGUF), data, scratch, scratch stride
@kernel
def repack_nibbles(args: Any) -> None:
    """Any 4-bit elements: the rows of a panel in common order, then into its half registers."""
    rows, steps = args[5], args[6]
    scratch = args[13] + next_slot(args) * args[14]
    while True:
        t = next_task(args)
        if t >= args[1]:
            break
        width = min(48, rows - t * 48)
        _rows_in_order(args, t, width, steps, scratch)
        for n in range(width * steps, 48 * steps):
            u8p(scratch)[n] = np.uint8(0)
        for v in range(3):
            for i in range(8):
                low, high = u8p(scratch + (v * 16 + i) * steps), u8p(scratch + (v * 16 + 8 + i) * steps)
                o = u8p(args[12] + t * steps * 48 + v * 16 + 2 * i)
                for p in range(steps):
                    a, b = np.uint32(low[p]), np.uint32(high[p])
                    o[p * 48] = np.uint8((a & np.uint32(15)) | (b << np.uint32(4)))
                    o[p * 48 + 1] = np.uint8((a >> np.uint32(4)) | (b & np.uint32(240)))


# source, stride, rows, steps, block, offset (bytes), weights in a block, data, bad (uint8 by panel; 0: unchecked)
@kernel
def repack_bytes(args: Any) -> None:
    """Byte elements, of a whole row or in blocks behind their scale; `bad` marks panels with a NaN in E4M3."""
    rows, steps, run = args[5], args[6], args[9]
    while True:
        t = next_task(args)
        if t >= args[1]:
            break
        o = u8p(args[10] + t * steps * 96)
        nan = np.uint8(0)
        for n in range(min(48, rows - t * 48)):
            row = args[3] + (t * 48 + n) * args[4] + args[8]
            for b in range(2 * steps // run):
                q = u8p(row + b * args[7])
                for k in range(run):
                    code = q[k]
                    p = (b * run + k) // 2
                    o[(p * 48 + n) * 2 + k % 2] = code
                    nan |= np.uint8((code & np.uint8(127)) == np.uint8(127))
        if args[11] != 0:
            u8p(args[11])[t] = nan


# source, stride, rows, super-blocks in a row, data (zero)
@kernel
def repack_six(args: Any) -> None:
    """Q6_K: of each half of a block's 256 weights, 64 bytes of nibbles and 32 of high bits (see `kquants`)."""
    rows, blocks = args[5], args[6]
    while True:
        t = next_task(args)
        if t >= args[1]:
            break
        panel = args[7] + t * blocks * 48 * 192
        for n in range(min(48, rows - t * 48)):
            for b in range(blocks):
                block = args[3] + (t * 48 + n) * args[4] + b * 210
                for k in range(256):
                    half, j = k // 128, k % 128
                    nibble = (np.uint32(u8p(block)[half * 64 + j % 64]) >> np.uint32(j // 64 * 4)) & np.uint32(15)
                    top = (np.uint32(u8p(block)[128 + half * 32 + j % 32]) >> np.uint32(j // 32 * 2)) & np.uint32(3)
                    pair, i = b * 128 + k // 2, 2 * n + k % 2
                    h, at = i // 16, pair % 2 * 6 + i // 16
                    two = u8p(panel + pair // 2 * 144)
                    low, high = pair % 2 * 48 + h // 2 * 16 + i % 16, 96 + at // 4 * 16 + i % 16
                    two[low] = np.uint8(two[low] | np.uint8(nibble << np.uint32(h % 2 * 4)))
                    two[high] = np.uint8(two[high] | np.uint8(top << np.uint32(at % 4 * 2)))
