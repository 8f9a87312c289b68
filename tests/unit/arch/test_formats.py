"""Exact bytes of formats whose elements lie in several tensors, and the tensors that their writers make."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tithe.arch import StoredFormat, TensorFormat
from tithe.arch.layouts import DTYPE_BYTES

COMPOUND = [kind for kind in TensorFormat if kind.is_compound]

# (format, logical shape of a released model's matrix, (suffix, dtype, shape) of each tensor that holds it)
RELEASED = [
    # Kimi-K2-Thinking: model.layers.1.mlp.experts.0.gate_proj
    (
        StoredFormat(TensorFormat.INT4_PACKED),
        (2048, 7168),
        [
            (".weight_packed", "I32", (2048, 896)),
            (".weight_scale", "BF16", (2048, 224)),
            (".weight_shape", "I64", (2,)),
        ],
    ),
    # DeepSeek-V3: model.layers.0.self_attn.kv_a_proj_with_mqa, whose 576 rows end in half a block
    (
        StoredFormat(TensorFormat.FP8_BLOCK),
        (576, 7168),
        [(".weight", "F8_E4M3", (576, 7168)), (".weight_scale_inv", "F32", (5, 56))],
    ),
    # gpt-oss-120b: model.layers.0.mlp.experts.gate_up_proj
    (
        StoredFormat(TensorFormat.MXFP4),
        (128, 5760, 2880),
        [("_blocks", "U8", (128, 5760, 90, 16)), ("_scales", "U8", (128, 5760, 90))],
    ),
    # nvidia/DeepSeek-R1-FP4: model.layers.3.mlp.experts.0.down_proj
    (
        StoredFormat(TensorFormat.NVFP4),
        (7168, 2048),
        [
            (".weight", "U8", (7168, 1024)),
            (".weight_scale", "F8_E4M3", (7168, 128)),
            (".weight_scale_2", "F32", ()),
            (".input_scale", "F32", ()),
        ],
    ),
    # Qwen2.5-7B-Instruct-GPTQ-Int4: model.layers.0.mlp.down_proj
    (
        StoredFormat(TensorFormat.GPTQ),
        (3584, 18944),
        [
            (".qweight", "I32", (2368, 3584)),
            (".scales", "F16", (148, 3584)),
            (".qzeros", "I32", (148, 448)),
            (".g_idx", "I32", (18944,)),
        ],
    ),
    # Qwen2.5-7B-Instruct-AWQ: model.layers.0.mlp.down_proj
    (
        StoredFormat(TensorFormat.AWQ),
        (3584, 18944),
        [(".qweight", "I32", (18944, 448)), (".scales", "F16", (148, 3584)), (".qzeros", "I32", (148, 448))],
    ),
]


@pytest.mark.parametrize(("stored", "shape", "tensors"), RELEASED, ids=[str(row[0].kind) for row in RELEASED])
def test_parts_are_those_that_hold_released_matrices(stored, shape, tensors):
    assert [part[:3] for part in stored.parts(shape)] == tensors


@pytest.mark.parametrize("kind", COMPOUND)
def test_bytes_of_whole_blocks_are_block_bytes(kind):
    """A matrix of whole blocks has `bytes_per_weight` a weight; NVFP4 has four bytes more for each matrix."""
    shape = (3, 256, 512)
    per_matrix = 3 * 4 if kind is TensorFormat.NVFP4 else 0
    assert kind.n_bytes(shape) == math.prod(shape) * kind.block_bytes // kind.block_size + per_matrix
    assert kind.bytes_per_weight == kind.block_bytes / kind.block_size
    assert kind.n_bytes(shape) == StoredFormat(kind).n_bytes(shape)


@given(st.sampled_from(COMPOUND), st.integers(1, 5), st.integers(1, 5), st.integers(1, 3))
def test_bytes_are_the_parts_and_stacks_add_up(kind, out, width, stack):
    stored = StoredFormat(kind)
    matrix = (8 * out, 128 * width)
    held = [p for p in stored.parts(matrix) if p.is_held]
    assert stored.n_bytes(matrix) == sum(math.prod(p.shape) * DTYPE_BYTES[p.dtype] for p in held)
    assert stored.n_bytes((stack, *matrix)) == stack * stored.n_bytes(matrix)
    assert 0 < stored.scale_bytes(matrix) < stored.n_bytes(matrix)


def test_group_and_act_order_change_the_scales_alone():
    shape = (64, 256)
    fine, usual = StoredFormat(TensorFormat.GPTQ, group=32), StoredFormat(TensorFormat.GPTQ)
    assert fine.scale_bytes(shape) == 4 * usual.scale_bytes(shape)
    assert fine.n_bytes(shape) - fine.scale_bytes(shape) == 64 * 256 // 2
    ordered = StoredFormat(TensorFormat.GPTQ, act_order=True)
    assert ordered.n_bytes(shape) == usual.n_bytes(shape) + 256 * 4


def test_the_last_group_of_gptq_and_the_edge_blocks_of_fp8_may_be_short():
    assert StoredFormat(TensorFormat.GPTQ).parts((8, 200))[1].shape == (2, 8)
    assert TensorFormat.FP8_BLOCK.n_bytes((130, 129)) == 130 * 129 + 4 * 4


@pytest.mark.parametrize("kind", [kind for kind in COMPOUND if kind is not TensorFormat.FP8_BLOCK])
def test_what_groups_cannot_fill_is_refused(kind):
    with pytest.raises(ValueError, match="whole number"):
        kind.n_bytes((64, 100))


def test_a_row_of_shared_words_has_no_size():
    assert TensorFormat.INT4_PACKED.row_bytes(7168) == 7168 // 2 + 7168 // 32 * 2
    with pytest.raises(ValueError, match="between rows"):
        TensorFormat.FP8_BLOCK.row_bytes(7168)
    with pytest.raises(ValueError, match="matrices"):
        TensorFormat.FP8_BLOCK.n_bytes((7168,))


def test_plain_formats_have_no_parts():
    assert StoredFormat(TensorFormat.BF16).parts((4, 4)) == ()
    assert StoredFormat(TensorFormat.BF16).n_bytes((4, 4)) == 32
    assert StoredFormat(TensorFormat.BF16).scale_bytes((4, 4)) == 0
