"""Names, shapes and features of the described architectures against transformers' config classes and modules.

transformers keeps a layer's experts fused in memory; `revert_weight_conversion` is what `save_pretrained` applies, so
that what it gives are the names and shapes of the published checkpoints.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from tithe.arch import (
    ARCHITECTURES,
    ArchSpec,
    known_config,
    known_names,
    kv_bytes_per_token,
    linear_shapes,
    tensor_families,
    tensor_shapes,
)
from tithe.arch.described import DESCRIBED
from tithe.errors import ModelError

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
GLM: dict[str, Any] = {
    "first_k_dense_replace": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "head_dim": 24,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("mistral", {}),
    ("mistral", {"head_dim": 32, "sliding_window": None, "tie_word_embeddings": True}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
    ("qwen3", {}),
    ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1]}),
    ("mixtral", {"num_local_experts": 4}),
    ("mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1, "head_dim": 8, "sliding_window": 128}),
    ("deepseek_v3", DEEPSEEK | {"n_shared_experts": 2}),
    ("deepseek_v3", DEEPSEEK | {"q_lora_rank": None, "attention_bias": True, "first_k_dense_replace": 0}),
    ("deepseek_v3", DEEPSEEK | {"first_k_dense_replace": 3, "tie_word_embeddings": True}),
    ("glm4_moe", GLM | {"attention_bias": True, "use_qk_norm": True}),
    ("glm4_moe", GLM | {"n_shared_experts": 3, "partial_rotary_factor": 0.25}),
    ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
    ("gpt_oss", {"num_local_experts": 4, "attention_bias": False, "sliding_window": 32}),
    ("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8}),
]
IDS = [f"{architecture}-{number}" for number, (architecture, _) in enumerate(CASES)]


def meta_model(architecture: str, changes: dict[str, Any]) -> Any:
    """The real model class on the meta device: shapes without storage."""
    sizes = SMALL if architecture != "deepseek_v3" else {**SMALL, **DEEPSEEK}
    config = transformers.AutoConfig.for_model(architecture, **(sizes | changes))
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def published(model: Any) -> dict[str, tuple[int, ...]]:
    """What `save_pretrained` would write."""
    tensors = revert_weight_conversion(model, model.state_dict())
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    return {name: tuple(tensor.shape) for name, tensor in tensors.items() if name not in tied}


def test_every_architecture_has_a_case() -> None:
    assert {architecture for architecture, _ in CASES} == set(ARCHITECTURES)


@pytest.mark.parametrize(("architecture", "changes"), CASES, ids=IDS)
def test_names_and_shapes_are_those_of_published_checkpoints(architecture: str, changes: dict[str, Any]) -> None:
    model = meta_model(architecture, changes)
    assert tensor_shapes(ArchSpec.from_config(model.config.to_dict())) == published(model)


@pytest.mark.parametrize(("architecture", "changes"), CASES, ids=IDS)
def test_families_are_the_tensors_in_fewer_words(architecture: str, changes: dict[str, Any]) -> None:
    spec = ArchSpec.from_config(meta_model(architecture, changes).config.to_dict())
    shapes, families = tensor_shapes(spec), tensor_families(spec)
    assert sum(family.n_tensors for family in families) == len(shapes)
    assert sum(family.n_parameters for family in families) == sum(math.prod(shape) for shape in shapes.values())
    assert all(shapes[f"{name}.weight"] == shape for name, shape in linear_shapes(spec).items())


@pytest.mark.parametrize(("architecture", "changes"), CASES, ids=IDS)
def test_features_are_those_that_the_modules_have(architecture: str, changes: dict[str, Any]) -> None:
    """Rotary width, windows and routing as the built modules hold them, not as this package reads the config."""
    model = meta_model(architecture, changes)
    spec = ArchSpec.from_config(model.config.to_dict())
    with torch.device("cpu"):
        rotary = type(model.model.rotary_emb)(model.config)
    assert 2 * rotary.inv_freq.shape[0] == spec.rotary_dim
    assert spec.rope_theta == model.config.rope_parameters["rope_theta"]
    for layer, block in enumerate(model.model.layers):
        window = getattr(block.self_attn, "sliding_window", None) or 0
        if architecture in ("mistral", "mixtral"):
            window = model.config.sliding_window or 0
        assert window == (spec.window.size if layer in spec.window.layers else 0)
        assert hasattr(block.mlp, "experts") == (layer in spec.moe_layers)
        if hasattr(block.mlp, "experts"):
            router = getattr(block.mlp, "gate", None) or block.mlp.router
            assert router.top_k == spec.n_experts_per_token
            assert getattr(router, "num_group", 1) == spec.routing.n_groups
            assert getattr(router, "topk_group", 1) == spec.routing.n_groups_chosen
            assert getattr(router, "routed_scaling_factor", 1.0) == spec.routing.scale
            assert getattr(router, "norm_topk_prob", True) == spec.norm_topk_prob
        if spec.clamped_gate:
            experts = block.mlp.experts
            assert (experts.alpha, experts.limit) == (spec.clamped_gate.alpha, spec.clamped_gate.limit)


def test_correction_biases_are_where_the_choice_and_the_weight_differ() -> None:
    """`sigmoid` routing: a bias of one expert changes the choice and no weight."""
    for architecture in ("deepseek_v3", "glm4_moe", "minimax_m2"):
        changes = next(changes for name, changes in CASES if name == architecture)
        spec = ArchSpec.from_config(meta_model(architecture, changes).config.to_dict())
        assert spec.routing.has_correction_bias
        assert spec.routing.scoring == "sigmoid"
        biases = [name for name in tensor_shapes(spec) if name.endswith("e_score_correction_bias")]
        assert len(biases) == len(spec.moe_layers)
    spec = ArchSpec.from_config(known_config("gpt-oss-20b"))
    assert (spec.routing.scoring, spec.has_sinks) == ("softmax_of_chosen", True)
    assert not spec.routing.has_correction_bias


LARGEST = ("kimi-k2", "deepseek-v3", "qwen3-235b-a22b", "glm-4.5", "gpt-oss-120b", "minimax-m2")


def full_size_model(name: str) -> tuple[ArchSpec, Any]:
    """The description and transformers' module of a released model, on the meta device."""
    config = known_config(name)
    config.pop("quantization_config", None)
    renamed = {"model_type": "deepseek_v3"} if config["model_type"] == "kimi_k2" else {}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**(config | renamed)))
    return ArchSpec.from_config(config), model


