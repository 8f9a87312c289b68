"""The memory model of this project's own process: buffers by hand, and what it refuses."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tithe.arch import ArchSpec, known_config, make_base, published_base
from tithe.errors import ConfigError
from tithe.planner.command import plan
from tithe.planner.cpu import IMPORT_BYTES, PROCESS_BYTES, cpu_side, moments, persistent_bytes
from tithe.planner.cpu_run import CpuRun, Micro
from tithe.planner.cpu_weights import (
    adapter_numbers,
    backward_adapter_bytes,
    base_bytes,
    forward_adapter_bytes,
    published_numbers,
)

CONFIG = known_config("smollm2-135m")
SPEC = ArchSpec.from_config(CONFIG)
RUN = CpuRun(SPEC, published_base(CONFIG), prompt=40, new=64)


def test_micro_batches_hold_whole_groups_or_parts_with_their_prompt():
    assert Micro.of(RUN).rows == 40 + 8 * 63  # one group of 544 rows fits 640
    split = Micro.of(replace(RUN, micro_batch_tokens=300))
    assert split.rows == 40 + 4 * 63  # balanced: 4 + 4, not 4 + 3 + 1
    assert split.segments == 5
    assert Micro.of(replace(RUN, micro_batch_tokens=1100)).rows == 2 * 544


def test_the_base_lies_in_panels_and_norms_in_float32():
    matrices = 134_515_008 - 61 * 576
    assert base_bytes(RUN) == 2 * matrices + 4 * 61 * 576  # 48 divides every row count of this model
    packed = replace(RUN, base=make_base("int4", CONFIG))
    linears = matrices - 49_152 * 576
    assert base_bytes(packed) == linears * 9 // 16 + 2 * 49_152 * 576 + 4 * 61 * 576
    assert base_bytes(replace(packed, is_packed=False)) == base_bytes(RUN)


def test_an_adapter_in_panels():
    run = replace(RUN, lora_r=4, lora_targets=("o_proj",))
    a, b = 48 * 576, 576 * 4  # A's four rows take a panel of 48
    assert forward_adapter_bytes(run) == 30 * 2 * (a + b)
    assert backward_adapter_bytes(run) == 30 * 2 * (a + b) + 30 * 2 * (576 * 4 + 48 * 576)


def test_what_experts_share_is_published_for_each_of_them():
    config = known_config("qwen3-30b-a3b")
    run = CpuRun(ArchSpec.from_config(config), published_base(config), 40, 64, lora_targets=("experts",), lora_r=2)
    shared = replace(run, lora_experts="shared_outer")
    each, outer = 2 * 128 * 48 * 3 * (2048 + 768), 2 * 48 * 3 * (2048 + 128 * 768)
    assert (adapter_numbers(run), published_numbers(run)) == (each, each)
    assert (adapter_numbers(shared), published_numbers(shared)) == (outer, each)


def test_recomputation_keeps_the_stream_alone():
    kept, again = (cpu_side(replace(RUN, recompute=r)).by_layer["activations"] for r in (False, True))
    per_row = 4 * 576 + 2 * 2 * 1536 + 4 * 576 + 4 * 9 + 2 * 576 + 2 * (3 + 1 + 2 + 1) * 32
    assert kept - again == 29 * 544 * per_row


@pytest.mark.parametrize("name", ["lora_r", "new", "rollouts", "micro_batch_tokens", "max_context"])
def test_memory_never_falls(name: str):
    """With longer prompts it can: balanced packing then divides a batch into more, smaller parts."""
    sizes = [cpu_side(replace(RUN, **{name: getattr(RUN, name) * n})).total_bytes for n in (1, 2, 4)]
    assert sizes == sorted(sizes)


def test_a_plan_for_a_processor_is_this_model():
    answer = plan("smollm2-135m", "cpu", context=128, prompt=40, new=64, batch=64, recompute=False)
    assert answer["per_gpu_bytes"]["masters"] == 4 * answer["adapter_params"]
    assert answer["per_gpu_bytes"]["optimizer"] == 8 * answer["adapter_params"]
    assert answer["fits"]
    assert answer["fewest_gpus"] == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("phase", "rollout"),
        ("tp", 2),
        ("reward_model", "qwen3-8b"),
        ("critic", "head"),
        ("optimizer_device", "host"),
        ("kv_dtype", "fp8"),
        ("windowed_kv", True),
        ("router_replay", True),
    ],
)
def test_an_option_that_is_not_counted_is_refused_by_its_name(name: str, value: object):
    with pytest.raises(ConfigError) as caught:
        plan("smollm2-135m", "cpu", **{name: value})
    assert caught.value.key == name


def test_the_version_that_is_published_is_one_of_the_live_ones():
    def adapters(n: int) -> int:
        return plan("smollm2-135m", "cpu", context=128, batch=8, live_versions=n)["per_gpu_bytes"]["adapters"]

    one = forward_adapter_bytes(RUN)
    assert adapters(2) == adapters(1)
    assert adapters(4) - adapters(2) == 2 * one


def test_a_process_holds_its_tokenizer_and_the_room_of_the_cast_before():
    side, held = cpu_side(RUN), sum(persistent_bytes(RUN).values())
    peak = max(sum(layers.values()) for layers in moments(RUN).values())
    assert side.total_bytes - held - peak == IMPORT_BYTES + PROCESS_BYTES + 340 * 49_152 + forward_adapter_bytes(RUN)
    larger = replace(RUN, lora_r=64)
    grown = forward_adapter_bytes(larger) - forward_adapter_bytes(RUN)
    freed = [cpu_side(run).by_layer["adapters"] - persistent_bytes(run)["adapters"] for run in (RUN, larger)]
    assert freed[1] - freed[0] == grown > 0


def test_what_is_assumed_is_about_a_processor():
    answer = plan("smollm2-135m", "cpu", context=128)
    told = " ".join(answer["assumptions"])
    assert "CUDA" not in told
    assert "fragmentation" not in told
    assert "micro-batches of 640 tokens" in told


def test_a_processors_plan_speaks_of_no_card(tmp_path: Path):
    page = tmp_path / "plan.html"
    text = plan("smollm2-135m", "cpu", context=128, html=str(page))["text"]
    assert "fits: one process, 16.0 GB of memory" in text
    assert "memory of the process" in text
    before_sources, heading, _ = page.read_text().partition("Efficiency factors")  # which tell where each is from
    assert heading
    for shown in (text, before_sources):
        assert not re.search(r"\bGPUs?\b|\bHBM\b|\bcards?\b|host, of each", shown)
    assert "fits: 4 GPUs" in plan("qwen2.5-7b", "4xH100", context=512)["text"]


@pytest.mark.parametrize(("model", "layout"), [("qwen3.5-397b-a17b", "shared"), ("qwen3-8b", "full")])
def test_what_is_not_modelled_is_said(model: str, layout: str):
    with pytest.raises(ConfigError, match=r"cpu|processor"):
        plan(model, "cpu", layout=layout)
