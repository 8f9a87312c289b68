"""Matrix registers: the sums are taken in the order that the processor's manual writes, whatever the length."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tithe.quant import HAS_AMX, pack_dense

needs_amx = pytest.mark.skipif(
    not HAS_AMX, reason="this processor has no matrix registers for bf16, or Linux keeps them"
)


def by_the_manual(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """float32 [M, N] of x [M, K], w [N, K]: chains over 16 even and 16 odd elements, added, added to the sum.

    In float64 a product of bf16 numbers is exact, and a sum of it with a float32 is rounded to float32 once more.
    """
    total = np.zeros((len(x), len(w)), np.float32)
    for begin in range(0, x.shape[1], 32):
        chains = []
        for first in (begin, begin + 1):
            chain = np.zeros_like(total)
            for k in range(first, min(begin + 32, x.shape[1]), 2):
                exact = x[:, k, None].astype(np.float64) * w[None, :, k]
                chain = (exact + chain).astype(np.float32)
            chains.append(chain)
        total = total + (chains[0] + chains[1])
    return total


@needs_amx
@pytest.mark.parametrize("columns", [2, 8, 32, 34, 96, 126])
def test_a_product_has_the_bits_of_the_manual(columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    x, w = (torch.randn(n, columns, generator=generator).bfloat16() for n in (51, 50))
    out = pack_dense(w.float()).matmul(x)
    assert np.array_equal(out.numpy(), by_the_manual(x.float().numpy(), w.float().numpy()))