@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_models_are_tensor_by_tensor_what_transformers_builds(name: str) -> None:
    """Up to 69975 names and shapes."""
    spec, model = full_size_model(name)
    assert tensor_shapes(spec) == published(model)


BUILT = {"deepseek-v3.2", "glm-5", "glm-5.2", "qwen3.5-397b-a17b"}
"""Of the models described for plans only, those that transformers builds from the same config. It does not know
MiMo-7B, Ling, MiniMax-M1 and Kimi-K3's latent experts, and reads other keys of MiMo-V2-Flash."""
DESCRIBED_ONLY = {name for name in known_names() if known_config(name)["model_type"] in DESCRIBED} - BUILT


@pytest.mark.parametrize("name", [name for name in known_names() if name not in DESCRIBED_ONLY.union(LARGEST)])
def test_known_models_have_as_many_parameters_as_transformers_builds(name: str) -> None:
    """Buffers that are saved (correction biases) count, those that are not do not."""
    spec, model = full_size_model(name)
    theirs = sum(math.prod(tensor.shape) for tensor in model.state_dict().values())
    tied = math.prod(model.lm_head.weight.shape) if model.config.tie_word_embeddings else 0
    assert sum(family.n_parameters for family in tensor_families(spec)) == theirs - tied


def test_kimi_k2_is_deepseek_v3_under_its_own_name() -> None:
    kimi = known_config("kimi-k2")
    assert ArchSpec.from_config(kimi) == ArchSpec.from_config(kimi | {"model_type": "deepseek_v3"})


def test_latent_attention_caches_one_latent_and_one_key() -> None:
    assert kv_bytes_per_token(ArchSpec.from_config(known_config("kimi-k2")), 2) == 61 * (512 + 64) * 2 == 70_272
    assert kv_bytes_per_token(ArchSpec.from_config(known_config("gpt-oss-120b")), 2) == 73_728


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("kimi-k2", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("kimi-k2", {"scoring_func": "softmax"}, "scoring_func.*sigmoid"),
        ("kimi-k2", {"n_group": 5}, "n_group 5 does not divide n_routed_experts 384"),
        ("kimi-k2", {"topk_group": 2}, "topk_group is '2'.*from 1 to 1"),
        ("kimi-k2", {"first_k_dense_replace": 62}, "first_k_dense_replace"),
        ("kimi-k2", {"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ("kimi-k2", {"n_routed_experts": 10**6}, "n_routed_experts"),
        ("minimax_m2", {"rotary_dim": 256}, "rotary_dim is '256'.*from 1 to 128"),
        ("minimax_m2", {"shared_intermediate_size": 8}, "shared_intermediate_size"),
        ("gpt-oss-20b", {"num_experts_per_tok": 33}, "num_experts_per_tok"),
        ("glm-4.5", {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers"),
    ],
)
def test_impossible_sizes_name_the_key(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ArchSpec.from_config(known_config(name.replace("_", "-")) | changes)
