"""Every published format is loaded packed and computes what transformers computes with the same numbers.

Bounds are the largest difference of two logits over the range of the logits: float32 throughout, then bf16 operands.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.checkpoints import build_gguf, build_hf
from support.checkpoints_packed import METHODS, build_packed, values_of
from support.decoders import BF16, FP32, Walk, random_ids, transformers_twin
from tithe.arch import Checkpoint, TensorFormat, read_checkpoint
from tithe.errors import ModelError
from tithe.models.decoder import Decoder
from tithe.models.loader import load_model
from tithe.models.loader_pack import SCRATCH_BYTES, Packer
from tithe.models.loader_rows import Piece, Rows, can_stack
from tithe.quant import PackedMatrix
from tithe.quant.reference import dequantize
from tithe.quant.reference_parts import dequantize_parts

IDS = random_ids(37)
EXACT, ROUNDED = 1e-6, 5e-3
"""Measured: 4e-7 and 3e-3. In a mixture bf16 operands may send a token to another expert: there the median counts."""
KINDS = {
    "int4": "int4_sym",
    "fp8": "fp8",
    "nvfp4": "nvfp4",
    "gptq": "int4_zp",
    "gptq-v2": "int4_zp",
    "awq": "int4_zp",
}
EXPERT_KINDS = KINDS | {"int4-experts": "int4_sym", "mxfp4": "mxfp4"}
KQUANTS: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "vocab_size": 144}


def logits(decoder: Decoder) -> Tensor:
    walk = Walk(decoder)
    return walk.logits(walk.prefill(0, IDS))


def twins_logits(path: Path, **options: Any) -> Tensor:
    with torch.no_grad():
        return transformers_twin(path, **options)(torch.from_numpy(IDS).long()[None]).logits[0]


def error(mine: Tensor, theirs: Tensor) -> Tensor:
    """Of each row, over the range of all logits."""
    return (mine - theirs).abs().amax(1) / (theirs.max() - theirs.min())


def pieces(checkpoint: Checkpoint, *modules: str) -> tuple[Piece, ...]:
    return tuple(Piece(checkpoint.tensors[f"model.layers.0.{module}.weight"]) for module in modules)


def exact(checkpoint: Checkpoint, *modules: str) -> np.ndarray:
    """float32 [N, K] by the references alone."""
    values: list[np.ndarray] = []
    for piece in pieces(checkpoint, *modules):
        entry = piece.entry
        whole = (
            dequantize_parts(entry.read_parts(), entry.stored, gptq_v2=entry.stored.gptq_v2) if entry.parts else None
        )
        values.append(dequantize(entry.read(), entry.format) if whole is None else whole)
    return np.concatenate(values)


QKV = tuple(f"self_attn.{n}_proj" for n in "qkv")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


# ------------------------------------------------------------------ Hugging Face directories


@pytest.mark.parametrize("method", KINDS)
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_packed_checkpoint_computes_what_its_numbers_say(tmp_path: Path, architecture: str, method: str) -> None:
    path = build_packed(tmp_path / "m", architecture, method)
    theirs = twins_logits(values_of(path))
    packed = load_model(read_checkpoint(path), FP32)
    assert {m.kind.name for linear in packed.linears() for m in linear.parts} == {KINDS[method]}
    assert error(logits(packed), theirs).max() < EXACT
    assert packed.base_max_abs_error == 0.0
    rounded = load_model(read_checkpoint(path), BF16)
    assert error(logits(rounded), theirs).max() < ROUNDED


@pytest.mark.parametrize("method", EXPERT_KINDS)
def test_a_packed_mixture_computes_what_its_numbers_say(tmp_path: Path, method: str) -> None:
    path = build_packed(tmp_path / "m", "qwen3_moe", method)
    theirs = twins_logits(values_of(path))
    packed = load_model(read_checkpoint(path), FP32)
    tables = [table for block in packed.blocks() for table in (block.routed.gate_up, block.routed.down)]
    assert {m.kind.name for table in tables for m in table.matrices} == {EXPERT_KINDS[method]}
    assert all(len(table.matrices) == 1 for table in tables), "one bank each"
    attention = KINDS.get(method, "fp32")
    assert {m.kind.name for linear in packed.linears() for m in linear.parts} == {attention}
    assert error(logits(packed), theirs).max() < EXACT
    rounded = load_model(read_checkpoint(path), BF16)
    assert error(logits(rounded), theirs).median() < ROUNDED


@pytest.mark.parametrize("mode", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("method", EXPERT_KINDS)
def test_packed_and_dequantized_storage_have_the_same_bits(tmp_path: Path, method: str, mode: Any) -> None:
    checkpoint = read_checkpoint(build_packed(tmp_path / "m", "qwen3_moe", method))
    packed, dense = load_model(checkpoint, mode), load_model(checkpoint, replace(mode, compute="dequantized"))
    kinds = {m.kind.name for block in dense.blocks() for m in block.routed.gate_up.matrices}
    assert kinds == {"bf16" if mode is BF16 else "fp32"}
    assert dense.resident_bytes() > packed.resident_bytes()
    assert torch.equal(logits(packed), logits(dense))


@pytest.mark.parametrize("method", KINDS)
def test_whole_panels_take_the_bytes_of_the_file(tmp_path: Path, method: str) -> None:
    sizes = {"hidden_size": 384, "intermediate_size": 768, "num_attention_heads": 6, "head_dim": 64}
    checkpoint = read_checkpoint(build_packed(tmp_path / "m", "llama", method, num_hidden_layers=1, **sizes))
    layer = load_model(checkpoint, BF16).layers[0]
    assert layer.gate_up is not None
    assert layer.down is not None
    for linear, modules in ((layer.gate_up, GATE_UP), (layer.down, ("mlp.down_proj",))):
        assert len(linear.parts) == 1
        once = 4 * (len(modules) - 1) if method == "nvfp4" else 0  # one global scale for all
        stored = sum(piece.entry.n_bytes for piece in pieces(checkpoint, *modules))
        assert sum(t.nbytes for t in linear.storages()) == stored - once


@pytest.mark.parametrize("method", KINDS)
@pytest.mark.parametrize("modules", [QKV, GATE_UP, ("mlp.down_proj",)], ids=["qkv", "gate-up", "down"])
def test_a_fused_matrix_holds_its_parts_in_order(tmp_path: Path, method: str, modules: tuple[str, ...]) -> None:
    """Row by row the reference's numbers, whether the block begins in one part or ends in another."""
    checkpoint = read_checkpoint(build_packed(tmp_path / "m", "llama", method, num_key_value_heads=4))
    rows = Rows(pieces(checkpoint, *modules))
    assert can_stack(rows.pieces)
    matrix = Packer(FP32).matrix(rows)
    np.testing.assert_array_equal(matrix.expand(torch.float32).numpy(), exact(checkpoint, *modules))


