"""Every published format keeps its bytes and multiplies by exactly the W̃ that its reference writes down."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tithe.arch import StoredFormat, TensorFormat
from tithe.errors import ModelError
from tithe.quant import HAS_BF16_DOT, stack
from tithe.quant.reference import round_to_bf16
from tithe.quant.reference_parts import E2M1, dequantize_parts, e4m3
from tithe.quant.repack import repack_parts
from unit.quant.published import BF16_MAX, FORMATS, Published, publish

each_format = pytest.mark.parametrize("name", FORMATS)
ROWS = {"GPTQ-32": 104, "GPTQ-64": 104, "GPTQ-128": 104, "AWQ-128": 104}
"""Rows that are no whole panels: 100, or the next whole word of eight."""
COLUMNS = 512
OPERANDS = [pytest.param(torch.float32, id="fma")]
if HAS_BF16_DOT:
    OPERANDS.append(pytest.param(torch.bfloat16, id="dot"))


def ragged(name: str, seed: int = 0, *, extreme: bool = False) -> Published:
    return publish(name, ROWS.get(name, 100), COLUMNS, seed, extreme=extreme)


def written(published: Published, *, rounded: bool) -> Tensor:
    values = published.values()
    return torch.from_numpy(round_to_bf16(values) if rounded else values)


# ------------------------------------------------------------------ W̃


@each_format
@pytest.mark.parametrize("extreme", [False, True])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), rounded=st.booleans())
def test_expand_and_gather_give_the_written_weights(name: str, extreme: bool, seed: int, rounded: bool) -> None:
    published = ragged(name, seed, extreme=extreme)
    packed, w = published.pack(rounded=rounded), written(published, rounded=rounded)
    assert torch.isfinite(w).all()
    assert torch.equal(packed.expand(torch.float32), w)
    assert torch.equal(packed.expand(torch.bfloat16), w.bfloat16())
    ids = torch.tensor([len(w) - 1, 0, 50, 50], dtype=torch.int32)
    assert torch.equal(packed.gather(ids), w[ids.long()])


@each_format
@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("dtype", OPERANDS)
def test_identity_input_extracts_the_written_weights(name: str, dtype: torch.dtype, extreme: bool) -> None:
    published = ragged(name, extreme=extreme)
    w = written(published, rounded=True)
    assert torch.equal(published.pack(rounded=True).matmul(torch.eye(COLUMNS, dtype=dtype)).T, w)
    if dtype == torch.float32:
        w = written(published, rounded=False)
        assert torch.equal(published.pack(rounded=False).matmul(torch.eye(COLUMNS)).T, w)


@each_format
def test_no_weight_is_subnormal(name: str) -> None:
    """The bf16 instructions would take it for zero; see `tithe.quant.kinds`."""
    values = np.abs(ragged(name, extreme=True).values())
    assert ((values == 0) | (values >= 2.0**-126)).all()


# ------------------------------------------------------------------ products and gradients


@each_format
@pytest.mark.parametrize("dtype", OPERANDS)
def test_packed_and_dequantized_storage_multiply_to_the_same_bits(name: str, dtype: torch.dtype) -> None:
    packed = ragged(name).pack(rounded=True)
    x = torch.randn(19, COLUMNS, generator=torch.Generator().manual_seed(1)).to(dtype)
    product = packed.matmul(x)
    assert torch.equal(packed.dequantized().matmul(x), product)
    assert torch.equal(packed.matmul(x[3:4]), product[3:4]), "nor does a row depend on its batch"
    exact = ragged(name).pack(rounded=False)
    assert torch.equal(exact.dequantized().matmul(x.float()), exact.matmul(x.float()))


@each_format
@pytest.mark.parametrize("dtype", OPERANDS)
def test_forward_and_input_gradient_are_those_of_the_written_weights(name: str, dtype: torch.dtype) -> None:
    """Within float32 rounding of float64: |error| ≤ K · 2⁻²⁴ · Σ|x·w| for y = x·W̃ᵀ and dx = dy·W̃."""
    published = ragged(name)
    packed, w = published.pack(rounded=True), written(published, rounded=True).double()
    generator = torch.Generator().manual_seed(2)
    x, dy = torch.randn(33, COLUMNS, generator=generator).to(dtype), torch.randn(33, len(w), generator=generator)
    dy = dy.to(dtype)
    buffer = torch.full((packed.transposed_numel,), float("nan"), dtype=dtype)
    for operand, got, matrix in (
        (x.double(), packed.matmul(x), w.T),
        (dy.double(), packed.transposed(buffer).matmul(dy), w),
    ):
        bound = len(matrix) * 2.0**-24 * (operand.abs() @ matrix.abs())
        assert ((got.double() - operand @ matrix).abs() <= bound).all()


@each_format
def test_blocks_of_panels_are_the_matrix(name: str) -> None:
    published = publish(name, 400, COLUMNS)
    packed, w = published.pack(rounded=True), written(published, rounded=True)
    for panels in (1, 2, 4):
        parts = list(packed.blocks(panels))
        assert [first for first, _ in parts] == list(range(0, 400, 48 * panels))
        assert torch.equal(torch.cat([part.expand(torch.float32) for _, part in parts]), w)
        eye = torch.eye(COLUMNS)
        assert torch.equal(torch.cat([part.matmul(eye) for _, part in parts], dim=1).T, w)


@each_format
def test_a_bank_holds_it(name: str) -> None:
    experts = [ragged(name, seed).pack(rounded=True) for seed in range(3)]
    bank = stack(experts)
    assert bank.n_bytes == sum(e.n_bytes for e in experts)
    for mine, theirs in zip(bank, experts, strict=True):
        assert torch.equal(mine.expand(torch.float32), theirs.expand(torch.float32))


@pytest.mark.parametrize(
    ("name", "rows", "columns"),
    [
        ("Q4_0", 1, 32), ("Q4_K", 49, 256), ("Q6_K", 7, 256), ("INT4_PACKED", 97, 96), ("MXFP4", 47, 32),
        ("NVFP4", 5, 16), ("NVFP4", 100, 48), ("FP8_BLOCK", 130, 136), ("FP8_BLOCK", 3, 8), ("FP8_BLOCK", 576, 200),
        ("GPTQ-32", 8, 32), ("GPTQ-128", 56, 384), ("AWQ-128", 8, 128),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", OPERANDS)
def test_ragged_corners(name: str, rows: int, columns: int, dtype: torch.dtype) -> None:
    """Rows that fill no panel, a single group, and FP8 blocks that both sides cut short."""
    published = publish(name, rows, columns)
    packed, w = published.pack(rounded=True), written(published, rounded=True)
    assert torch.equal(packed.matmul(torch.eye(columns, dtype=dtype)).T, w)
    assert torch.equal(packed.expand(torch.bfloat16).float(), w)
    assert torch.equal(packed.gather(torch.arange(rows, dtype=torch.int32)), w)
    buffer = torch.full((packed.transposed_numel,), float("nan"), dtype=dtype)
    turned = packed.transposed(buffer)
    assert torch.equal(turned.matmul(torch.eye(turned.columns, dtype=dtype))[:rows], w)


# ------------------------------------------------------------------ bytes


@each_format
def test_whole_panels_take_the_published_bytes(name: str) -> None:
    published = publish(name, 384, 1024)
    assert published.pack(rounded=True).n_bytes == published.n_bytes


@pytest.mark.parametrize(
    ("name", "numerator", "denominator"),
    [
        ("Q4_0", 18, 32), ("Q4_1", 20, 32), ("Q8_0", 34, 32), ("Q4_K", 144, 256), ("Q6_K", 210, 256),
        ("INT4_PACKED", 18, 32), ("FP8_BLOCK", 128 * 128 + 4, 128 * 128), ("MXFP4", 17, 32),
        ("GPTQ-128", 66.5, 128), ("GPTQ-64", 34.5, 64), ("GPTQ-32", 18.5, 32), ("AWQ-128", 66.5, 128),
    ],
)  # fmt: skip
def test_bytes_per_weight(name: str, numerator: float, denominator: int) -> None:
    assert publish(name, 384, 1024).pack(rounded=True).n_bytes == 384 * 1024 * numerator / denominator


def test_bytes_of_nvfp4() -> None:
    assert publish("NVFP4", 384, 1024).pack(rounded=True).n_bytes == 384 * 1024 * 9 / 16 + 4


@each_format
def test_only_rows_are_padded(name: str) -> None:
    """To 48; FP8's scales are not padded at all."""
    rows, padded = ROWS.get(name, 100), 144
    published = publish(name, rows, COLUMNS)
    extra = published.pack(rounded=True).n_bytes - published.n_bytes
    if name == "FP8_BLOCK":
        assert extra == (padded - rows) * COLUMNS
    else:
        per_row = (published.n_bytes - 4 * (name == "NVFP4")) / rows
        assert extra == (padded - rows) * per_row


