"""GGUF blocks go to panels without changing a weight or a byte too much.

Every format, however it got packed: `test_kinds.py`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from support.checkpoints import build_gguf
from tithe.arch import TensorFormat, read_checkpoint
from tithe.errors import ModelError
from tithe.quant import PackedMatrix, pack_int4, pack_int8
from tithe.quant.reference import dequantize, unpack
from tithe.quant.repack import REPACKED, repack

each_format = pytest.mark.parametrize("tensor_format", REPACKED)
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q6_K": [208]}
"""Where a block keeps its half-precision numbers."""


def blocks(tensor_format: TensorFormat, rows: int, groups: int, seed: int = 0) -> np.ndarray:
    """Any integers under any finite scales: uint8 [rows, bytes per row]."""
    rng = np.random.default_rng([seed, rows])
    raw = rng.integers(0, 256, (rows, groups, tensor_format.block_bytes), dtype=np.uint8)
    for offset in HALVES[tensor_format]:
        halves = rng.normal(0, 0.1, (rows, groups)).astype(np.float16)
        raw[:, :, offset : offset + 2] = halves[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


def slowly(raw: np.ndarray, tensor_format: TensorFormat, *, rounded: bool) -> PackedMatrix:
    g = unpack(raw, tensor_format)
    if g.zero is None:
        return pack_int8(g.q, g.scale, rounded=rounded)
    return pack_int4(g.q, g.scale, g.zero, rounded=rounded)


@pytest.mark.parametrize("tensor_format", [TensorFormat.Q4_1, TensorFormat.Q8_0])
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


@pytest.mark.parametrize("linear", ["Q4_0", "Q4_1", "Q8_0"])
def test_a_tensor_of_a_file_keeps_its_values_and_its_bytes(tmp_path: Path, linear: str) -> None:
    path = build_gguf(tmp_path / "m.gguf", linear=linear, tokenizer=False)
    entry = read_checkpoint(path).tensors["model.layers.0.mlp.up_proj.weight"]
    assert entry.format is TensorFormat[linear]
    assert entry.shape[0] % 48 == 0, "whole panels"
    packed = repack(entry.read(), entry.format, rounded=False)
    assert torch.equal(packed.expand(torch.float32), torch.from_numpy(dequantize(entry.read(), entry.format)))
    assert packed.n_bytes == entry.n_bytes


@each_format
def test_a_view_that_is_not_contiguous_is_read_right(tensor_format: TensorFormat) -> None:
    raw = blocks(tensor_format, 60, 2)
    assert torch.equal(
        repack(raw[::2], tensor_format, rounded=True).data, repack(raw[::2].copy(), tensor_format, rounded=True).data
    )


@each_format
def test_one_and_two_threads_give_the_same_bytes(tensor_format: TensorFormat, request: pytest.FixtureRequest) -> None:
    raw = blocks(tensor_format, 500, 2)
    one = repack(raw, tensor_format, rounded=True)
    request.getfixturevalue("two_threads")
    two = repack(raw, tensor_format, rounded=True)
    assert all(torch.equal(a, b) for a, b in zip(one.storages(), two.storages(), strict=True))


@each_format
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_scale_that_is_not_finite_is_a_damaged_file(tensor_format: TensorFormat, bad: float) -> None:
    for offset in HALVES[tensor_format]:
        raw = blocks(tensor_format, 50, 2).reshape(50, 2, -1)
        raw[49, 1, offset : offset + 2] = np.array([bad], np.float16).view(np.uint8)
        with pytest.raises(ModelError, match=f"a {tensor_format} tensor has a scale that is not a finite"):
            repack(raw.reshape(50, -1), tensor_format, rounded=True)


@each_format
def test_broken_blocks_are_refused(tensor_format: TensorFormat) -> None:
    with pytest.raises(ValueError, match="no whole blocks"):
        repack(blocks(tensor_format, 4, 2)[:, :-1], tensor_format, rounded=True)
    with pytest.raises(ValueError, match="no whole blocks"):
        repack(blocks(tensor_format, 4, 1), TensorFormat.Q2_K, rounded=True)
