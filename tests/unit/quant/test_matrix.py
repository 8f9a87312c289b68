"""Packed matrices: W̃ is what is written, per format and kernel, and every row is its own.

A case is a storage kind with the W̃ that its definition gives (`tithe.quant.reference`), at widths that fill panels of
48 and at widths that do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from tithe.quant import HAS_BF16_DOT, PackedMatrix, pack_dense, pack_int4, pack_int8, set_threads
from tithe.quant.formats import GroupedIntegers
from tithe.quant.matrix import pack_transposed, set_product_rows, transposed_numel
from tithe.quant.reference import round_to_bf16

KINDS = ("int4", "int8", "bf16", "fp32", "int4-exact", "int8-exact")
"""Storage; `-exact` is not rounded to bf16."""
SHAPES = ((96, 64), (100, 64), (7, 96))
OPERANDS = (torch.bfloat16, torch.float32)
needs_dot = pytest.mark.skipif(not HAS_BF16_DOT, reason="this processor has no bf16 dot product")
each_kind = pytest.mark.parametrize("kind", KINDS)
# bf16 operands choose the dot product, float32 operands the fused multiply-add; an exact W̃ has only the latter
each_kernel = pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *(pytest.param(kind, torch.bfloat16, marks=needs_dot, id=f"{kind}-dot") for kind in ("int4", "int8", "bf16")),
        *(pytest.param(kind, torch.float32, id=f"{kind}-fma") for kind in KINDS),
    ],
)


@dataclass(frozen=True)
class Case:
    packed: PackedMatrix
    w: Tensor
    """float32 [N, K]: W̃ by its definition."""


def case(kind: str, rows: int, columns: int, seed: int = 0) -> Case:
    rng = np.random.default_rng([seed, rows, columns])
    rounded = not kind.endswith("-exact")
    scale = (rng.random((rows, columns // 32)) * 0.01 + 1e-4).astype(np.float16)
    if kind.startswith("int4"):
        zero = (-rng.random(scale.shape) * 0.1).astype(np.float16)
        integers = GroupedIntegers(rng.integers(0, 16, (rows, columns)).astype(np.uint8), scale, zero)
        packed = pack_int4(integers.q, scale, zero, rounded=rounded)
    elif kind.startswith("int8"):
        integers = GroupedIntegers(rng.integers(-128, 128, (rows, columns)).astype(np.int8), scale, None)
        packed = pack_int8(integers.q, scale, rounded=rounded)
    else:
        w = torch.from_numpy(rng.normal(0, 0.05, (rows, columns)).astype(np.float32))
        w = w.bfloat16().float() if kind == "bf16" else w
        return Case(pack_dense(w, rounded=kind == "bf16"), w)
    values = integers.values()
    return Case(packed, torch.from_numpy(round_to_bf16(values) if rounded else values))


def operand(rows: int, columns: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ------------------------------------------------------------------ W̃


@pytest.mark.parametrize("shape", SHAPES)
@each_kernel
def test_identity_input_extracts_the_written_weights(kind: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    c = case(kind, *shape)
    product = c.packed.matmul(torch.eye(shape[1], dtype=dtype))
    assert torch.equal(product.T, c.w)


@pytest.mark.parametrize("shape", SHAPES)
@each_kind
def test_expand_and_gather_give_the_written_weights(kind: str, shape: tuple[int, int]) -> None:
    c = case(kind, *shape)
    assert torch.equal(c.packed.expand(torch.float32), c.w)
    assert torch.equal(c.packed.expand(torch.bfloat16), c.w.bfloat16())
    ids = torch.tensor([shape[0] - 1, 0, 3, 3], dtype=torch.int32)
    assert torch.equal(c.packed.gather(ids), c.w[ids.long()])


def test_expand_fills_a_given_output() -> None:
    c = case("int4", 100, 64)
    out = torch.full((100, 64), float("nan"), dtype=torch.bfloat16)
    assert c.packed.expand(torch.bfloat16, out) is out
    assert torch.equal(out.float(), c.w)


# ------------------------------------------------------------------ the product


@pytest.mark.parametrize("shape", SHAPES)
@each_kernel
def test_product_is_within_float32_rounding_of_the_exact_one(
    kind: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    c = case(kind, *shape)
    x = operand(33, shape[1], dtype)
    exact = x.double() @ c.w.double().T
    bound = shape[1] * 2.0**-24 * (x.double().abs() @ c.w.double().abs().T)
    assert ((c.packed.matmul(x).double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("rows", [96, 100])
@each_kernel
def test_a_row_does_not_depend_on_the_rows_beside_it(kind: str, dtype: torch.dtype, rows: int) -> None:
    c = case(kind, rows, 64)
    x = operand(77, 64, dtype)
    every = c.packed.matmul(x)
    for m in (*range(1, 18), 64):
        assert torch.equal(c.packed.matmul(x[:m]), every[:m]), m
        assert torch.equal(c.packed.matmul(x[-m:]), every[-m:]), m
    shuffled = torch.randperm(77, generator=torch.Generator().manual_seed(2))
    assert torch.equal(c.packed.matmul(x[shuffled]), every[shuffled])


@pytest.mark.parametrize("packed_kind", ["int4", "int8", "int4-exact", "int8-exact"])
@pytest.mark.parametrize("rows", [96, 100])
def test_dequantized_storage_multiplies_to_the_same_bits(packed_kind: str, rows: int) -> None:
    c = case(packed_kind, rows, 64)
    dense = c.packed.dequantized()
    assert dense.name == ("bf16" if c.packed.rounded else "fp32")
    for dtype in OPERANDS:
        x = operand(19, 64, dtype)
        assert torch.equal(dense.matmul(x), c.packed.matmul(x))


def test_storage_that_is_dense_already_is_not_copied() -> None:
    for kind in ("bf16", "fp32"):
        packed = case(kind, 96, 64).packed
        assert packed.dequantized() is packed


@pytest.mark.parametrize("m", [1, 8, 11])
@pytest.mark.parametrize("rows", [96, 100])
@each_kernel
def test_add_is_one_fused_step_on_the_output(kind: str, dtype: torch.dtype, rows: int, m: int) -> None:
    """out + factor·(x·W̃ᵀ) rounded once: through float64, where product and sum of float32 are exact enough."""
    c = case(kind, rows, 64)
    x = operand(m, 64, dtype)
    start = operand(m, rows, torch.float32, seed=5)
    out = c.packed.matmul(x, start.clone(), add=True, factor=0.25)
    assert torch.equal(out, (start.double() + 0.25 * c.packed.matmul(x).double()).float())


@pytest.mark.parametrize("m", [1, 8, 11])
@each_kernel
def test_bf16_output_is_the_rounded_float32_output(kind: str, dtype: torch.dtype, m: int) -> None:
    for rows in (96, 100):
        c = case(kind, rows, 64)
        x = operand(m, 64, dtype)
        out = c.packed.matmul(x, torch.empty(m, rows, dtype=torch.bfloat16))
        assert torch.equal(out, c.packed.matmul(x).bfloat16())


@pytest.mark.parametrize("m", [1, 8, 11])
@each_kernel
def test_strided_rows_are_read_and_written_in_place(kind: str, dtype: torch.dtype, m: int) -> None:
    c = case(kind, 100, 64)
    wide_x, wide_out = operand(m, 96, dtype), torch.full((m, 130), 9.0)
    x, out = wide_x[:, 16:80], wide_out[:, 20:120]
    c.packed.product(x, out).run()
    assert torch.equal(out, c.packed.matmul(x.contiguous()))
    assert (wide_out[:, :20] == 9.0).all(), "nothing before the columns is touched"
    assert (wide_out[:, 120:] == 9.0).all(), "nothing after them either"


def test_matmul_takes_any_strides() -> None:
    c = case("int4", 100, 64)
    x = operand(9, 65, torch.bfloat16)[:, :64]
    assert x.stride(0) % 2, "rows that no pair of bf16 fits"
    assert torch.equal(c.packed.matmul(x), c.packed.matmul(x.contiguous()))
    transposed = operand(64, 9, torch.float32).T
    assert torch.equal(c.packed.matmul(transposed), c.packed.matmul(transposed.contiguous()))


def test_bf16_operands_never_round_an_exact_base() -> None:
    c = case("int4-exact", 96, 64)
    x = operand(9, 64, torch.bfloat16)
    assert torch.equal(c.packed.matmul(x), c.packed.matmul(x.float()))


def test_a_launch_reads_its_buffers_again_each_time() -> None:
    c = case("int4", 100, 64)
    x, out = operand(8, 64, torch.float32), torch.empty(8, 100)
    launch = c.packed.product(x, out)
    for seed in (2, 3):
        x.copy_(operand(8, 64, torch.float32, seed))
        launch.run()
        assert torch.equal(out, c.packed.matmul(x))


@each_kernel
def test_one_and_two_threads_give_the_same_bits(kind: str, dtype: torch.dtype) -> None:
    c = case(kind, 500, 64)
    x = operand(23, 64, dtype)
    results: list[Tensor] = []
    try:
        for threads in (1, 2):
            set_threads(threads)
            results += [c.packed.matmul(x), c.packed.expand(torch.float32), c.packed.expand(torch.bfloat16)]
            panels = torch.zeros(c.packed.transposed_numel, dtype=dtype)
            results.append(c.packed.transposed(panels).data)
    finally:
        set_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(results[:4], results[4:], strict=True))


@each_kernel
def test_a_launch_can_be_told_to_compute_its_first_rows_only(kind: str, dtype: torch.dtype) -> None:
    c = case(kind, 100, 64)
    x, out = operand(77, 64, dtype), torch.full((77, 100), 9.0)
    launch = c.packed.product(x, out)
    for rows in (5, 1, 40, 77, 16):
        out[:] = 9.0
        set_product_rows(launch.args, rows)
        launch.run()
        assert torch.equal(out[:rows], c.packed.matmul(x)[:rows])
        assert (out[rows:] == 9.0).all()


# ------------------------------------------------------------------ transposes, for gradients


@pytest.mark.parametrize("shape", [*SHAPES, (97, 32), (48, 96)])
@each_kind
def test_the_transpose_holds_the_same_weights(kind: str, shape: tuple[int, int]) -> None:
    """x·W̃ instead of x·W̃ᵀ; odd heights get a column of zeros, since columns are stored in pairs."""
    c = case(kind, *shape)
    for dtype in OPERANDS:
        buffer = torch.full((c.packed.transposed_numel,), float("nan"), dtype=dtype)
        transposed = c.packed.transposed(buffer)
        even = shape[0] + shape[0] % 2
        assert (transposed.rows, transposed.columns) == (shape[1], even)
        product = transposed.matmul(torch.eye(even))
        expected = torch.nn.functional.pad(c.w, (0, 0, 0, even - shape[0])).to(dtype).float()
        assert torch.equal(product, expected)


@pytest.mark.parametrize("dtype", OPERANDS)
@pytest.mark.parametrize("shape", [(1, 5), (7, 48), (8, 50), (33, 100)])
def test_panels_of_an_arrays_transpose_multiply_by_the_array(shape: tuple[int, int], dtype: torch.dtype) -> None:
    wide = operand(shape[0], shape[1] + 10, dtype)
    source = wide[:, 4 : 4 + shape[1]]
    packed = pack_transposed(source, torch.full((transposed_numel(*shape),), float("nan"), dtype=dtype))
    even = shape[0] + shape[0] % 2
    expected = torch.nn.functional.pad(source.float(), (0, 0, 0, even - shape[0]))
    assert torch.equal(packed.matmul(torch.eye(even)), expected)
    assert torch.equal(packed.matmul(torch.eye(even)), pack_transposed(source.T.contiguous().T).matmul(torch.eye(even)))


# ------------------------------------------------------------------ what is refused


def wrong_products() -> dict[str, Callable[[PackedMatrix], object]]:
    x, out = torch.zeros(4, 64), torch.zeros(4, 100)
    return {
        "columns": lambda p: p.product(torch.zeros(4, 32), out),
        "one dimension": lambda p: p.product(torch.zeros(64), out),
        "too few output rows": lambda p: p.product(x, torch.zeros(3, 100)),
        "too few output columns": lambda p: p.product(x, torch.zeros(4, 96)),
        "transposed x": lambda p: p.product(torch.zeros(64, 4).T, out),
        "transposed output": lambda p: p.product(x, torch.zeros(100, 4).T),
        "odd bf16 stride": lambda p: p.product(torch.zeros(4, 65, dtype=torch.bfloat16)[:, :64], out),
        "adding to bf16": lambda p: p.product(x, out.bfloat16(), add=True),
    }


@pytest.mark.parametrize("wrong", wrong_products())
def test_a_product_that_would_touch_wrong_memory_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"x has|out has|adjacent|bf16|float32"):
        wrong_products()[wrong](case("int4", 100, 64).packed)


def test_panels_that_do_not_fit_their_buffer_are_refused() -> None:
    packed = case("int4", 100, 64).packed
    for buffer in (torch.empty(packed.transposed_numel - 1), torch.empty(2 * packed.transposed_numel)[::2]):
        with pytest.raises(ValueError, match="adjacent entries of torch"):
            packed.transposed(buffer)
    with pytest.raises(ValueError, match=r"adjacent entries of torch\.float32"):
        pack_transposed(torch.zeros(4, 4), torch.empty(1000, dtype=torch.bfloat16))


def test_the_dot_product_of_an_exact_base_is_refused() -> None:
    x, out = torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(4, 100)
    for kind in ("fp32", "int4-exact", "int8-exact"):
        with pytest.raises(ValueError, match="rounded to bf16"):
            case(kind, 100, 64).packed.product(x, out)


def test_columns_that_are_no_whole_groups_are_refused() -> None:
    q, scale = np.zeros((4, 48), np.uint8), np.ones((4, 1), np.float16)
    with pytest.raises(ValueError, match="48 columns are no whole groups of 32"):
        pack_int4(q, scale, scale)
    with pytest.raises(ValueError, match="48 columns are no whole groups of 32"):
        pack_int8(q.astype(np.int8), scale)
    with pytest.raises(ValueError, match="pairs"):
        pack_dense(torch.zeros(4, 33))


def test_scales_of_another_matrix_are_refused() -> None:
    q, scale = np.zeros((4, 64), np.uint8), np.ones((4, 2), np.float16)
    with pytest.raises(ValueError, match=r"needs scales \(4, 2\)"):
        pack_int4(q, scale, scale[:3])
    with pytest.raises(ValueError, match=r"needs scales \(4, 2\)"):
        pack_int8(q.astype(np.int8), scale[:, :1])


def test_dense_storage_takes_any_even_width() -> None:
    for columns in (2, 10, 34):
        for rounded in (True, False):
            w = operand(50, columns, torch.bfloat16).float()
            packed = pack_dense(w, rounded=rounded)
            assert torch.equal(packed.matmul(torch.eye(columns)).T, w)
            if rounded and HAS_BF16_DOT:
                assert torch.equal(packed.matmul(torch.eye(columns, dtype=torch.bfloat16)).T, w)
            assert torch.equal(packed.expand(torch.float32), w)
            assert torch.equal(packed.expand(torch.bfloat16).float(), w)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_of_a_dense_matrix_are_its_rows(dtype: torch.dtype) -> None:
    whole = pack_dense(
        torch.randn(480, 64, generator=torch.Generator().manual_seed(0)), rounded=dtype == torch.bfloat16
    )
    w = whole.expand(torch.float32)
    for first, block in whole.blocks(3):
        assert torch.equal(block.expand(torch.float32), w[first : first + block.rows])
        x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
        assert torch.equal(block.matmul(x), whole.matmul(x)[:, first : first + block.rows])
        turned = block.transposed(torch.empty(block.transposed_numel, dtype=dtype))
        assert torch.equal(turned.expand(torch.float32), w[first : first + block.rows].T)