# ------------------------------------------------------------------ other readers


def test_mxfp4_is_what_transformers_reads() -> None:
    """Their values are bf16 and lie [K, N]; codes below 2 (weights of at most 6 · 2⁻¹²⁶) are zero here."""
    p = publish("MXFP4", 96, 512, extreme=True)
    p.parts["_scales"][p.parts["_scales"] < 2] = 2
    theirs = convert_moe_packed_tensors(*(torch.from_numpy(p.parts[end])[None] for end in ("_blocks", "_scales")))
    packed = repack_parts(p.parts, p.stored, rounded=True)
    assert torch.equal(packed.expand(torch.float32), theirs[0].T.float())


def test_fp8_is_what_transformers_reads() -> None:
    p = publish("FP8_BLOCK", 256, 384)
    codes, scale = torch.from_numpy(p.parts[".weight"]).view(torch.float8_e4m3fn), p.parts[".weight_scale_inv"]
    theirs = Fp8Dequantize(None)._dequantize_one(codes, torch.from_numpy(scale))
    assert torch.equal(repack_parts(p.parts, p.stored, rounded=False).expand(torch.float32), theirs)


def test_small_floats_are_torchs_and_ggufs() -> None:
    codes = np.array([c for c in range(256) if c & 127 != 127], np.uint8)
    assert np.array_equal(e4m3(codes), torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy())
    assert np.array_equal(E2M1, np.array(gguf.quants.MXFP4.kvalues, np.float32) / 2)


