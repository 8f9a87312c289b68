"""Checkpoints with packed tensors: every format read part by part, what is left behind, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tithe.arch import (
    ArchSpec,
    Checkpoint,
    Shard,
    StoredFormat,
    TensorFormat,
    account,
    base_bytes,
    checkpoint_base,
    combine_digests,
    describe_checkpoint,
    iter_tensors,
    known_config,
    make_base,
    read_checkpoint,
    read_quantization,
)
from tithe.arch.layouts import PartRole
from tithe.errors import ModelError
from tithe.quant.reference_parts import dequantize_parts

Tensors = dict[str, torch.Tensor]

DTYPES = {
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
}
DEEPSEEK = known_config("deepseek-v3") | {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "vocab_size": 64,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
LLAMA = known_config("llama-3.1-8b") | {
    "hidden_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 64,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "int4": DEEPSEEK | {"quantization_config": known_config("kimi-k2-thinking")["quantization_config"]},
    "fp8": DEEPSEEK,
    "mxfp4": known_config("gpt-oss-20b")
    | {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4, "vocab_size": 64},
    "nvfp4": DEEPSEEK
    | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}},
    "gptq": LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True}},
    "awq": LLAMA | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}},
}


EXPERT = "model.layers.1.mlp.experts.3.up_proj"


def random_tensor(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> torch.Tensor:
    size = torch.empty(0, dtype=DTYPES[dtype]).element_size()
    raw = rng.integers(0, 255, (*(shape or (1,))[:-1], (shape or (1,))[-1] * size), dtype=np.uint8)
    return torch.from_numpy(raw).view(DTYPES[dtype]).reshape(shape)


def packed_tensors(config: dict[str, Any]) -> Tensors:
    """Random bytes for every tensor that a release of this config holds."""
    rng = np.random.default_rng(0)
    quantization = read_quantization(config)
    assert quantization is not None
    tensors: Tensors = {}
    for tensor in iter_tensors(ArchSpec.from_config(config)):
        stored = quantization.format_of(tensor)
        for part in stored.parts(tensor.family.matrix):
            tensors[tensor.module + part.suffix] = random_tensor(part.shape, part.dtype, rng)
        if not stored.kind.is_compound:
            tensors[tensor.name] = random_tensor(tensor.family.shape, str(stored.kind), rng)
    return tensors


def write(directory: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture(params=CONFIGS)
def release(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[dict[str, Any], Path]:
    config = CONFIGS[request.param]
    return config, write(tmp_path / "release", config, packed_tensors(config))


def test_every_entry_has_the_format_that_the_config_says(release: tuple[dict[str, Any], Path]) -> None:
    config, directory = release
    checkpoint = describe_checkpoint(directory)
    rule = make_base("published", config)
    assert list(checkpoint.tensors) == [tensor.name for tensor in iter_tensors(checkpoint.spec)]
    for tensor in iter_tensors(checkpoint.spec):
        assert checkpoint.tensors[tensor.name].stored == rule.format_of(tensor)
    assert any(entry.format.is_compound for entry in checkpoint.tensors.values())


def test_the_loaders_bytes_are_the_planners(release: tuple[dict[str, Any], Path]) -> None:
    """The files, the config alone and the entries: one number, by group and by rank."""
    config, directory = release
    checkpoint = describe_checkpoint(directory)
    files = account(checkpoint.spec, checkpoint_base(checkpoint), 3)
    planned = account(ArchSpec.from_config(config), make_base("published", config), 3)
    assert files == planned
    assert files.total.n_bytes == base_bytes(checkpoint)
    held = load_file(directory / "model.safetensors")
    notes = {
        tensor.module + part.suffix
        for tensor in iter_tensors(checkpoint.spec)
        for part in checkpoint.tensors[tensor.name].stored.parts(tensor.family.matrix)
        if part.role is PartRole.NOTE
    }
    assert base_bytes(checkpoint) == sum(t.nbytes for name, t in held.items() if name not in notes)


def test_parts_are_the_files_bytes_also_slice_by_slice(release: tuple[dict[str, Any], Path]) -> None:
    theirs = load_file(release[1] / "model.safetensors")
    checkpoint = describe_checkpoint(release[1])
    for tensor in iter_tensors(checkpoint.spec):
        for suffix, part in checkpoint.tensors[tensor.name].parts.items():
            expected = theirs[tensor.module + suffix].contiguous().reshape(-1).view(torch.uint8).numpy()
            np.testing.assert_array_equal(part.view().reshape(-1), expected)
            half = part.shape[0] // 2 if part.shape else 0
            np.testing.assert_array_equal(np.concatenate([part.view(0, half), part.view(half)]), part.view())


def test_a_packed_entry_is_read_by_its_parts_alone(release: tuple[dict[str, Any], Path]) -> None:
    checkpoint = describe_checkpoint(release[1])
    entry = next(entry for entry in checkpoint.tensors.values() if entry.parts)
    with pytest.raises(ValueError, match="lies in several tensors: read"):
        entry.read()
    part = next(iter(entry.parts.values()))
    with pytest.raises(ValueError, match="no part of them"):
        part.view(1, 0)


def test_one_expert_of_a_stack_is_what_the_whole_has_there(release: tuple[dict[str, Any], Path]) -> None:
    """And the arrays have the parts' shapes, with bytes in the last dimension."""
    checkpoint = describe_checkpoint(release[1])
    for tensor in iter_tensors(checkpoint.spec):
        entry = checkpoint.tensors[tensor.name]
        if not entry.parts:
            continue
        whole = entry.read_parts()
        for suffix, part in entry.parts.items():
            assert whole[suffix].shape[:-1] == part.shape[:-1]
            assert whole[suffix].nbytes == part.n_bytes
        for expert in range(tensor.family.n_experts if tensor.family.is_stacked else 0):
            for suffix, array in entry.read_parts(expert).items():
                np.testing.assert_array_equal(array, whole[suffix][expert])


