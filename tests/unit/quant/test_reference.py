"""The reference formats against the `gguf` package, torch, and their own written error bounds."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tithe.arch import TensorFormat
from tithe.errors import ModelError
from tithe.quant.formats import GroupedIntegers
from tithe.quant.reference import (
    dequantize,
    from_bf16_bits,
    quantize_int4,
    quantize_int8,
    round_to_bf16,
    to_bf16_bits,
    unpack,
)
from unit.quant.published import FORMATS

PLAIN = [TensorFormat.F16, TensorFormat.BF16, TensorFormat.F32]
QUANTIZED = [TensorFormat.Q4_0, TensorFormat.Q4_1, TensorFormat.Q8_0]


def matrix(seed: int, rows: int = 7, columns: int = 96, scale: float = 0.05) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, (rows, columns)).astype(np.float32)


def as_gguf(values: np.ndarray, tensor_format: TensorFormat) -> np.ndarray:
    return np.ascontiguousarray(gguf.quants.quantize(values, gguf.GGMLQuantizationType[tensor_format])).view(np.uint8)


@pytest.mark.parametrize("tensor_format", [*QUANTIZED, *PLAIN])
def test_dequantize_is_ggufs_bit_for_bit(tensor_format: TensorFormat) -> None:
    raw = as_gguf(matrix(1), tensor_format)
    theirs = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[tensor_format])
    mine = dequantize(raw, tensor_format)
    assert mine.dtype == np.float32
    np.testing.assert_array_equal(mine, theirs)


@given(st.integers(0, 2**32), st.sampled_from(QUANTIZED))
def test_random_blocks_dequantize_as_ggufs(seed: int, tensor_format: TensorFormat) -> None:
    """Not only what a quantizer writes: any nibbles, any finite scales."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (4, 3, tensor_format.block_bytes), dtype=np.uint8)
    for offset in (0, 2) if tensor_format is TensorFormat.Q4_1 else (0,):
        halves = rng.normal(0, 10.0 ** rng.integers(-6, 3), (4, 3)).astype(np.float16)
        blocks[:, :, offset : offset + 2] = halves[..., None].view(np.uint8)
    raw = blocks.reshape(4, -1)
    theirs = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[tensor_format])
    np.testing.assert_array_equal(dequantize(raw, tensor_format), theirs)
    integers = unpack(raw, tensor_format)
    np.testing.assert_array_equal(integers.values(), theirs)
    assert (integers.q.shape, integers.scale.shape, integers.group) == ((4, 96), (4, 3), 32)


# Where each expanded format keeps its half-precision numbers; random bytes there could be infinite.
HALVES = {"Q5_0": [0], "Q5_1": [0, 2], "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}


@given(st.integers(0, 2**32), st.sampled_from([TensorFormat(name) for name in HALVES]))
def test_expanded_formats_are_ggufs_bit_for_bit(seed: int, tensor_format: TensorFormat) -> None:
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (3, 2, tensor_format.block_bytes), dtype=np.uint8)
    for offset in HALVES[tensor_format]:
        halves = rng.normal(0, 10.0 ** rng.integers(-6, 3), (3, 2)).astype(np.float16)
        blocks[:, :, offset : offset + 2] = halves[..., None].view(np.uint8)
    raw = blocks.reshape(3, -1)
    theirs = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[tensor_format])
    np.testing.assert_array_equal(dequantize(raw, tensor_format), theirs)
    with pytest.raises(ValueError, match="scale per block"):
        unpack(raw, tensor_format)
    blocks[1, 1, HALVES[tensor_format][0] :][:2] = np.array([np.nan], np.float16).view(np.uint8)
    with pytest.raises(ModelError, match="not finite"):
        dequantize(blocks.reshape(3, -1), tensor_format)


def test_every_format_has_a_reading() -> None:
    compound = {stored.kind for stored in FORMATS.values() if stored.kind.is_compound}
    assert set(QUANTIZED) | set(PLAIN) | set(HALVES) | compound == set(TensorFormat)


def test_bit_order_is_the_one_written_down() -> None:
    """One Q4_1 block by hand: scale 0.5, minimum -4, byte j = j | (15 - j) << 4."""
    halves = np.array([0.5, -4.0], np.float16).view(np.uint8)
    nibbles = np.array([j | (15 - j) << 4 for j in range(16)], np.uint8)
    integers = unpack(np.concatenate([halves, nibbles])[None], TensorFormat.Q4_1)
    assert integers.q.tolist() == [[*range(16), *range(15, -1, -1)]]
    assert integers.values()[0, [0, 1, 15, 16, 31]].tolist() == [-4.0, -3.5, 3.5, 3.5, -4.0]
    four_zero = unpack(np.concatenate([halves[:2], nibbles])[None], TensorFormat.Q4_0)
    assert (four_zero.q.dtype, four_zero.zero) == (np.int8, None)
    assert four_zero.values()[0, 0] == (int(nibbles[0]) % 16 - 8) * 0.5
    eight = unpack(np.concatenate([halves[:2], np.full(32, 0x80, np.uint8)])[None], TensorFormat.Q8_0)
    assert (eight.q.dtype, eight.q[0, 0], eight.zero, eight.values()[0, 0]) == (np.int8, -128, None, -64.0)


def test_damaged_scales_and_shapes_are_refused() -> None:
    raw = as_gguf(matrix(2), TensorFormat.Q4_1)
    for offset, value in ((0, np.nan), (2, np.inf)):
        damaged = raw.copy()
        damaged[3, offset : offset + 2] = np.array([value], np.float16).view(np.uint8)
        with pytest.raises(ModelError, match="not a finite"):
            unpack(damaged, TensorFormat.Q4_1)
    with pytest.raises(ValueError, match="whole Q4_1 blocks"):
        unpack(raw[:, :-1], TensorFormat.Q4_1)
    with pytest.raises(ValueError, match="scale per block"):
        unpack(raw, TensorFormat.BF16)
    with pytest.raises(ValueError, match="uint8"):
        dequantize(matrix(2), TensorFormat.F32)