def test_arrays_may_come_as_bytes() -> None:
    for name in ("INT4_PACKED", "FP8_BLOCK", "NVFP4", "GPTQ-64", "AWQ-128"):
        p = ragged(name)
        as_bytes = {end: np.ascontiguousarray(a).reshape(a.shape or (1,)).view(np.uint8) for end, a in p.parts.items()}
        assert torch.equal(
            repack_parts(as_bytes, p.stored, rounded=True).expand(torch.float32), written(p, rounded=True)
        )


def test_gptqs_second_version_stores_zero_points_as_they_are() -> None:
    p = publish("GPTQ-32", 96, 64)
    higher = {**p.parts, ".qzeros": (p.parts[".qzeros"].view(np.uint32) + np.uint32(0x11111111)).view(np.int32)}
    second = repack_parts(higher, p.stored, rounded=True, gptq_v2=True)
    assert torch.equal(second.expand(torch.float32), p.pack(rounded=True).expand(torch.float32))


# ------------------------------------------------------------------ what is refused


def changed(
    name: str, end: str, change: Callable[[np.ndarray], object]
) -> tuple[Mapping[str, np.ndarray], StoredFormat]:
    p = ragged(name)
    parts = {key: np.array(value) for key, value in p.parts.items()}
    change(parts[end])
    return parts, p.stored


def put(value: float) -> Callable[[np.ndarray], None]:
    """Write a value at the end of an array."""

    def change(array: np.ndarray) -> None:
        array.reshape(-1)[-1] = value

    return change


def half_up(values: float) -> int:
    return int(np.float32(values).view(np.uint32) >> np.uint32(16))