def test_unpacked_values_are_those_of_the_parts(tmp_path: Path) -> None:
    """One INT4 matrix through reader and reference: nibbles from the lowest, less 8, times the group's scale."""
    config = CONFIGS["int4"]
    tensors = packed_tensors(config)
    tensors[f"{EXPERT}.weight_scale"] = torch.full((64, 4), 0.5, dtype=torch.bfloat16)
    entry = describe_checkpoint(write(tmp_path / "m", config, tensors)).tensors[f"{EXPERT}.weight"]
    words = tensors[f"{EXPERT}.weight_packed"].numpy().view(np.uint32)
    nibbles = np.stack([words >> np.uint32(4 * place) & np.uint32(15) for place in range(8)], axis=-1)
    expected = (nibbles.reshape(64, 128).astype(np.float32) - 8) * 0.5
    np.testing.assert_array_equal(dequantize_parts(entry.read_parts(), entry.stored), expected)


def test_a_run_refuses_what_it_cannot_multiply(release: tuple[dict[str, Any], Path]) -> None:
    """An order of inputs that kernels do not read."""
    config, directory = release
    if not config["quantization_config"].get("desc_act"):
        assert read_checkpoint(directory).tensors.keys() == describe_checkpoint(directory).tensors.keys()
        return
    with pytest.raises(ModelError, match=r"desc_act.* is described and not run"):
        read_checkpoint(directory)


def test_ranks_share_the_work_of_the_checksum(release: tuple[dict[str, Any], Path]) -> None:
    checkpoint = describe_checkpoint(release[1])
    found = [checkpoint.digests(Shard(rank, 3)) for rank in range(3)]
    assert combine_digests(found[0] | found[1] | found[2]) == checkpoint.checksum()
    if checkpoint.spec.is_moe:
        assert all(len(part) < len(checkpoint.digests()) for part in found)
    swapped = found[0] | {"model.norm.weight": found[0]["model.embed_tokens.weight"]}
    assert combine_digests(found[1] | found[2] | swapped) != checkpoint.checksum()


def test_what_was_let_go_is_read_again(release: tuple[dict[str, Any], Path]) -> None:
    checkpoint = describe_checkpoint(release[1])
    for tensor in iter_tensors(checkpoint.spec):
        entry = checkpoint.tensors[tensor.name]
        before = {suffix: bytes(file.bytes_view(at, size)) for suffix, file, at, size in entry.ranges()}
        entry.release()
        assert {suffix: bytes(file.bytes_view(at, size)) for suffix, file, at, size in entry.ranges()} == before
        for expert in range(tensor.family.n_experts if tensor.family.is_stacked and not entry.parts else 0):
            whole = next(iter(before.values()))
            size = len(whole) // tensor.family.n_experts
            assert entry.read_slice(expert, expert + 1).tobytes() == whole[expert * size : (expert + 1) * size]


