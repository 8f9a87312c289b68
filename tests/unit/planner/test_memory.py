"""Memory plans: properties that hold for every request, and single rules."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tithe.arch import Shard, account, exchange_bytes, iter_held
from tithe.errors import ConfigError
from tithe.planner.advice import advise
from tithe.planner.answers import fewest_gpus, longest_context, most_sequences, smallest_change, suggestions
from tithe.planner.full import gathered_parameters
from tithe.planner.layers import LAYERS
from tithe.planner.memory import largest_matrix, offload_advice, offloads
from tithe.planner.plans import plan_memory
from tithe.planner.request import PlanRequest, make_request

MODELS = (
    "smollm2-135m",
    "qwen2.5-7b",
    "llama-3.1-70b",
    "qwen3-30b-a3b",
    "gpt-oss-20b",
    "deepseek-v3",
    "glm-5",
    "kimi-k3",
)
REQUESTS = st.builds(
    dict,
    model=st.sampled_from(MODELS),
    base=st.sampled_from(["bf16", "int4", "mxfp4", "nvfp4"]),
    layout=st.sampled_from(["shared", "separate", "full"]),
    attention=st.sampled_from(["auto", "dp", "tp"]),
    phase=st.sampled_from(["rl", "rollout", "train"]),
    lora_targets=st.sampled_from([("attention",), ("all-linear",)]),
    lora_experts=st.sampled_from(["per_expert", "shared_outer"]),
    recompute=st.booleans(),
    router_replay=st.booleans(),
    critic=st.sampled_from(["none", "head", "full"]),
    lora_r=st.integers(1, 128),
    context=st.integers(64, 40_000),
    sequences=st.integers(1, 300),
    batch=st.integers(1, 2048),
)
GPUS = st.integers(2, 200)


def build(options: dict[str, Any], gpus: int = 8, **more: Any):
    options = options | more
    return make_request(options.pop("model"), f"{gpus}xB200", **options)


def total(request: PlanRequest) -> int:
    return plan_memory(request).fullest.total_bytes


@settings(max_examples=60, deadline=None)
@given(REQUESTS, GPUS, GPUS)
def test_more_gpus_never_need_more_memory_per_gpu(options: dict[str, Any], few: int, more: int):
    few, more = sorted((few, more))
    assert total(build(options, more)) <= total(build(options, few))


@settings(max_examples=40, deadline=None)
@given(REQUESTS, GPUS, st.sampled_from(["lora_r", "context", "sequences", "batch"]), st.integers(1, 500))
def test_memory_never_falls_with_rank_length_sequences_or_batch(
    options: dict[str, Any], gpus: int, name: str, added: int
):
    bigger = options | {name: options[name] + added}
    before, after = build(options, gpus), build(bigger, gpus)
    assert total(before) <= total(after)
    if name == "batch":
        assert plan_memory(before).host.total_bytes <= plan_memory(after).host.total_bytes


@settings(max_examples=40, deadline=None)
@given(REQUESTS, GPUS)
def test_layers_add_up_to_the_total_exactly(options: dict[str, Any], gpus: int):
    plan = plan_memory(build(options, gpus))
    for side in plan.sides:
        assert tuple(side.by_layer) == LAYERS
        assert sum(side.by_layer.values()) == side.total_bytes
        assert min(side.by_layer.values()) >= 0
        assert all(one.formula for one in side.layers)
    assert sum(part.n_bytes for part in plan.host.parts) == plan.host.total_bytes


@pytest.mark.parametrize("model", ["kimi-k2", "gpt-oss-120b", "llama-3.1-8b"])
@pytest.mark.parametrize("gpus", [1, 3, 8])
def test_the_base_is_the_loaders_account_of_the_fullest_rank(model: str, gpus: int):
    request = make_request(model, f"{gpus}xB200", base="int4", attention="dp")
    ranks = account(request.spec, request.base, gpus).ranks
    assert plan_memory(request).fullest.by_layer["base"] == max(rank.total.n_bytes for rank in ranks)


@pytest.mark.parametrize("model", ["kimi-k2", "deepseek-v3", "qwen3-235b-a22b", "glm-4.5", "gpt-oss-120b"])
def test_eight_ranks_hold_what_the_loader_gives_them_tensor_by_tensor(model: str):
    request = make_request(model, "8xB200", attention="dp")
    held = iter_held(request.spec, request.base, Shard(0, 8))
    assert plan_memory(request).fullest.by_layer["base"] == sum(one.n_bytes for one in held)


def test_a_reference_on_the_shared_base_is_free_and_a_second_copy_is_not():
    shared = make_request("qwen3-30b-a3b", "8xB200")
    assert plan_memory(shared).fullest.by_layer["reference"] == 0
    full = replace(shared, layout="full")
    assert plan_memory(full).fullest.by_layer["reference"] == pytest.approx(2 * 30.53e9 / 8, rel=0.01)


def test_optimizer_state_moves_to_the_host_above_two_billion():
    small = make_request("kimi-k2", "8xB200", base="int4", lora_targets=("attention",))
    large = make_request("kimi-k2", "8xB200", base="int4", lora_experts="per_expert")
    assert not offloads(small)
    assert offloads(large)
    assert plan_memory(large).fullest.by_layer["optimizer"] == 0
    assert {p.name: p.n_bytes for p in plan_memory(large).host.parts}["optimizer"] == large.adapter.total * 12
    assert "stays" in offload_advice(small.adapter.total)
    assert "host" in offload_advice(large.adapter.total)


def test_a_window_can_bound_the_cache():
    request = make_request("gpt-oss-120b", "1xH100", phase="rollout", context=8192, sequences=16)
    every, windowed = (plan_memory(replace(request, windowed_kv=w)).fullest.by_layer["kv_cache"] for w in (False, True))
    assert every == 16 * 8192 * 73_728
    assert windowed == 16 * 36_864 * (8192 + 128)  # half the layers see all, half 128 tokens


def test_a_latent_cache_is_not_divided_between_ranks_and_heads_are():
    latent = make_request("deepseek-v3", "8xB200", base="fp8", phase="rollout", tp=8, context=1024, sequences=8)
    heads = make_request("llama-3.1-70b", "8xB200", base="fp8", phase="rollout", tp=8, context=1024, sequences=8)
    assert plan_memory(latent).fullest.by_layer["kv_cache"] == 8 * 1024 * 70_272
    assert plan_memory(heads).fullest.by_layer["kv_cache"] == 8 * 1024 * 327_680 // 8


@pytest.mark.parametrize("phase", ["rollout", "train"])
def test_ranks_that_divide_experts_hold_a_round_of_their_exchange(phase: str):
    request = make_request("kimi-k2", "8xB200", base="int4", phase=phase, lora_targets=("attention",))
    buffers = [plan_memory(replace(request, attention=how)).fullest.by_layer["buffers"] for how in ("dp", "tp")]
    alone = replace(request, hardware=request.hardware.with_gpus(1))
    round_bytes = exchange_bytes(7168, 8, 8, 2, training=phase == "train")
    assert f"exchange {round_bytes:,}" in layer_of(request, "buffers").formula
    assert f"exchange {0}" in layer_of(alone, "buffers").formula
    assert buffers[0] > round_bytes > 0


def layer_of(request: PlanRequest, name: str):
    return next(one for one in plan_memory(request).fullest.layers if one.name == name)


def test_a_width_that_no_layer_has_is_counted_nowhere():
    request = make_request("qwen3-30b-a3b", "8xH100")  # its config names a dense width of 6144, all layers are mixtures
    assert largest_matrix(request.spec) == 2048 * 32 * 128
    attention, norms, router = 2 * 2048 * 4096 + 2 * 2048 * 512, 2 * 2048 + 2 * 128, 128 * 2048
    outside, expert = attention + norms + router, 3 * 2048 * 768
    assert gathered_parameters(request.spec, 1) == outside + 128 * expert
    assert gathered_parameters(request.spec, 8) == outside + 16 * expert
    full = layer_of(replace(request, layout="full", phase="train"), "buffers")
    assert full.n_bytes == 6 * gathered_parameters(request.spec, 8)


def test_every_replica_of_an_engine_sleeps_in_memory_of_its_own():
    request = make_request("qwen2.5-7b", "8xH100", base="bf16", layout="full", optimizer_device="nvme")
    parts = {part.name: part.n_bytes for part in plan_memory(request).host.parts}
    assert parts["engine_asleep"] == 8 * account(request.spec, request.base).total.n_bytes
    assert parts["optimizer"] == 2_000_000_000
    for phase in ("train", "rollout"):
        alone = plan_memory(replace(request, phase=phase)).host.parts
        assert "engine_asleep" not in {part.name for part in alone}
    assert "optimizer" not in {part.name for part in plan_memory(replace(request, phase="rollout")).host.parts}


def test_a_context_beyond_the_models_own_is_warned_of():
    within, beyond = (advise(make_request("qwen3-8b", "8xB200", context=n)) for n in (40_960, 40_961))
    assert not any("was made for" in one.text for one in within)
    assert any("40,960" in one.text and one.level == "caution" for one in beyond)


def test_answers_stand_on_the_edge():
    request = make_request("kimi-k2", "8xB200", base="int4", lora_targets=("attention",), context=16_384, sequences=64)
    gpus = fewest_gpus(request)
    assert gpus is not None
    assert plan_memory(replace(request, hardware=request.hardware.with_gpus(gpus))).fits_gpu
    assert not plan_memory(replace(request, hardware=request.hardware.with_gpus(gpus - 1))).fits_gpu
    tokens, count = longest_context(request), most_sequences(request)
    assert plan_memory(replace(request, context=tokens)).fits
    assert not plan_memory(replace(request, context=tokens + 1)).fits
    assert plan_memory(replace(request, sequences=count)).fits
    assert not plan_memory(replace(request, sequences=count + 1)).fits


def test_suggestions_are_ranked_by_bytes_and_the_smallest_that_fits_is_named():
    request = make_request("kimi-k2", "8xH200", base="int4", lora_targets=("attention",), context=16_384, sequences=64)
    found = suggestions(request)
    freed = [one.freed_bytes_per_gpu for one in found]
    assert freed == sorted(freed, reverse=True)
    assert min(freed) > 0
    smallest = smallest_change(found)
    assert smallest is not None
    assert smallest.option == "--context 8192"
    assert plan_memory(replace(request, context=8192)).fits
    assert total(request) - total(replace(request, context=8192)) == smallest.freed_bytes_per_gpu


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"phase": "serve"}, "phase"),
        ({"lora_targets": ("atention",)}, "lora.target_modules"),
        ({"lora_targets": ("experts",)}, "lora.target_modules"),
        ({"tp": 3}, "tp"),
        ({"context": 0}, "context"),
        ({"prompt": 4000, "new": 4000}, "context"),
        ({"base": "int3"}, "base"),
        ({"reward_s": math.nan}, "reward_s"),
        ({"reward_s": math.inf}, "reward_s"),
        ({"length_sigma": -1.0}, "length_sigma"),
        ({"gpu_bytes": -1}, "gpu_bytes"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], key: str):
    with pytest.raises(ConfigError) as caught:
        make_request("llama-3.1-8b", "8xH100", **options)
    assert caught.value.key == key
