"""Attention that is described for plans: its tensors, its cache, and that no run takes it."""

from __future__ import annotations

from collections import Counter

import pytest

from tithe.arch import (
    ArchSpec,
    build_obstacles,
    known_config,
    known_names,
    kv_bytes_per_token,
    sequence_bytes,
    tensor_families,
)
from tithe.arch.described import DESCRIBED
from tithe.errors import ModelError

NAMES = [name for name in known_names() if known_config(name)["model_type"] in DESCRIBED]


def spec_of(name: str, **changes) -> ArchSpec:
    return ArchSpec.from_config(known_config(name) | changes)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_described_is_refused_by_runs(name):
    assert any("described" in obstacle for obstacle in build_obstacles(known_config(name)))


@pytest.mark.parametrize("name", NAMES)
def test_every_layer_has_one_attention(name):
    outputs = Counter(
        layer
        for family in tensor_families(spec_of(name))
        for layer in family.layers
        if family.name.endswith(("o_proj.weight", "out_proj.weight"))
    )
    assert set(outputs) == set(range(spec_of(name).n_layers))
    assert set(outputs.values()) == {1}


def test_an_indexer_has_13959168_parameters_a_layer():
    families = [f for f in tensor_families(spec_of("deepseek-v3.2")) if ".indexer." in f.name and f.is_linear]
    assert sum(f.n_parameters for f in families) == 61 * 13_959_168


def test_linear_attention_keeps_a_state_and_no_tokens():
    spec = spec_of("kimi-k3")
    assert kv_bytes_per_token(spec, 2) == 24 * 576 * 2
    state = 69 * 96 * 128 * 128 * 4
    assert sequence_bytes(spec, 1000, 2) == 1000 * 24 * 576 * 2 + state


def test_a_block_of_longcat_is_two_layers_with_one_mixture():
    spec = spec_of("longcat-flash-chat")
    assert (spec.n_layers, spec.moe_layers) == (56, tuple(range(0, 56, 2)))
    dense = [f for f in tensor_families(spec) if f.name.endswith("gate_proj.weight") and not f.is_per_expert]
    assert {layer for f in dense for layer in f.layers} == set(range(56))
    assert {f.shape for f in dense} == {(12_288, 6144)}
    assert spec.n_experts_per_token == 8  # of 12 that are taken, 256 of 768 experts compute nothing
    assert kv_bytes_per_token(spec, 2) == 64_512


@pytest.mark.parametrize(
    ("changes", "key"), [({"ffn_hidden_size": 12_289}, "ffn_hidden_size"), ({"num_layers": None}, "num_layers")]
)
def test_a_longcat_that_is_odd_or_incomplete_is_refused(changes, key):
    with pytest.raises(ModelError, match=key):
        spec_of("longcat-flash-chat", **changes)


def test_windows_bound_what_is_cached():
    spec = spec_of("mimo-v2-flash")
    every, windowed = (sequence_bytes(spec, 4096, 2, is_windowed=w) for w in (False, True))
    assert every == 4096 * (9 * 4 + 39 * 8) * 320 * 2
    assert windowed == (4096 * 9 * 4 + 128 * 39 * 8) * 320 * 2
    assert sequence_bytes(spec, 100, 2, is_windowed=True) == sequence_bytes(spec, 100, 2)


def test_an_indexers_keys_are_cached_beside_the_latents():
    assert sequence_bytes(spec_of("glm-5"), 10, 2) == 10 * (89_856 + 78 * 132)


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        ("minimax-m1", {"attn_type_list": [0, 1]}, "attn_type_list"),
        ("mimo-v2-flash", {"hybrid_layer_pattern": [2] * 48}, "hybrid_layer_pattern"),
        ("mimo-v2-flash", {"moe_layer_freq": [1]}, "moe_layer_freq"),
        ("kimi-k3", {"linear_attn_config": {"full_attn_layers": [94], "kda_layers": [1]}}, "full_attn_layers"),
        ("deepseek-v3.2", {"index_n_heads": 0}, "index_n_heads"),
    ],
)
def test_a_broken_config_names_the_key(name, changes, key):
    with pytest.raises(ModelError, match=key):
        spec_of(name, **changes)
