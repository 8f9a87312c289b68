"""What the bytes of each quantized format mean, and the integers they hold.

A row of K weights is K/32 blocks one after the other; scales are IEEE half precision, little-endian:

| format | block, in order | weight j of the block |
|---|---|---|
| Q4_0 | scale d, 16 bytes | d · (q - 8), q in 0..15 |
| Q4_1 | scale d, minimum m, 16 bytes | d · q + m, q in 0..15 |
| Q8_0 | scale d, 32 signed bytes | d · q, q in -128..127 |

Bit order of the 16 bytes: the low nibble of byte j is weight j, its high nibble is weight j + 16. F16, BF16 and F32
hold one little-endian number per weight. d · q is exact in float32 (11 + 8 bits), so only the addition of m can round,
and a fused multiply-add gives the same value as two operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

GROUP_SIZE: Final = 32
"""Weights that share one scale, along the input dimension."""


@dataclass(frozen=True, eq=False)
class GroupedIntegers:
    """A matrix as integers with a scale per group: W[n, k] = q[n, k] · scale[n, g] + zero[n, g], g = k // group.

    Example: one row of one group, w = q · 0.5 - 4::

        GroupedIntegers(q=uint8 [1, 32], scale=float16 [[0.5]], zero=float16 [[-4.0]])
    """

    q: np.ndarray
    """uint8 [N, K] in 0..15 (4 bits with zeros), or int8 [N, K]: -8..7 (4 bits without) or -128..127."""
    scale: np.ndarray
    """float16 [N, K/group]."""
    zero: np.ndarray | None
    """float16 [N, K/group], the value of q = 0; `None` in symmetric formats."""

    @property
    def group(self) -> int:
        """Weights per scale."""
        return self.q.shape[1] // self.scale.shape[1]

    def values(self) -> np.ndarray:
        """float32 [N, K]: the exact weights, rounded once by the addition of `zero`."""
        grouped = self.q.reshape(*self.scale.shape, self.group).astype(np.float32)
        weights = grouped * self.scale.astype(np.float32)[..., None]
        if self.zero is not None:
            weights += self.zero.astype(np.float32)[..., None]
        return weights.reshape(self.q.shape)