def test_fp8_blocks_that_straddle_two_linears_stay_apart(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(build_packed(tmp_path / "m", "llama", "fp8"))  # k has 64 rows, a scale is for 128
    decoder = load_model(checkpoint, FP32)
    assert [m.rows for m in decoder.layers[0].qkv.parts] == [128, 64, 64]
    np.testing.assert_array_equal(decoder.layers[0].qkv.expand(torch.float32).numpy(), exact(checkpoint, *QKV))
    only_last = read_checkpoint(build_packed(tmp_path / "n", "llama", "fp8", num_attention_heads=8, head_dim=16))
    gate_up = load_model(only_last, FP32).layers[0].gate_up
    assert gate_up is not None
    assert len(gate_up.parts) == 1


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_fp8_scales_may_be_bf16(tmp_path: Path, architecture: str) -> None:
    path = build_packed(tmp_path / "m", architecture, "fp8", bf16_scales=True)
    checkpoint = read_checkpoint(path)
    scales = {e.parts[".weight_scale_inv"].dtype for e in checkpoint.tensors.values() if e.parts}
    assert scales == {"BF16"}
    assert error(logits(load_model(checkpoint, FP32)), twins_logits(values_of(path))).max() < EXACT


def test_nvfp4_linears_of_different_global_scales_stay_apart(tmp_path: Path) -> None:
    path = build_packed(tmp_path / "m", "llama", "nvfp4", shared_scale=False)
    decoder = load_model(read_checkpoint(path), FP32)
    assert [m.kind.name for m in decoder.layers[0].qkv.parts] == ["nvfp4"] * 3
    assert error(logits(decoder), twins_logits(values_of(path))).max() < EXACT


def test_experts_whose_parts_cannot_be_one_matrix_become_dense(tmp_path: Path) -> None:
    """Gate and up under two global scales, which a bank cannot hold; down keeps its bytes."""
    path = build_packed(tmp_path / "m", "qwen3_moe", "nvfp4", shared_scale=False)
    decoder = load_model(read_checkpoint(path), FP32)
    routed = decoder.blocks()[0].routed
    assert {m.kind.name for m in routed.gate_up.matrices} == {"fp32"}
    assert {m.kind.name for m in routed.down.matrices} == {"nvfp4"}
    assert error(logits(decoder), twins_logits(values_of(path))).max() < EXACT


def test_one_expert_that_was_left_unpacked_has_a_matrix_of_its_own(tmp_path: Path) -> None:
    """As an ignore list that names an expert leaves it."""
    path = build_packed(tmp_path / "m", "qwen3_moe", "int4-experts")
    other = read_checkpoint(build_packed(tmp_path / "n", "qwen3_moe"))
    checkpoint = read_checkpoint(path)
    for part in ("gate", "up"):
        name = f"model.layers.0.mlp.experts.3.{part}_proj.weight"
        checkpoint.tensors[name] = other.tensors[name]
    table = load_model(checkpoint, BF16).blocks()[0].routed.gate_up
    assert [m.kind.name for m in table.matrices] == ["int4_sym"] * 3 + ["bf16"] + ["int4_sym"] * 4


# ------------------------------------------------------------------ GGUF


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K", "Q8_0"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_gguf_blocks_stay_packed(tmp_path: Path, architecture: str, kind: str) -> None:
    sizes = KQUANTS | ({"head_dim": 128} if architecture == "qwen3" else {})  # transformers' reader knows no other
    checkpoint = read_checkpoint(build_gguf(tmp_path / "m.gguf", architecture, linear=kind, embedding=kind, **sizes))
    decoder = load_model(checkpoint, FP32)
    assert {m.kind.name for linear in decoder.linears() for m in linear.parts} == {
        {"Q8_0": "int8"}.get(kind, kind.lower())
    }
    assert decoder.embedding.kind == decoder.layers[0].o.parts[0].kind
    assert error(logits(decoder), twins_logits(tmp_path, gguf_file="m.gguf")).max() < EXACT
    rounded = load_model(checkpoint, BF16)
    assert error(logits(rounded), logits(decoder)).max() < 2 * ROUNDED
    assert rounded.base_max_abs_error > 0.0


def test_a_mixed_file_keeps_each_format(tmp_path: Path) -> None:
    """Q4_K_M: v and down in Q6_K, so that q, k and v are no longer one matrix; Q5_0 is expanded."""
    parts = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "attn_output": "Q5_0", "output.": "Q6_K"}
    sizes = KQUANTS | {"tie_word_embeddings": False}
    path = build_gguf(tmp_path / "m.gguf", "llama", linear="Q4_K", embedding="Q4_K", parts=parts, **sizes)
    decoder = load_model(read_checkpoint(path), FP32)
    layer = decoder.layers[1]
    assert [m.kind.name for m in layer.qkv.parts] == ["q4_k", "q4_k", "q6_k"]
    assert [(s.start, s.stop) for s in layer.qkv.sites] == [(0, 256), (256, 384), (384, 512)]
    assert layer.gate_up is not None
    assert layer.down is not None
    assert [m.kind.name for m in (*layer.gate_up.parts, *layer.down.parts)] == ["q4_k", "q6_k"]
    assert (layer.o.parts[0].kind.name, decoder.head.kind.name) == ("fp32", "q6_k")
    assert error(logits(decoder), twins_logits(tmp_path, gguf_file="m.gguf")).max() < EXACT


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q4_0", "Q5_0"])
def test_gguf_experts_go_into_a_bank(tmp_path: Path, kind: str) -> None:
    sizes = {"moe_intermediate_size": 256, "hidden_size": 256}
    path = build_gguf(tmp_path / "m.gguf", "qwen3_moe", linear=kind, embedding="F32", parts={"attn": "F32"}, **sizes)
    routed = load_model(read_checkpoint(path), FP32).blocks()[1].routed
    assert {m.kind.name for m in routed.gate_up.matrices} == {"fp32" if kind == "Q5_0" else kind.lower()}
    checkpoint = read_checkpoint(path)
    name = "mlp.experts.2"
    values = exact(checkpoint, f"{name}.gate_proj", f"{name}.up_proj")
    first = load_model(checkpoint, FP32).blocks()[0].routed.gate_up.matrices[0]
    mine = replace(first, **{k: t[2] for k, t in first.parts().items()}).expand(torch.float32)
    np.testing.assert_array_equal(mine.numpy(), values)