@given(st.integers(0, 2**32), st.sampled_from([0.02, 1.0, 1000.0]), st.sampled_from([0.0, -3.0, 40.0]))
def test_int4_error_is_within_the_written_bound(seed: int, scale: float, shift: float) -> None:
    w = matrix(seed, scale=scale) + np.float32(shift)
    packed = quantize_int4(w)
    assert packed.zero is not None
    step = np.repeat(packed.scale.astype(np.float64), 32, axis=1)
    zero = np.repeat(np.abs(packed.zero.astype(np.float64)), 32, axis=1)
    assert (np.abs(packed.values() - w.astype(np.float64)) <= step / 2 + 2.0**-11 * (16 * step + zero)).all()
    assert packed.q.max() <= 15


def test_int4_is_at_least_as_close_as_ggufs_quantizer() -> None:
    """Both use min and max; choosing q against the rounded scale cannot be worse on average."""
    w = matrix(3, rows=200)
    theirs = dequantize(as_gguf(w, TensorFormat.Q4_1), TensorFormat.Q4_1)
    mine = quantize_int4(w)
    np.testing.assert_array_equal(mine.scale, unpack(as_gguf(w, TensorFormat.Q4_1), TensorFormat.Q4_1).scale)
    assert np.square(mine.values() - w).sum() <= np.square(theirs - w).sum()


@given(st.integers(0, 2**32), st.sampled_from([0.02, 1.0, 1000.0]))
def test_int8_error_is_within_the_written_bound(seed: int, scale: float) -> None:
    w = matrix(seed, scale=scale)
    packed = quantize_int8(w)
    step = np.repeat(packed.scale.astype(np.float64), 32, axis=1)
    assert (np.abs(packed.values() - w.astype(np.float64)) <= step / 2 + 2.0**-11 * 127 * step).all()
    assert packed.q.min() >= -127


@pytest.mark.parametrize(("quantize", "tensor_format"), [(quantize_int4, "Q4_1"), (quantize_int8, "Q8_0")])
def test_what_is_on_the_grid_stays_exactly(quantize: object, tensor_format: str) -> None:
    """Dequantized weights whose groups use the full range quantize to themselves: a second pass loses nothing."""
    assert callable(quantize)
    first: GroupedIntegers = quantize(matrix(4))
    second: GroupedIntegers = quantize(first.values())
    np.testing.assert_array_equal(first.scale, second.scale)
    np.testing.assert_array_equal(first.values(), second.values())


def test_constant_groups() -> None:
    w = np.zeros((3, 64), np.float32)
    w[1], w[2, 32:] = 0.75, -1e-9
    for packed in (quantize_int4(w), quantize_int8(w)):
        assert np.isfinite(packed.values()).all()
        np.testing.assert_allclose(packed.values(), w, atol=0.75 / 127 / 2)
    assert quantize_int4(w).values()[1].tolist() == [0.75] * 64


@given(st.integers(0, 2**32), st.floats(1e-12, 1e-3))
def test_vanishing_scales_lose_less_than_a_half_precision_step(seed: int, scale: float) -> None:
    w = matrix(seed, scale=scale)
    assert np.abs(quantize_int4(w).values() - w).max() <= 0.3 * scale + 1.5e-6
    assert np.abs(quantize_int8(w).values() - w).max() <= 0.03 * scale + 4e-6


def test_groups_of_other_sizes() -> None:
    packed = quantize_int4(matrix(5), group=48)
    assert (packed.scale.shape, packed.group) == ((7, 2), 48)
    whole = quantize_int8(matrix(5), group=96)
    assert (whole.scale.shape, whole.group) == ((7, 1), 96)
    with pytest.raises(ValueError, match="groups of 40"):
        quantize_int4(matrix(5), group=40)


@pytest.mark.parametrize("quantize", [quantize_int4, quantize_int8])
def test_unusable_weights_are_refused(quantize: object) -> None:
    assert callable(quantize)
    for value, message in ((np.nan, "NaN or infinite"), (-np.inf, "NaN or infinite"), (70_000.0, "65504")):
        w = matrix(6)
        w[-1, -1] = value
        with pytest.raises(ModelError, match=message):
            quantize(w)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_bf16_rounding_is_torchs(patterns: list[int]) -> None:
    """Any 32-bit pattern: normals, subnormals, ties, overflow, infinities; NaN stays NaN."""
    x = np.array(patterns, np.uint32).view(np.float32)
    theirs = torch.from_numpy(x.copy()).to(torch.bfloat16).float().numpy()
    mine = round_to_bf16(x)
    np.testing.assert_array_equal(np.isnan(mine), np.isnan(x))
    ok = ~np.isnan(x)
    np.testing.assert_array_equal(mine.view(np.uint32)[ok], theirs.view(np.uint32)[ok])


def test_bf16_ties_go_to_even_and_every_pattern_survives() -> None:
    one = np.float32(1.0)
    tie_down, tie_up = one + np.float32(2**-8), one + np.float32(3 * 2**-8)
    assert round_to_bf16(np.array([tie_down, tie_up])).tolist() == [1.0, 1.0 + 2**-6]
    bits = np.arange(2**16, dtype=np.uint16)
    values = from_bf16_bits(bits)
    finite = ~np.isnan(values)
    np.testing.assert_array_equal(to_bf16_bits(values)[finite], bits[finite])
    assert np.isnan(from_bf16_bits(to_bf16_bits(values[~finite]))).all()
