"""Triton's grouped products against the reference W̃: in its interpreter, or on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is made for Linux only: pip install -e '.[gpu]'")


from tithe.quant.reference import round_to_bf16
from tithe.quant.triton import PublishedBank, RowBlocks, grouped_input_gradient, grouped_product
from unit.quant.published import Published, publish

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
E, N, K = 5, 100, 160
"""Neither N nor K fills the last tile."""
COUNTS = {
    "mixed": (3, 0, 70, 1, 8),
    "one expert": (0, 0, 29, 0, 0),
    "one row each": (1, 1, 1, 1, 1),
    "whole blocks": (64, 0, 128, 0, 64),
}
each_kind = pytest.mark.parametrize("kind", ["INT4_PACKED", "INT4_PACKED-128", "MXFP4", "Q4_1"])
each_count = pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)


@pytest.fixture(scope="module", autouse=True)
def _interpreted_without_a_gpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
        yield


def width(kind: str) -> int:
    return 384 if kind.endswith("128") else K


def experts(kind: str, rows: int = N, *, extreme: bool = False) -> list[Published]:
    return [publish(kind, rows, width(kind), seed=e, extreme=extreme) for e in range(E)]


def bank_of(each: Sequence[Published]) -> PublishedBank:
    bank = PublishedBank.allocate(each[0].stored, len(each), *each[0].shape, DEVICE)
    for e, expert in enumerate(each):
        bank.put(e, expert.parts)
    return bank


def weights(expert: Published) -> Tensor:
    """W̃ [N, K], float32 that holds bf16."""
    return torch.from_numpy(round_to_bf16(expert.values()))


def blocks_of(counts: Sequence[int]) -> RowBlocks:
    end = torch.tensor(counts).cumsum(0)
    return RowBlocks.of_ranges((end - torch.tensor(counts)).to(DEVICE), end.to(DEVICE), sum(counts))


def operand(rows: int, columns: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()


def both(bank: PublishedBank, x: Tensor, dy: Tensor, blocks: RowBlocks, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """y and dx; rows of no block stay NaN."""
    y, dx = (torch.full((len(x), n), torch.nan, dtype=dtype, device=DEVICE) for n in (bank.rows, bank.columns))
    grouped_product(bank, x.to(DEVICE), blocks, y)
    grouped_input_gradient(bank, dy.to(DEVICE), blocks, dx)
    return y.cpu(), dx.cpu()


def close(given: Tensor, x: Tensor, w: Tensor) -> bool:
    """Within what any order of float32 sums may differ from x·w: n·2⁻²⁴·|x|·|w|; four times that on a GPU, whose
    tensor cores cut off what they add instead of rounding it."""
    bound = x.shape[1] * (2.0**-22 if DEVICE.type == "cuda" else 2.0**-24)
    x, w = x.double(), w.double()
    return bool(((given.double() - x @ w).abs() <= bound * (x.abs() @ w.abs())).all())


@each_count
@each_kind
def test_products_and_input_gradients_are_the_references(kind: str, counts: Sequence[int]) -> None:
    each = experts(kind)
    x, dy = operand(sum(counts), width(kind)), operand(sum(counts), N, 2)
    y, dx = both(bank_of(each), x, dy, blocks_of(counts), torch.float32)
    for expert, mine in zip(each, np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1]), strict=True):
        assert close(y[mine], x[mine], weights(expert).T)
        assert close(dx[mine], dy[mine], weights(expert))


@pytest.mark.parametrize("extreme", [False, True])
@each_kind
def test_what_it_multiplies_by_is_the_references_bit_for_bit(kind: str, extreme: bool) -> None:
    """Identity rows: every output is one weight, times one, and zeros."""
    each = experts(kind, extreme=extreme)
    rows = max(N, width(kind))
    counts = (0, 0, rows, 0, 0)
    y, dx = both(
        bank_of(each),
        torch.eye(rows, width(kind)).bfloat16(),
        torch.eye(rows, N).bfloat16(),
        blocks_of(counts),
        torch.float32,
    )
    assert torch.equal(y[: width(kind)], weights(each[2]).T)
    assert torch.equal(dx[:N], weights(each[2]))


@each_kind
def test_a_rows_bits_do_not_depend_on_the_rows_around_it(kind: str) -> None:
    """Alone, with others before it in its block, in a second block, and beside other experts."""
    bank = bank_of(experts(kind))
    x, dy = operand(80, width(kind)), operand(80, N, 2)
    together = both(bank, x, dy, blocks_of((7, 0, 70, 3, 0)), torch.float32)
    for row, expert in ((0, 0), (6, 0), (40, 2), (76, 2)):
        mine = slice(row, row + 1)
        alone = both(bank, x[mine], dy[mine], blocks_of([int(e == expert) for e in range(E)]), torch.float32)
        for part, whole in zip(alone, together, strict=True):
            assert torch.equal(part[0], whole[row])


def test_no_configuration_changes_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what tuning finds fastest on one rank or one day is the same policy."""
    from tithe.quant.triton import kernels

    bank, blocks = bank_of(experts("INT4_PACKED")), blocks_of((3, 0, 4, 0, 0))
    x, dy = operand(7, K), operand(7, N, 2)
    results = []
    for config in kernels.CONFIGS:
        monkeypatch.setattr(kernels, "CONFIGS", [config])
        monkeypatch.setattr(kernels.tuned_product, "configs", [config])
        monkeypatch.setattr(kernels.tuned_input_gradient, "configs", [config])
        results.append(both(bank, x, dy, blocks, torch.float32))
    assert len(results) > 1
    for result in results:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