# ------------------------------------------------------------------ on the way


def block_sizes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows of every block that is read, from now on."""
    read: list[tuple[int, int]] = []
    original = Rows.read

    def watched(self: Rows, start: int, stop: int) -> Any:
        read.append((start, stop))
        return original(self, start, stop)

    monkeypatch.setattr(Rows, "read", watched)
    return read


@pytest.mark.parametrize("method", ["int4", "fp8", "nvfp4", "awq", "gptq", None])
@pytest.mark.parametrize("quantize", ["none", "int4"])
def test_blocks_of_rows_give_the_matrix_of_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str | None, quantize: Any
) -> None:
    """896 rows in blocks of 384 at most, whose parts meet within a block."""
    sizes = {"intermediate_size": 512 if method == "fp8" else 448, "num_hidden_layers": 1}
    checkpoint = read_checkpoint(build_packed(tmp_path / "m", "llama", method, **sizes))
    options = replace(BF16, quantize=quantize)
    rows = Rows(pieces(checkpoint, *GATE_UP))
    whole = Packer(options).matrix(rows)
    monkeypatch.setattr("tithe.models.loader_pack.SCRATCH_BYTES", 1)
    read, packer = block_sizes(monkeypatch), Packer(options)
    pieced = packer.matrix(rows)
    assert [stop - start for start, stop in read] == [384, 384, rows.rows - 768]
    assert pieced.kind == whole.kind
    assert pieced.parts().keys() == whole.parts().keys()
    for name, part in pieced.parts().items():
        assert torch.equal(part, whole.parts()[name]), name
    monkeypatch.setattr("tithe.models.loader_pack.SCRATCH_BYTES", SCRATCH_BYTES)
    reference = Packer(options)
    reference.matrix(rows)
    assert packer.max_abs_error == reference.max_abs_error


def test_permuted_rows_of_a_block_are_the_permuted_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's order of q and k, undone block by block."""
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "head_dim": 64}
    checkpoint = read_checkpoint(build_gguf(tmp_path / "m.gguf", "llama", linear="Q8_0", num_hidden_layers=1, **sizes))
    monkeypatch.setattr("tithe.models.loader_pack.SCRATCH_BYTES", 1)
    matrix = Packer(FP32).matrix(Rows(pieces(checkpoint, *QKV)))
    np.testing.assert_array_equal(matrix.expand(torch.float32).numpy(), exact(checkpoint, *QKV))


