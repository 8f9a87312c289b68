"""Plain quantizers of llama.cpp's Q4_K and Q6_K, which the `gguf` package reads and does not write."""

from __future__ import annotations

import numpy as np


def quantize_q4_k(w: np.ndarray) -> np.ndarray:
    """float32 [N, K] → uint8 [N, K/256·144]: w ≈ d·s·q − dmin·m by 32, s and m six bits."""
    blocks = w.reshape(-1, 8, 32)
    low = np.minimum(blocks.min(axis=2), 0)
    step = (blocks.max(axis=2) - low) / 15
    d, dmin = ((x.max(axis=1) / 63).astype(np.float16) for x in (step, -low))
    s, m = (_ratio(x, unit, 0, 63) for x, unit in ((step, d), (-low, dmin)))
    shift = m.astype(np.float32) * dmin.astype(np.float32)[:, None]
    scale = s.astype(np.float32) * d.astype(np.float32)[:, None]
    q = np.clip(np.rint((blocks + shift[..., None]) / np.maximum(scale, 1e-12)[..., None]), 0, 15).astype(np.uint8)
    packed = np.zeros((len(blocks), 12), np.uint8)
    packed[:, :4] = s[:, :4] | s[:, 4:] >> 4 << 6
    packed[:, 4:8] = m[:, :4] | m[:, 4:] >> 4 << 6
    packed[:, 8:] = (s[:, 4:] & 15) | (m[:, 4:] & 15) << 4
    runs = q.reshape(-1, 4, 2, 32)
    nibbles = (runs[:, :, 0] | runs[:, :, 1] << 4).reshape(-1, 128)
    return np.concatenate([_bytes(d), _bytes(dmin), packed, nibbles], axis=1).reshape(len(w), -1)


def quantize_q6_k(w: np.ndarray) -> np.ndarray:
    """float32 [N, K] → uint8 [N, K/256·210]: w ≈ d·s·(q − 32) by 16, s eight bits with sign."""
    blocks = w.reshape(-1, 16, 16)
    step = np.abs(blocks).max(axis=2) / 31
    d = (step.max(axis=1) / 127).astype(np.float16)
    s = _ratio(step, d, 0, 127)
    scale = s.astype(np.float32) * d.astype(np.float32)[:, None]
    q = np.clip(np.rint(blocks / np.maximum(scale, 1e-12)[..., None]), -32, 31).astype(np.int64) + 32
    halves = q.reshape(-1, 2, 4, 32)  # weights l, 32 + l, 64 + l and 96 + l of each half
    low, high = halves & 15, halves >> 4
    nibbles = np.concatenate([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], axis=2)
    two_bits = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    fields = [x.reshape(len(blocks), -1).astype(np.uint8) for x in (nibbles, two_bits, s)]
    return np.concatenate([*fields, _bytes(d)], axis=1).reshape(len(w), -1)


def _ratio(x: np.ndarray, unit: np.ndarray, least: int, most: int) -> np.ndarray:
    """The nearest whole multiples of `unit`."""
    return np.clip(np.rint(x / np.maximum(unit.astype(np.float32), 1e-12)[:, None]), least, most).astype(np.uint8)


def _bytes(halves: np.ndarray) -> np.ndarray:
    return halves.reshape(-1, 1).view(np.uint8)