DAMAGE = {
    "int4 nan": ("INT4_PACKED", ".weight_scale", put(0x7FC0), "not a finite number"),
    "int4 infinite": ("INT4_PACKED", ".weight_scale", put(0xFF80), "not a finite number"),
    "int4 too large": ("INT4_PACKED", ".weight_scale", put(half_up(BF16_MAX / 4)), "beyond what bf16"),
    "fp8 weight nan": ("FP8_BLOCK", ".weight", put(0x7F), "a weight is not a number"),
    "fp8 weight -nan": ("FP8_BLOCK", ".weight", put(0xFF), "a weight is not a number"),
    "fp8 scale nan": ("FP8_BLOCK", ".weight_scale_inv", put(np.nan), "not a finite number"),
    "fp8 scale too large": ("FP8_BLOCK", ".weight_scale_inv", put(BF16_MAX / 440), "beyond what bf16"),
    "mxfp4 nan": ("MXFP4", "_scales", put(255), "255 is not a number"),
    "mxfp4 too large": ("MXFP4", "_scales", put(253), "beyond what bf16"),
    "nvfp4 scale nan": ("NVFP4", ".weight_scale", put(0xFF), "a scale is not a number"),
    "nvfp4 whole nan": ("NVFP4", ".weight_scale_2", put(np.nan), "not a finite number"),
    "nvfp4 whole too large": ("NVFP4", ".weight_scale_2", put(1e36), "beyond what bf16"),
    "gptq infinite": ("GPTQ-64", ".scales", put(np.inf), "not a finite"),
    "gptq zero": ("GPTQ-64", ".qzeros", put(-1), "convert to gptq_v2"),
    "gptq order": ("GPTQ-64", ".g_idx", put(0), "activation order"),
    "awq nan": ("AWQ-128", ".scales", put(np.nan), "not a finite"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_holds_no_numbers_is_refused(damage: str) -> None:
    name, end, change, message = DAMAGE[damage]
    parts, stored = changed(name, end, change)
    with pytest.raises(ModelError, match=message):
        repack_parts(parts, stored, rounded=True)
    with pytest.raises(ModelError, match=message):
        dequantize_parts(parts, stored)


MISFITS = {
    "int4 groups": ("INT4_PACKED", {".weight_scale": np.ones((100, 15), np.uint16)}, None, "do not fit"),
    "int4 rows": ("INT4_PACKED", {".weight_scale": np.ones((99, 16), np.uint16)}, None, "do not fit"),
    "int4 config": ("INT4_PACKED", {}, 64, "groups of 32, the config says 64"),
    "fp8 blocks": ("FP8_BLOCK", {".weight_scale_inv": np.ones((2, 4), np.float32)}, None, "only weight_block_size"),
    "fp8 columns": ("FP8_BLOCK", {".weight": np.zeros((300, 510), np.uint8)}, None, "no multiple of 8"),
    "fp8 config": ("FP8_BLOCK", {}, 64, "only weight_block_size"),
    "mxfp4 groups": ("MXFP4", {"_scales": np.ones((100, 8), np.uint8)}, None, "do not fit"),
    "nvfp4 globals": ("NVFP4", {".weight_scale_2": np.ones(2, np.float32)}, None, "one number expected"),
    "gptq zeros": ("GPTQ-64", {".qzeros": np.ones((8, 12), np.int32)}, 64, "do not fit"),
    "gptq config": ("GPTQ-64", {}, 128, "no groups of 128"),
    "awq words": ("AWQ-128", {".qweight": np.ones((512, 12), np.int32)}, 128, "do not fit"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_parts_that_do_not_fit_are_refused(misfit: str) -> None:
    name, other, group, message = MISFITS[misfit]
    p = publish(name, 300, COLUMNS) if name == "FP8_BLOCK" else ragged(name)
    with pytest.raises(ModelError, match=message):
        repack_parts({**p.parts, **other}, StoredFormat(p.stored.kind, group=group), rounded=True)


def test_a_missing_part_and_another_format_are_named() -> None:
    p = ragged("INT4_PACKED")
    with pytest.raises(ModelError, match=r"no tensor …\.weight_scale beside …\.weight_packed"):
        repack_parts({".weight_packed": p.parts[".weight_packed"]}, p.stored, rounded=True)
    with pytest.raises(ValueError, match="Q4_0 weight is one tensor"):
        repack_parts(p.parts, StoredFormat(TensorFormat.Q4_0), rounded=True)
    with pytest.raises(ValueError, match="should be int32 or bytes, not int64"):
        repack_parts({**p.parts, ".weight_packed": np.zeros((100, 64), np.int64)}, p.stored, rounded=True)


def test_an_activation_order_in_the_config_is_refused() -> None:
    p = ragged("GPTQ-64")
    with pytest.raises(ModelError, match="desc_act off"):
        repack_parts(p.parts, StoredFormat(TensorFormat.GPTQ, group=64, act_order=True), rounded=True)
