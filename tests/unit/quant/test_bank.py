"""A bank holds equal matrices in one storage and hands them out without copying."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tithe.quant import PackedBank, PackedMatrix, pack_dense, pack_int4, pack_int8, stack

ROWS, COLUMNS, EXPERTS = 100, 64, 3


def matrix(kind: str, seed: int, rows: int = ROWS, *, rounded: bool = True) -> PackedMatrix:
    rng = np.random.default_rng([seed, rows])
    scale = rng.random((rows, COLUMNS // 32)).astype(np.float16)
    if kind == "int4":
        q = rng.integers(0, 16, (rows, COLUMNS), dtype=np.uint8)
        return pack_int4(q, scale, -scale, rounded=rounded)
    if kind == "int8":
        return pack_int8(rng.integers(-128, 128, (rows, COLUMNS), dtype=np.int8), scale, rounded=rounded)
    return pack_dense(torch.from_numpy(rng.normal(size=(rows, COLUMNS)).astype(np.float32)), rounded=kind == "bf16")


each_kind = pytest.mark.parametrize("kind", ["int4", "int8", "bf16", "fp32"])


@each_kind
def test_every_expert_is_the_matrix_that_was_put_there(kind: str) -> None:
    experts = [matrix(kind, e) for e in range(EXPERTS)]
    bank = stack(experts)
    assert (len(bank), bank.name, bank.rows, bank.columns, bank.panels) == (EXPERTS, kind, ROWS, COLUMNS, 3)
    assert bank.n_bytes == sum(m.n_bytes for m in experts)
    for mine, theirs in zip(bank, experts, strict=True):
        assert torch.equal(mine.expand(torch.float32), theirs.expand(torch.float32))
        x = torch.randn(5, COLUMNS, generator=torch.Generator().manual_seed(1))
        assert torch.equal(mine.matmul(x), theirs.matmul(x))


@each_kind
def test_an_expert_is_a_view_at_its_stride(kind: str) -> None:
    bank = stack([matrix(kind, e) for e in range(EXPERTS)])
    kernels_kind, *addresses = bank.source()
    for e in range(EXPERTS):
        expected = [a + e * s for a, s in zip(addresses, bank.strides(), strict=True)]
        assert bank[e].source() == [kernels_kind, *expected]


@each_kind
def test_a_dequantized_bank_multiplies_to_the_same_bits(kind: str) -> None:
    bank = stack([matrix(kind, e) for e in range(EXPERTS)])
    dense = bank.dequantized()
    assert (dense is bank) == (kind in ("bf16", "fp32"))
    x = torch.randn(9, COLUMNS, generator=torch.Generator().manual_seed(1))
    for e in range(EXPERTS):
        assert torch.equal(dense[e].matmul(x), bank[e].matmul(x))


def test_a_bank_is_filled_expert_by_expert() -> None:
    experts = [matrix("int4", e) for e in range(EXPERTS)]
    bank = PackedBank.allocate(experts[0], EXPERTS)
    assert not bank[1].expand(torch.float32).any()
    bank.put(1, experts[1])
    assert torch.equal(bank[1].expand(torch.float32), experts[1].expand(torch.float32))
    assert not bank[0].expand(torch.float32).any()
    assert not bank[2].expand(torch.float32).any()


@pytest.mark.parametrize(
    "other",
    [matrix("int8", 0), matrix("int4", 0, rows=96), matrix("int4", 0, rounded=False)],
    ids=["kind", "shape", "rounding"],
)
def test_a_matrix_of_another_kind_is_refused(other: PackedMatrix) -> None:
    bank = PackedBank.allocate(matrix("int4", 0), 2)
    with pytest.raises(ValueError, match=r"expert 1 is .* the bank int4 100×64"):
        bank.put(1, other)


def test_indices_and_sizes_outside_are_refused() -> None:
    bank = PackedBank.allocate(matrix("int4", 0), 2)
    for e in (-1, 2):
        with pytest.raises(IndexError, match="of a bank of 2"):
            bank[e]
    with pytest.raises(ValueError, match="at least one"):
        PackedBank.allocate(bank[0], 0)
    with pytest.raises(ValueError, match="at least one"):
        stack([])