def rounding(matrix: PackedMatrix) -> float:
    values = replace(matrix, rounded=False).expand(torch.float32)
    return float((values - values.bfloat16().float()).abs().max())


@pytest.mark.parametrize("method", ["int4", "fp8", "nvfp4", "awq", "mxfp4"])
def test_the_error_figure_is_that_of_rounding(tmp_path: Path, method: str) -> None:
    """Over all matrices, although most are not looked at; MXFP4 loses nothing in bf16."""
    decoder = load_model(read_checkpoint(build_packed(tmp_path / "m", "qwen3_moe", method)), BF16)
    matrices = [m for linear in decoder.linears() for m in linear.parts if not m.kind.is_dense]
    for block in decoder.blocks():
        for bank in (block.routed.gate_up.matrices[0], block.routed.down.matrices[0]):
            matrices += [replace(bank, **{n: t[e] for n, t in bank.parts().items()}) for e in range(8)]
    assert decoder.base_max_abs_error == max(rounding(m) for m in matrices)
    assert (decoder.base_max_abs_error == 0.0) == (method == "mxfp4")


def test_quantizing_on_load_packs_experts_and_not_the_router(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(build_hf(tmp_path / "m", "qwen3_moe"))
    exact_base, packed = load_model(checkpoint, FP32), load_model(checkpoint, replace(FP32, quantize="int4"))
    block = packed.blocks()[0]
    assert {m.kind.name for m in (*block.routed.gate_up.matrices, *block.routed.down.matrices)} == {"int4"}
    assert block.gate.kind.name == "fp32"
    assert 0 < packed.base_max_abs_error < 0.2
    assert packed.resident_bytes() < 0.5 * exact_base.resident_bytes()


# ------------------------------------------------------------------ damage


def test_damage_is_named_by_its_tensor(tmp_path: Path) -> None:
    path = build_packed(tmp_path / "m", "llama", "fp8")
    codes = read_checkpoint(path).tensors["model.layers.1.mlp.down_proj.weight"].parts[".weight"]
    with codes.file.path.open("r+b") as file:
        file.seek(codes.offset + 777)
        file.write(b"\x7f")
    checkpoint = read_checkpoint(path)
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.down_proj\.weight: .*not a number: damaged"):
        load_model(checkpoint, BF16)


def test_a_width_that_cannot_be_packed_is_named(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(build_hf(tmp_path / "n", "llama", intermediate_size=80))
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.down_proj\.weight: 80 columns are no whole groups of 32"):
        load_model(checkpoint, replace(BF16, quantize="int8"))


def test_every_method_has_a_case() -> None:
    assert METHODS.keys() == EXPERT_KINDS.keys()
    formats = {TensorFormat.INT4_PACKED, TensorFormat.FP8_BLOCK, TensorFormat.MXFP4, TensorFormat.NVFP4}
    assert {f for f in TensorFormat if f.is_compound} == formats | {TensorFormat.GPTQ, TensorFormat.AWQ}
