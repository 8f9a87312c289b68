"""What a quantization_config says of every tensor: released configs, the dialects of ignore lists, what is refused."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.refusals import answer_or_refusal
from tithe.arch import (
    ArchSpec,
    StoredFormat,
    TensorFormat,
    TensorGroup,
    iter_tensors,
    known_config,
    make_base,
    read_quantization,
)
from tithe.arch.patterns import Dialect, ModuleList
from tithe.errors import ModelError

PACKED = {
    "kimi-k2-thinking": (TensorFormat.INT4_PACKED, {TensorGroup.ROUTED_EXPERTS}),
    "gpt-oss-120b": (TensorFormat.MXFP4, {TensorGroup.ROUTED_EXPERTS}),
    "deepseek-v3": (
        TensorFormat.FP8_BLOCK,
        {TensorGroup.ATTENTION, TensorGroup.DENSE_MLP, TensorGroup.SHARED_EXPERT, TensorGroup.ROUTED_EXPERTS},
    ),
    "minimax-m2": (TensorFormat.FP8_BLOCK, {TensorGroup.ATTENTION, TensorGroup.ROUTED_EXPERTS}),
}


def formats_of(config: dict[str, Any]) -> dict[str, StoredFormat]:
    quantization = read_quantization(config)
    assert quantization is not None
    return {tensor.name: quantization.format_of(tensor) for tensor in iter_tensors(ArchSpec.from_config(config))}


def shorter(name: str, **changes: Any) -> dict[str, Any]:
    """A released config with fewer layers and experts, so that each tensor is soon asked."""
    config = known_config(name) | {"num_hidden_layers": 12} | changes
    for key in ("n_routed_experts", "num_local_experts"):
        if key in config:
            config[key] = 16
    return config


@pytest.mark.parametrize("name", PACKED)
def test_released_models_pack_what_their_cards_say(name: str) -> None:
    """Matrices of the named groups and nothing else: no bias, norm, router, embedding or head."""
    config = shorter(name)
    kind, groups = PACKED[name]
    for tensor in iter_tensors(ArchSpec.from_config(config)):
        quantization = read_quantization(config)
        assert quantization is not None
        is_packed = tensor.family.group in groups and tensor.family.is_linear
        plain = TensorFormat.F32 if tensor.name.endswith("e_score_correction_bias") else TensorFormat.BF16
        assert quantization.format_of(tensor).kind is (kind if is_packed else plain), tensor.name


def test_single_layers_can_be_left_out() -> None:
    ignored = ["model.layers.1", "model.layers.2.mlp.experts.3.up_proj", "lm_head"]
    config = shorter("deepseek-v3", first_k_dense_replace=1)
    config["quantization_config"] |= {"modules_to_not_convert": ignored}
    formats = formats_of(config)
    plain = {name for name, stored in formats.items() if stored.kind is TensorFormat.BF16 and "proj" in name}
    layer = {name for name in formats if name.startswith("model.layers.1.") and "proj" in name}
    assert plain == layer | {"model.layers.2.mlp.experts.3.up_proj.weight"}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "modules_to_not_convert": ["v_proj"]}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.*.self_attn*"]}


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (GPTQ, StoredFormat(TensorFormat.GPTQ, 64, act_order=True)),
        (
            GPTQ | {"desc_act": False, "checkpoint_format": "gptq_v2"},
            StoredFormat(TensorFormat.GPTQ, 64, gptq_v2=True),
        ),
        (AWQ, StoredFormat(TensorFormat.AWQ)),
        (NVFP4, StoredFormat(TensorFormat.NVFP4)),
    ],
)
def test_other_methods_pack_the_linears_of_the_layers(method: dict[str, Any], expected: StoredFormat) -> None:
    formats = formats_of(known_config("llama-3.1-8b") | {"num_hidden_layers": 1, "quantization_config": method})
    layer = "model.layers.0."
    assert formats[f"{layer}mlp.down_proj.weight"] == expected
    assert formats[f"{layer}self_attn.v_proj.weight"].kind.is_compound == (method is not NVFP4 and method is not AWQ)
    assert formats[f"{layer}self_attn.q_proj.weight"].kind.is_compound == (method is not NVFP4)
    for name in ("lm_head.weight", "model.embed_tokens.weight", f"{layer}input_layernorm.weight"):
        assert formats[name] == StoredFormat(TensorFormat.BF16)


def compressed(**changes: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True} | changes
    groups = {"group_0": {"targets": ["re:.*up_proj"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


def test_targets_and_group_size_of_compressed_tensors() -> None:
    formats = formats_of(known_config("llama-3.1-8b") | {"num_hidden_layers": 1, "quantization_config": compressed()})
    packed = {name: stored for name, stored in formats.items() if stored.kind.is_compound}
    assert packed == {"model.layers.0.mlp.up_proj.weight": StoredFormat(TensorFormat.INT4_PACKED, 128)}


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes'.*known: compressed-tensors, fp8, mxfp4, modelopt, gptq"),
        ({"bits": 4}, "quant_method is missing"),
        ({"quant_method": "fp8"}, "weight_block_size is 'None'"),
        ({"quant_method": "fp8", "weight_block_size": [128, 64]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": "x"}, "modules_to_not"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["("]}, r"'\('.*pattern"),
        (GPTQ | {"bits": 8}, "bits is 8"),
        (GPTQ | {"group_size": -1}, "group_size is '-1'"),
        (GPTQ | {"checkpoint_format": "marlin"}, "'marlin'; known: gptq, gptq_v2"),
        (GPTQ | {"dynamic": {"-:.*gate": {}}}, "dynamic"),
        (AWQ | {"version": "gemv"}, "'gemv'"),
        (AWQ | {"zero_point": False}, "zero points"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "'FP8'"),
        (compressed(num_bits=8), "symmetric int 8 group"),
        (compressed(symmetric=False), "asymmetric int 4 group"),
        (compressed(strategy="channel"), "int 4 channel"),
        (compressed() | {"format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
        ({"quant_method": "compressed-tensors"}, "config_groups is empty"),
        ("gptq", "quantization_config is 'gptq'; an object"),
    ],
)
def test_what_is_not_read_is_named(quantization: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_quantization({"quantization_config": quantization})


KEYS = ["quant_method", "config_groups", "weights", "targets", "format", "ignore", "bits", "weight_block_size", "a"]
_VALUES = st.recursive(
    st.sampled_from([None, True, 4, -1, 0.5, "Linear", "re:(", "int", "gptq", "fp8", "compressed-tensors"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(KEYS), _VALUES), st.sampled_from(["fp8", "gptq", "awq", "compressed-tensors"]))
def test_no_value_escapes_as_another_error(quantization: dict[str, Any], method: str) -> None:
    config = {"quantization_config": quantization | {"quant_method": method}}
    found, said = answer_or_refusal(read_quantization, config)
    if found is None:
        assert said.startswith("config: ")
    else:
        assert found.method == method
        assert all(isinstance(rule.stored.kind, TensorFormat) for rule in found.rules)


# ------------------------------------------------------------------ ignore lists

MODULES = [
    "lm_head",
    "model.layers.1.mlp.gate",
    "model.layers.1.mlp.gate_proj",
    "model.layers.11.self_attn.q_proj",
    "model.layers.1.self_attn.q_proj",
    "model.layers.3.mlp.experts.17.down_proj",
    "model.layers.3.mlp.shared_experts.down_proj",
    "model.layers.10.block_sparse_moe.experts.5.w1",
]
ENTRIES = [
    *MODULES,
    "gate",
    "model.layers.1",
    "model.layers.*.self_attn",
    "model.layers.*.mlp.gate",
    "experts.17.down_proj",
    "mlp",
    "a|lm_head",
    "model.layers.(1|3)",
]


def transformers_rule() -> Callable[[str, list[str]], bool]:
    """`should_convert_module` from its own file: importing its package takes many seconds."""
    root = importlib.util.find_spec("transformers")
    assert root is not None
    assert root.origin is not None
    path = Path(root.origin).parent / "quantizers" / "quantizers_utils.py"
    spec = importlib.util.spec_from_file_location("quantizers_utils", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.should_convert_module


SHOULD_CONVERT = transformers_rule()


@given(st.sampled_from(MODULES), st.lists(st.sampled_from(ENTRIES), max_size=3))
def test_the_dialect_of_transformers_is_its_own(module: str, entries: list[str]) -> None:
    assert ModuleList(entries, Dialect.TRANSFORMERS).has(module) == (not SHOULD_CONVERT(module, entries))


@pytest.mark.parametrize(
    ("dialect", "entry", "expected"),
    [
        (Dialect.COMPRESSED_TENSORS, "lm_head", ["lm_head"]),
        (Dialect.COMPRESSED_TENSORS, "gate", []),
        (Dialect.COMPRESSED_TENSORS, r"re:.*mlp\.gate", MODULES[1:3]),
        (Dialect.COMPRESSED_TENSORS, r"re:.*mlp\.gate$", MODULES[1:2]),
        (Dialect.COMPRESSED_TENSORS, "re:self_attn", []),
        (Dialect.GLOB, "model.layers.1*", [MODULES[1], MODULES[2], MODULES[3], MODULES[4], MODULES[7]]),
        (Dialect.GLOB, "*.w?", [MODULES[7]]),
        (Dialect.PART, "gate", MODULES[1:3]),
        (Dialect.PART, "experts", MODULES[5:]),
    ],
)
def test_the_other_dialects(dialect: Dialect, entry: str, expected: list[str]) -> None:
    assert [module for module in MODULES if ModuleList([entry], dialect).has(module)] == expected


PIECES = [".", ".*", r"\.", r"\d", r"\d+", r"\w", "(", ")", "|", "e", "layers", "experts", "?", "$", "^", "[3-5]", "1"]


@given(st.lists(st.sampled_from(PIECES), max_size=6), st.sampled_from([d for d in Dialect if d is not Dialect.GLOB]))
def test_a_list_blind_to_numbers_answers_alike_for_numbers_of_one_length(pieces: list[str], dialect: Dialect) -> None:
    prefix = "re:" if dialect is Dialect.COMPRESSED_TENSORS else ""
    try:
        modules = ModuleList([prefix + "".join(pieces)], dialect)
    except ModelError:
        return
    if modules.is_number_blind:
        for numbers in (("3", "7", "0"), ("10", "47", "99"), ("100", "383")):
            answers = {modules.has(f"model.layers.{n}.mlp.experts.{m}.w") for n in numbers for m in numbers}
            assert len(answers) == 1
            assert len({modules.has(f"e{n}") for n in numbers}) == 1


def test_lists_with_numbers_or_sets_are_not_blind() -> None:
    for entry in ("model.layers.3", "re:.*[a-z]", r"re:(?P<x>.)(?P=x)", r"re:(.)\1", r"re:\N{DIGIT ONE}"):
        assert not ModuleList([entry], Dialect.COMPRESSED_TENSORS).is_number_blind
    assert ModuleList(["lm_head", r"re:.*mlp\.(gate|up)_proj.*", r"re:.*layers\.\d+\."], Dialect.PART).is_number_blind


@pytest.mark.parametrize("name", ["int4", "mxfp4", "nvfp4"])
def test_named_bases_pack_experts_or_a_dense_models_linears(name: str) -> None:
    for model, groups in (
        ("qwen3-30b-a3b", {TensorGroup.ROUTED_EXPERTS}),
        ("llama-3.1-8b", {TensorGroup.ATTENTION, TensorGroup.DENSE_MLP}),
    ):
        config = known_config(model) | {"num_hidden_layers": 1}
        base = make_base(name, config)
        tensors = list(iter_tensors(ArchSpec.from_config(config)))
        assert {tensor.family.group for tensor in tensors if base.format_of(tensor).kind.is_compound} == groups
