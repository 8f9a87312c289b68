"""Grouped products: every row gets the bits of its own matrix alone, whatever the grouping."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from tithe.quant import HAS_BF16_DOT, PackedMatrix, pack_dense, pack_int4, pack_int8, set_threads, stack
from tithe.quant.grouped import (
    Groups,
    GroupTable,
    PanelScratch,
    outer,
    outer_scratch,
    product,
    product_scratch,
    transposed_product,
    transposed_scratch,
    turn,
    turned_columns,
)
from tithe.quant.reference import quantize_int4, quantize_int8
from unit.quant.published import FORMATS, publish

E, N, K = 5, 100, 96
COUNTS = {
    "mixed": (3, 0, 17, 1, 8),
    "one group": (0, 0, 29, 0, 0),
    "one row each": (1, 1, 1, 1, 1),
    "nothing": (0, 0, 0, 0, 0),
    "many rows": (0, 300, 0, 11, 600),
}
needs_dot = pytest.mark.skipif(not HAS_BF16_DOT, reason="this processor has no bf16 dot product")
each_kernel = pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *(pytest.param(kind, torch.bfloat16, marks=needs_dot, id=f"{kind}-dot") for kind in ("int4", "int8", "bf16")),
        *(pytest.param(k, torch.float32, id=f"{k}-fma") for k in ("int4", "int8", "bf16", "fp32", "int4-exact")),
    ],
)
each_count = pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)


def matrix(kind: str, seed: int, rows: int = N, columns: int = K) -> PackedMatrix:
    w = np.random.default_rng([seed, rows, columns]).normal(0, 0.1, (rows, columns)).astype(np.float32)
    if kind.startswith("int4"):
        g = quantize_int4(w)
        assert g.zero is not None
        return pack_int4(g.q, g.scale, g.zero, rounded=kind == "int4")
    if kind == "int8":
        g = quantize_int8(w)
        return pack_int8(g.q, g.scale)
    return pack_dense(torch.from_numpy(w), rounded=kind == "bf16")


def matrices(kind: str, rows: int = N, columns: int = K) -> list[PackedMatrix]:
    return [matrix(kind, e, rows, columns) for e in range(E)]


def grouped(counts: Sequence[int]) -> Groups:
    end = np.cumsum(counts).astype(np.int64)
    groups = Groups(len(counts))
    groups.set(end - counts, end)
    return groups


def operand(rows: int, columns: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def scratch() -> PanelScratch:
    return PanelScratch(max(product_scratch(400, torch.float32), transposed_scratch(400, torch.float32)))


def own_rows(groups: Groups) -> list[tuple[int, int]]:
    """(group, row) of every row."""
    return [(e, r) for e in range(len(groups.begin)) for r in range(groups.begin[e], groups.end[e])]


# ------------------------------------------------------------------ products


@each_count
@each_kernel
def test_a_row_has_the_bits_of_its_matrix_alone(kind: str, dtype: torch.dtype, counts: Sequence[int]) -> None:
    each, groups = matrices(kind), grouped(counts)
    x = operand(sum(counts), K, dtype)
    out = torch.full((sum(counts), N), torch.nan)
    product(GroupTable.of_bank(stack(each)), x, out, groups, scratch()).run()
    for e, r in own_rows(groups):
        assert torch.equal(out[r], each[e].matmul(x[r : r + 1])[0])


@each_count
@each_kernel
def test_input_gradients_have_the_bits_of_the_transposed_matrix_alone(
    kind: str, dtype: torch.dtype, counts: Sequence[int]
) -> None:
    each, groups = matrices(kind), grouped(counts)
    dy = operand(sum(counts), N, dtype)
    out = torch.full((sum(counts), K), torch.nan)
    transposed_product(GroupTable.of_bank(stack(each)), dy, out, groups, scratch()).run()
    for e, r in own_rows(groups):
        buffer = torch.empty(each[e].transposed_numel, dtype=dtype)
        assert torch.equal(out[r], each[e].transposed(buffer).matmul(dy[r : r + 1])[0])


@pytest.mark.parametrize("shape", [(2, 2), (6, 32), (48, 48), (50, 128), (96, 160), (146, 224)])
@each_kernel
def test_any_width(kind: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    rows, columns = shape
    if kind.startswith("int"):
        columns = -(-columns // 32) * 32
    each, groups = matrices(kind, rows, columns), grouped((2, 9, 0, 1, 4))
    x, dy = operand(16, columns, dtype), operand(16, rows, dtype)
    y, dx = torch.empty(16, rows), torch.empty(16, columns)
    table = GroupTable.of_matrices(each)
    product(table, x, y, groups, scratch()).run()
    transposed_product(table, dy, dx, groups, scratch()).run()
    for e, r in own_rows(groups):
        w = each[e].expand(torch.float32)
        torch.testing.assert_close(y[r], x[r].float() @ w.T, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(dx[r], dy[r].float() @ w, rtol=1e-5, atol=1e-5)


@each_kernel
def test_adding_is_the_products_own(kind: str, dtype: torch.dtype) -> None:
    each, groups = matrices(kind), grouped((4, 0, 10, 1, 1))
    x, before = operand(16, K, dtype), torch.randn(16, N)
    out = before.clone()
    product(GroupTable.of_matrices(each), x, out, groups, scratch(), add=True, factor=0.3).run()
    for e, r in own_rows(groups):
        expected = before[r : r + 1].clone()
        each[e].matmul(x[r : r + 1], expected, add=True, factor=0.3)
        assert torch.equal(out[r], expected[0])


@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=needs_dot), torch.float32])
@pytest.mark.parametrize("rank", [2, 6, 16, 48, 50])
def test_low_rank_matrices_share_panels(rank: int, dtype: torch.dtype) -> None:
    """Many small matrices one below the other: the bytes of one tall matrix, the bits of each alone."""
    each = [torch.randn(rank, K, generator=torch.Generator().manual_seed(e)) for e in range(E)]
    rounded = dtype == torch.bfloat16
    table = GroupTable.of_rows(pack_dense(torch.cat(each), rounded=rounded), E)
    groups = grouped((3, 0, 17, 1, 8))
    x, du = operand(29, K, dtype), operand(29, rank, dtype)
    u, dx = torch.empty(29, rank, dtype=dtype), torch.zeros(29, K)
    product(table, x, u, groups, scratch()).run()
    transposed_product(table, du, dx, groups, scratch(), add=True, factor=2.0).run()
    for e, r in own_rows(groups):
        alone = pack_dense(each[e], rounded=rounded)
        expected = torch.empty(1, rank, dtype=dtype)
        alone.matmul(x[r : r + 1], expected)
        assert torch.equal(u[r], expected[0])
        buffer = torch.empty(alone.transposed_numel, dtype=dtype)
        share = alone.transposed(buffer).matmul(du[r : r + 1], torch.zeros(1, K), add=True, factor=2.0)
        assert torch.equal(dx[r], share[0])


def test_one_matrix_can_serve_all_groups() -> None:
    shared, groups = matrix("fp32", 0), grouped((3, 0, 17, 1, 8))
    x, out = operand(29, K, torch.float32), torch.empty(29, N)
    product(GroupTable.repeated(shared, E), x, out, groups, scratch()).run()
    assert torch.equal(out, shared.matmul(x))


def test_rounded_outputs_hold_what_bf16_outputs_hold() -> None:
    each, groups = matrices("bf16"), grouped((3, 0, 17, 1, 8))
    x = operand(29, K, torch.float32)
    narrow, wide = torch.empty(29, N, dtype=torch.bfloat16), torch.empty(29, N)
    table = GroupTable.of_matrices(each)
    product(table, x, narrow, groups, scratch()).run()
    product(table, x, wide, groups, scratch(), rounded_out=True).run()
    assert torch.equal(wide, narrow.float())


def test_rows_of_no_group_are_left_alone() -> None:
    groups = Groups(E)
    begin = np.array([2, 4, 4, 4, 10])
    groups.set(begin, begin + np.array([1, 0, 0, 2, 3]))
    x, out = operand(16, K, torch.float32), torch.full((16, N), 7.0)
    product(GroupTable.of_matrices(matrices("fp32")), x, out, groups, scratch()).run()
    mine = [r for _, r in own_rows(groups)]
    assert mine == [2, 4, 5, 10, 11, 12]
    assert (out[[r for r in range(16) if r not in mine]] == 7.0).all()


@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=needs_dot), torch.float32])
@pytest.mark.parametrize("name", FORMATS)
def test_every_published_format(name: str, dtype: torch.dtype) -> None:
    """A width of 512 holds the groups of all formats; 200 rows end within a panel and within a block of 128."""
    each = [publish(name, 200, 512, seed=e).pack(rounded=True) for e in range(3)]
    groups, table, place = grouped((9, 0, 2)), GroupTable.of_bank(stack(each)), scratch()
    x, dy = operand(11, 512, dtype), operand(11, 200, dtype)
    y, dx = torch.empty(11, 200), torch.empty(11, 512)
    product(table, x, y, groups, place).run()
    transposed_product(table, dy, dx, groups, place).run()
    for e, r in own_rows(groups):
        buffer = torch.empty(each[e].transposed_numel, dtype=dtype)
        assert torch.equal(y[r], each[e].matmul(x[r : r + 1])[0])
        assert torch.equal(dx[r], each[e].transposed(buffer).matmul(dy[r : r + 1])[0])


@pytest.mark.parametrize(("start", "stop"), [(0, 6), (6, 14), (14, 60), (50, 110)])
def test_a_part_of_the_rows_is_a_table_of_its_own(start: int, stop: int) -> None:
    each = [torch.randn(110, K, generator=torch.Generator().manual_seed(e)) for e in range(E)]
    whole = GroupTable.of_rows(pack_dense(torch.cat(each), rounded=False), E)
    groups, x = grouped((3, 0, 17, 1, 8)), operand(29, K, torch.float32)
    out, dx, dy = torch.empty(29, stop - start), torch.empty(29, K), operand(29, stop - start, torch.float32)
    product(whole.part(start, stop), x, out, groups, scratch()).run()
    transposed_product(whole.part(start, stop), dy, dx, groups, scratch()).run()
    for e, r in own_rows(groups):
        alone = pack_dense(each[e][start:stop], rounded=False)
        assert torch.equal(out[r], alone.matmul(x[r : r + 1])[0])
        assert torch.equal(dx[r], alone.transposed(torch.empty(alone.transposed_numel)).matmul(dy[r : r + 1])[0])


# ------------------------------------------------------------------ weight gradients


@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=needs_dot), torch.float32])
@each_count
def test_weight_gradients_are_sums_over_each_groups_rows(counts: Sequence[int], dtype: torch.dtype) -> None:
    groups, total, rank, width = grouped(counts), sum(counts), 6, 100
    a, x = operand(total, rank, dtype, 2), operand(total, width, dtype, 3)
    weights = torch.rand(total, generator=torch.Generator().manual_seed(4))
    turned = torch.full((rank, turned_columns(total, E)), torch.nan, dtype=dtype)
    before = torch.randn(E, rank, width)
    out = before.clone()
    place = PanelScratch(outer_scratch(dtype))
    turn(a, turned, groups, weights=weights).run()
    outer(turned, x, out, groups, place, factor=0.5).run()
    scaled = (a.float() * weights[:, None]).to(dtype).double()
    for e in range(E):
        rows = slice(groups.begin[e], groups.end[e])
        expected = before[e] + 0.5 * scaled[rows].T @ x[rows].double()
        torch.testing.assert_close(out[e].double(), expected, rtol=1e-5, atol=2e-5)


def test_one_group_of_all_rows_sums_them_all() -> None:
    a, x = operand(300, 4, torch.float32, 2), operand(300, 10, torch.float32, 3)
    groups, out, turned = Groups.whole(300), torch.zeros(1, 4, 10), torch.empty(4, turned_columns(300, 1))
    turn(a, turned, groups).run()
    outer(turned, x, out, groups, scratch()).run()
    torch.testing.assert_close(out[0].double(), a.T.double() @ x.double(), rtol=1e-5, atol=2e-5)


# ------------------------------------------------------------------ threads, refusals


@each_kernel
def test_threads_change_nothing(kind: str, dtype: torch.dtype) -> None:
    each, groups = matrices(kind), grouped(COUNTS["many rows"])
    x, dy = operand(911, K, dtype), operand(911, N, dtype)
    results = []
    for threads in (1, 2):
        set_threads(threads)
        y, dx, dw = torch.empty(911, N), torch.empty(911, K), torch.zeros(E, N, K)
        turned = torch.empty(N, turned_columns(911, E), dtype=dtype)
        table = GroupTable.of_bank(stack(each))
        product(table, x, y, groups, scratch()).run()
        transposed_product(table, dy, dx, groups, scratch()).run()
        turn(dy, turned, groups).run()
        outer(turned, x, dw, groups, scratch()).run()
        results.append((y, dx, dw))
    set_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_what_would_be_read_wrongly_is_refused() -> None:
    table, groups = GroupTable.of_matrices(matrices("fp32")), grouped((4, 0, 0, 0, 0))
    x, out = torch.zeros(4, K), torch.zeros(4, N)
    with pytest.raises(ValueError, match="do not fit a product"):
        product(table, x[:, :-2], out, groups, scratch())
    with pytest.raises(ValueError, match="do not fit a product"):
        product(table, x, out[:3], groups, scratch())
    with pytest.raises(ValueError, match="bf16 operands"):
        product(table, x.bfloat16(), out, groups, scratch())
    with pytest.raises(ValueError, match="added to"):
        product(table, x, out.bfloat16(), groups, scratch(), add=True)
    with pytest.raises(ValueError, match="scratch"):
        product(table, x, out, groups, PanelScratch(100))
    with pytest.raises(ValueError, match="adjacent"):
        product(table, torch.zeros(4, 2 * K)[:, ::2], out, groups, scratch())
    with pytest.raises(ValueError, match="in pairs"):
        transposed_product(
            GroupTable.of_matrices(matrices("fp32", 3, 4)), torch.zeros(4, 3), torch.zeros(4, 4), groups, scratch()
        )
    with pytest.raises(ValueError, match="one shape"):
        GroupTable.of_matrices([matrix("fp32", 0), matrix("fp32", 0, 50)])
    with pytest.raises(ValueError, match="cannot be taken"):
        table.part(90, N + 2)
    with pytest.raises(ValueError, match="cannot be taken"):
        GroupTable.of_matrices(matrices("int4")).part(0, 4)
    with pytest.raises(ValueError, match="one height"):
        GroupTable.of_rows(matrix("fp32", 0, 7), 2)
