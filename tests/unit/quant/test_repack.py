"""GGUF blocks go to panels byte by byte as the slow way through unpacked integers would put them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tithe.arch import TensorFormat
from tithe.errors import ModelError
from tithe.quant import PackedMatrix, pack_int4, pack_int8, set_threads
from tithe.quant.reference import dequantize, unpack
from tithe.quant.repack import REPACKED, repack

each_format = pytest.mark.parametrize("tensor_format", REPACKED)


def blocks(tensor_format: TensorFormat, rows: int, groups: int, seed: int = 0) -> np.ndarray:
    """Any integers under any finite scales: uint8 [rows, bytes per row]."""
    rng = np.random.default_rng([seed, rows])
    raw = rng.integers(0, 256, (rows, groups, tensor_format.block_bytes), dtype=np.uint8)
    for offset in (0, 2) if tensor_format is TensorFormat.Q4_1 else (0,):
        halves = rng.normal(0, 0.1, (rows, groups)).astype(np.float16)
        raw[:, :, offset : offset + 2] = halves[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


def slowly(raw: np.ndarray, tensor_format: TensorFormat, *, rounded: bool) -> PackedMatrix:
    g = unpack(raw, tensor_format)
    if g.zero is None:
        return pack_int8(g.q, g.scale, rounded=rounded)
    return pack_int4(g.q, g.scale, g.zero, rounded=rounded)


@each_format
@pytest.mark.parametrize("rows", [1, 47, 48, 100])
def test_every_byte_is_where_the_slow_way_puts_it(tensor_format: TensorFormat, rows: int) -> None:
    raw = blocks(tensor_format, rows, 3)
    for rounded in (True, False):
        mine, theirs = repack(raw, tensor_format, rounded=rounded), slowly(raw, tensor_format, rounded=rounded)
        assert (mine.kind, mine.rows, mine.columns, mine.rounded) == (
            theirs.kind,
            theirs.rows,
            theirs.columns,
            theirs.rounded,
        )
        for a, b in zip(mine.storages(), theirs.storages(), strict=True):
            assert torch.equal(a, b)


@each_format
def test_the_weights_are_the_files(tensor_format: TensorFormat) -> None:
    raw = blocks(tensor_format, 50, 2)
    packed = repack(raw, tensor_format, rounded=False)
    assert torch.equal(packed.expand(torch.float32), torch.from_numpy(dequantize(raw, tensor_format)))


@each_format
def test_a_view_that_is_not_contiguous_is_read_right(tensor_format: TensorFormat) -> None:
    raw = blocks(tensor_format, 60, 2)
    assert torch.equal(
        repack(raw[::2], tensor_format, rounded=True).data, repack(raw[::2].copy(), tensor_format, rounded=True).data
    )


@each_format
def test_one_and_two_threads_give_the_same_bytes(tensor_format: TensorFormat) -> None:
    raw = blocks(tensor_format, 500, 2)
    one = repack(raw, tensor_format, rounded=True)
    try:
        set_threads(2)
        two = repack(raw, tensor_format, rounded=True)
    finally:
        set_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(one.storages(), two.storages(), strict=True))


@each_format
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_scale_that_is_not_finite_is_a_damaged_file(tensor_format: TensorFormat, bad: float) -> None:
    raw = blocks(tensor_format, 50, 2)
    raw[49, -tensor_format.block_bytes : -tensor_format.block_bytes + 2] = np.array([bad], np.float16).view(np.uint8)
    with pytest.raises(ModelError, match=f"a {tensor_format} tensor has a scale that is not a finite"):
        repack(raw, tensor_format, rounded=True)


def test_a_zero_point_beyond_half_precision_is_a_damaged_file() -> None:
    raw = blocks(TensorFormat.Q4_0, 4, 1)
    raw[2, :2] = np.array([9000.0], np.float16).view(np.uint8)  # -8 · 9000 is below -65504
    with pytest.raises(ModelError, match="damaged file"):
        repack(raw, TensorFormat.Q4_0, rounded=True)