def test_a_narrow_output_is_the_wide_one_rounded_once() -> None:
    bank, blocks = bank_of(experts("Q4_1")), blocks_of((3, 0, 20, 0, 0))
    x, dy = operand(23, K), operand(23, N, 2)
    wide, narrow = (both(bank, x, dy, blocks, dtype) for dtype in (torch.float32, torch.bfloat16))
    for a, b in zip(wide, narrow, strict=True):
        assert torch.equal(a.bfloat16(), b)


def test_rows_of_no_expert_are_left_alone() -> None:
    bank = bank_of(experts("MXFP4"))
    begin = torch.tensor([2, 4, 4, 4, 10], device=DEVICE)
    blocks = RowBlocks.of_ranges(begin, begin + torch.tensor([1, 0, 0, 2, 3], device=DEVICE), 16)
    for part in both(bank, operand(16, K), operand(16, N), blocks, torch.float32):
        written = ~part.isnan().any(dim=1)
        assert written.nonzero().flatten().tolist() == [2, 4, 5, 10, 11, 12]


def test_rows_may_lie_apart() -> None:
    bank, blocks = bank_of(experts("MXFP4")), blocks_of(COUNTS["mixed"])
    x = operand(82, 2 * K)
    out = torch.full((82, 2 * N), 7.0, device=DEVICE)
    grouped_product(bank, x.to(DEVICE)[:, :K], blocks, out[:, :N])
    expected = torch.empty(82, N, device=DEVICE)
    grouped_product(bank, x[:, :K].contiguous().to(DEVICE), blocks, expected)
    assert torch.equal(out[:, :N], expected)
    assert (out[:, N:] == 7.0).all()


def test_no_rows_are_no_launch() -> None:
    bank, out = bank_of(experts("MXFP4")), torch.empty(0, N, device=DEVICE)
    grouped_product(bank, operand(0, K).to(DEVICE), blocks_of((0, 0, 0, 0, 0)), out)
    assert out.shape == (0, N)


@each_kind
def test_a_bank_takes_the_bytes_of_its_checkpoint(kind: str) -> None:
    each = experts(kind)
    bank = bank_of(each)
    assert len(bank) == E
    assert bank.n_bytes == sum(expert.n_bytes for expert in each)
