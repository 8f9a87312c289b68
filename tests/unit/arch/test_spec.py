"""Sizes, tensor names and bytes against transformers' own models and the field cases."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tithe.arch
from support.checkpoints import tiny_config
from support.refusals import answer_or_refusal
from tithe.arch import (
    ArchSpec,
    TensorFormat,
    check_buildable,
    grouped_bytes,
    kv_bytes_per_token,
    linear_shapes,
    tensor_shapes,
)
from tithe.arch.attention import Window
from tithe.arch.formats import GGML_FORMATS
from tithe.errors import ModelError

ARCHITECTURES = ["llama", "qwen2", "qwen3", "qwen3_moe"]


def spec_of(**changes: Any) -> ArchSpec:
    return ArchSpec.from_config(CONFIG | changes)


CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
}


def test_kv_and_int4_arithmetic_f17() -> None:
    spec = spec_of()
    assert kv_bytes_per_token(spec, 2) == 28672
    assert 64 * 2048 * kv_bytes_per_token(spec, 2) == 3.5 * 2**30
    assert grouped_bytes(1_500_000_000, bits=4, group=64, scale_bytes=2) == 1_500_000_000 * 0.53125
    assert round(1_500_000_000 * 0.53125 / 2**30, 3) == 0.742


def test_block_sizes_are_those_of_ggml() -> None:
    import gguf

    for tensor_format in GGML_FORMATS.values():
        sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[tensor_format]]
        assert (tensor_format.block_size, tensor_format.block_bytes) == sizes


@given(st.sampled_from(list(GGML_FORMATS.values())), st.integers(1, 9), st.integers(1, 9), st.integers(1, 4))
def test_bytes_add_up_over_rows_and_blocks(tensor_format: TensorFormat, a: int, b: int, blocks: int) -> None:
    width = blocks * tensor_format.block_size
    assert tensor_format.n_bytes((a, b, width)) == a * tensor_format.n_bytes((b, width))
    assert tensor_format.n_bytes((width,)) == blocks * tensor_format.block_bytes
    if tensor_format.is_quantized:
        with pytest.raises(ValueError, match="whole number"):
            tensor_format.n_bytes((a, width + 1))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False])
def test_names_and_shapes_are_those_transformers_saves(architecture: str, tied: bool, tmp_path: Any) -> None:
    import torch
    import transformers
    from safetensors import safe_open

    biased = {"attention_bias": True} if architecture != "qwen2" else {}
    config = tiny_config(architecture, tie_word_embeddings=tied, **biased)
    with torch.device("cpu"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  not a mapping
    assert tensor_shapes(ArchSpec.from_config(config)) == saved


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_linear_shapes_are_the_layers_weights(architecture: str) -> None:
    spec = ArchSpec.from_config(tiny_config(architecture))
    tensors = tensor_shapes(spec)
    linears = linear_shapes(spec)
    assert all(tensors[f"{name}.weight"] == shape for name, shape in linears.items())
    n_mlps = spec.n_experts or 1
    assert len(linears) == spec.n_layers * (4 + 3 * n_mlps)


def test_qwen3_moe_layer_rule() -> None:
    config = tiny_config("qwen3_moe", num_hidden_layers=6)
    assert ArchSpec.from_config(config | {"decoder_sparse_step": 2}).moe_layers == (1, 3, 5)
    spec = ArchSpec.from_config(config | {"mlp_only_layers": [0, 5]})
    assert spec.moe_layers == (1, 2, 3, 4)
    shapes = tensor_shapes(spec)
    assert "model.layers.0.mlp.gate_proj.weight" in shapes
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in shapes
    assert "model.layers.1.mlp.gate_proj.weight" not in shapes


def test_head_dim_defaults_are_those_of_transformers() -> None:
    import transformers

    for model_type, expected in (("llama", 128), ("qwen2", 128), ("qwen3", 128)):
        config = {**CONFIG, "model_type": model_type, "num_attention_heads": 24, "hidden_size": 3072}
        theirs = transformers.AutoConfig.for_model(**config)
        derived = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
        assert ArchSpec.from_config(config).head_dim == derived == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "supported: llama, mistral, .*minimax_m2, kimi_k2. Choose"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types.*each of the 28 layers"),
        ({"layer_types": ["linear_attention"] * 28}, "layer_types"),
        ({"hidden_act": 1}, "hidden_act"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic.*supported: default, linear, llama3, yarn"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"pretraining_tp": 2}, "pretraining_tp"),
        ({"num_attention_heads": 5}, "head_dim|multiple"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"hidden_size": 1536.0}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_unusable_configs_name_the_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec_of(**changes)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "'bitsandbytes'.*does not read"),
        ({"quantization_config": GPTQ | {"desc_act": True}}, "desc_act.*not run; use a release with desc_act: false"),
        ({"quantization_config": GPTQ | {"group_size": 16}}, "group_size 16.*multiples of 32"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            r"size \[64, 64",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 64 of 128 dimensions"),
    ],
)
def test_what_is_described_and_not_run_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    spec_of(**changes)
    with pytest.raises(ModelError, match=message):
        check_buildable(CONFIG | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_sliding_window": True},  # transformers' windows begin at layer 28, and there are 28
        {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": None},
        {"model_type": "mistral", "sliding_window": None},
        {"partial_rotary_factor": 1.0},
        {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    ],
)
def test_what_a_run_can_load_has_no_obstacle(changes: dict[str, Any]) -> None:
    check_buildable(CONFIG | changes)
    assert not spec_of(**changes).window.layers


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"use_sliding_window": True, "max_window_layers": 20}, range(20, 28)),
        ({"layer_types": ["full_attention", "sliding_attention"] * 14}, range(1, 28, 2)),
        ({"model_type": "mistral"}, range(28)),
    ],
)
def test_windows_are_no_obstacle(changes: dict[str, Any], layers: range) -> None:
    check_buildable(CONFIG | changes)
    assert spec_of(**changes).window == Window(4096, tuple(layers))


_ODD = st.sampled_from([None, "x", -1, 0, True, [], [[]], {}, {"a": []}, 1e300, 2**70, float("nan")])


@given(st.sampled_from([*CONFIG, "layer_types", "rope_scaling", "rope_parameters", "quantization_config"]), _ODD)
def test_no_config_value_escapes_as_another_error(key: str, value: Any) -> None:
    config = CONFIG | {key: value}
    _, said = answer_or_refusal(check_buildable, config)
    if said:
        assert said.startswith("config: ")
    else:
        shapes = tensor_shapes(ArchSpec.from_config(config))
        assert min(min(shape) for shape in shapes.values()) > 0, "what can be built has a size"


def test_planning_needs_neither_numpy_nor_torch() -> None:
    code = (
        "import sys, tithe.arch as a; a.ArchSpec; a.TensorFormat.Q4_1.n_bytes((2, 64)); "
        "sys.exit(any(name in sys.modules for name in ('numpy', 'torch', 'transformers', 'safetensors', 'gguf')))"
    )
    source = Path(tithe.arch.__file__).parents[2]
    environment = {"PYTHONPATH": str(source), "PATH": ""}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=environment).returncode == 0