def test_the_checksum_is_that_of_the_bytes_that_are_kept(tmp_path: Path) -> None:
    config = CONFIGS["int4"]
    tensors = packed_tensors(config)

    def checksum(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> str:
        changed = tensors | {name: change(tensors[name])}
        return describe_checkpoint(write(tmp_path / "m", config, changed)).checksum()

    first = checksum("model.norm.weight", torch.clone)
    assert checksum(f"{EXPERT}.weight_packed", torch.bitwise_not) != first
    assert checksum(f"{EXPERT}.weight_scale", torch.zeros_like) != first
    assert checksum(f"{EXPERT}.weight_shape", torch.zeros_like) == first


def test_layers_for_further_tokens_and_scales_of_activations_are_left_behind(tmp_path: Path) -> None:
    config = CONFIGS["fp8"]  # num_nextn_predict_layers: 1
    tensors = packed_tensors(config)
    without = base_bytes(describe_checkpoint(write(tmp_path / "a", config, tensors)))
    extra = {
        "model.layers.3.eh_proj.weight": torch.zeros(128, 256, dtype=torch.bfloat16),
        "model.layers.3.mlp.experts.0.up_proj.weight_scale_inv": torch.zeros(1, 1),
        "model.layers.1.self_attn.kv_b_proj.k_scale": torch.zeros(1),
    }
    assert base_bytes(describe_checkpoint(write(tmp_path / "b", config, tensors | extra))) == without
    beyond = {"model.layers.4.eh_proj.weight": torch.zeros(2)}
    with pytest.raises(ModelError, match=r"does not have: 'model\.layers\.4"):
        describe_checkpoint(write(tmp_path / "c", config, tensors | beyond))


def test_the_files_decide_when_the_config_packs_more(tmp_path: Path) -> None:
    """A head that lies there in bf16 is taken as it is, though the config's list leaves it out."""
    config = CONFIGS["fp8"] | {"quantization_config": DEEPSEEK["quantization_config"] | {"modules_to_not_convert": []}}
    checkpoint = describe_checkpoint(write(tmp_path / "m", config, packed_tensors(CONFIGS["fp8"])))
    assert checkpoint.tensors["lm_head.weight"].stored == StoredFormat(TensorFormat.BF16)
    head = next(tensor for tensor in iter_tensors(checkpoint.spec) if tensor.name == "lm_head.weight")
    assert make_base("published", config).format_of(head).kind is TensorFormat.FP8_BLOCK
    assert checkpoint_base(checkpoint).format_of(head).kind is TensorFormat.BF16


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (f"{EXPERT}.weight_scale", None, rf"{EXPERT}\.weight is incomplete.*weight_scale; fetch"),
        (f"{EXPERT}.weight_packed", None, rf"{EXPERT}\.weight is incomplete.*weight_packed; fetch"),
        (f"{EXPERT}.weight_scale", torch.zeros(64, 4), r"is F32 \(64, 4\).*BF16 \(64, 4\).*belong together"),
        (f"{EXPERT}.weight_packed", torch.zeros(64, 8, dtype=torch.int32), r"I32 \(64, 8\).*I32 \(64, 16\)"),
        ("model.layers.1.mlp.gate.weight", torch.zeros(8, 128, dtype=torch.int8), "dtype 'I8'"),
        (f"{EXPERT}.weight_zero_point", torch.zeros(8, 4), "does not have"),
    ],
)
def test_incomplete_and_misshapen_parts_are_named(
    tmp_path: Path, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    tensors = packed_tensors(CONFIGS["int4"])
    tensors.pop(name, None)
    changed = tensors if tensor is None else tensors | {name: tensor}
    with pytest.raises(ModelError, match=message):
        describe_checkpoint(write(tmp_path / "m", CONFIGS["int4"], changed))


def test_an_absent_packed_tensor_is_missing(tmp_path: Path) -> None:
    tensors = {name: t for name, t in packed_tensors(CONFIGS["int4"]).items() if not name.startswith(EXPERT)}
    with pytest.raises(ModelError, match=rf"missing: '{EXPERT}\.weight'"):
        describe_checkpoint(write(tmp_path / "m", CONFIGS["int4"], tensors))


def test_a_width_without_whole_groups_is_named(tmp_path: Path) -> None:
    config = json.loads(json.dumps(CONFIGS["int4"]))
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 48
    with pytest.raises(ModelError, match=r"gate_proj\.weight of shape \(64, 128\) cannot be INT4_PACKED.*48"):
        describe_checkpoint(write(tmp_path / "m", config, packed_tensors(CONFIGS["int4"])))


def test_an_unquantized_mixture_is_described_from_its_files(tmp_path: Path) -> None:
    """GLM-4.5 as published: bf16, float32 correction biases, one extra layer."""
    config = known_config("glm-4.5") | {
        "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 96, "moe_intermediate_size": 32, "n_routed_experts": 8, "vocab_size": 64,
    }  # fmt: skip
    tensors = {
        tensor.name: torch.zeros(tensor.family.shape, dtype=DTYPES[tensor.family.format])
        for tensor in iter_tensors(ArchSpec.from_config(config))
    }
    extra = {"model.layers.4.shared_head.norm.weight": torch.zeros(64)}
    checkpoint: Checkpoint = describe_checkpoint(write(tmp_path / "m", config, tensors | extra))
    assert base_bytes(checkpoint) == sum(tensor.nbytes for tensor in tensors.values())
    assert account(checkpoint.spec, checkpoint_base(checkpoint), 2) == account(
        checkpoint.spec, make_base("published", config), 2
    )
