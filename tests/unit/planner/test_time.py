"""Time: rooflines by hand, tails, sides that wait for each other, and calibration by a run."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tithe.errors import ConfigError
from tithe.planner.calibrate import calibrated, read_run
from tithe.planner.command import plan
from tithe.planner.factors import DEFAULTS, SOURCES, factor_names
from tithe.planner.layouts import best_layout
from tithe.planner.request import PlanRequest, make_request
from tithe.planner.roofline import publish_s, step_costs, train_flops_per_token, train_s_per_token, work_of
from tithe.planner.step import length_quantiles, plan_step, sampling_s

IDEAL = DEFAULTS.updated(
    dict.fromkeys(factor_names(), 1.0) | {name: 0.0 for name in factor_names() if name.endswith("_s")}
)


def kimi(hardware: str = "8xB200", **changed: Any) -> PlanRequest:
    options: dict[str, Any] = {"base": "int4", "lora_targets": ("attention",), "context": 16_384, "sequences": 64}
    return make_request("kimi-k2", hardware, **(options | changed))


def test_every_factor_has_a_source():
    assert set(SOURCES) == set(factor_names())


def test_a_tick_of_a_dense_model_reads_its_weights_once():
    request = make_request("llama-3.1-70b", "1xB200", base="bf16", phase="rollout", context=2048)
    costs = step_costs(request, IDEAL, request.hardware, 1)
    weights = 2 * (70_553_706_496 - 128_256 * 8192)  # without the embedding, of which a row is read
    assert costs.decode_tick_s(1) == pytest.approx(weights / 7.7e12, rel=1e-6)
    assert costs.decode_s_per_cached_token == pytest.approx(327_680 / 7.7e12, rel=1e-6)


def test_experts_are_read_as_live_sequences_cover_them():
    request = kimi(phase="rollout")
    costs = step_costs(request, IDEAL, request.hardware, 8)
    experts = 60 * 48 * 3 * 2048 * 7168 * 0.5625
    assert costs.decode_experts_s == pytest.approx(experts / 7.7e12, rel=1e-6)
    one, many = (costs.decode_tick_s(n) - costs.decode_dense_s for n in (1, 1000))
    assert one == pytest.approx(costs.decode_experts_s * 8 / 384)
    assert many == pytest.approx(costs.decode_experts_s, rel=1e-3)


def test_a_tick_reads_of_the_cache_what_windows_and_indexers_leave():
    windowed = make_request("gpt-oss-120b", "1xB200", phase="rollout", context=9216, prompt=1024, new=8192)
    per_token = step_costs(windowed, IDEAL, windowed.hardware, 1).decode_s_per_cached_token
    held = 1024 + 4096  # half of 36 layers look back 128 tokens
    assert per_token * 7.7e12 * held == pytest.approx(18 * 2048 * (held + 128))
    picked = make_request("glm-5", "1xB200", base="fp8", phase="rollout", context=9216, prompt=1024, new=8192)
    per_token = step_costs(picked, IDEAL, picked.hardware, 1).decode_s_per_cached_token
    assert per_token * 7.7e12 * held == pytest.approx(78 * (576 * 2 * 2048 + 132 * held))


def test_attention_costs_what_it_sees():
    dense = work_of(make_request("llama-3.1-8b", "1xB200").spec)
    assert dense.attend(100.0) == 100.0 * 32 * 2 * 32 * 256
    half = work_of(make_request("gpt-oss-120b", "1xB200").spec)
    layer = 2 * 64 * 128
    assert half.attend(50.0) == 50.0 * 36 * layer  # no sequence of 100 tokens is longer than a window of 128
    positions = sum(min(i, 128) for i in range(10_000)) / 10_000
    assert half.attend(5000.0) == pytest.approx(18 * layer * (5000.0 + positions), rel=1e-3)
    hybrid = work_of(make_request("mimo-v2-flash", "1xB200").spec)
    assert hybrid.attend(64.0) == 64.0 * 48 * 2 * 64 * (192 + 128)


def test_training_an_adapter_skips_the_gradients_of_weights():
    request = make_request("llama-3.1-8b", "8xH100", base="bf16", context=16, recompute=False, reference=False)
    active = work_of(request.spec).active
    assert active == 8_030_261_248 - 128_256 * 4096
    assert train_flops_per_token(request)[0] == pytest.approx(4 * active)
    full = replace(request, layout="full")
    assert train_flops_per_token(replace(full, phase="train"))[0] == pytest.approx(6 * active)
    assert train_flops_per_token(full)[0] == pytest.approx(8 * active)  # the policy's own log-probs
    assert train_flops_per_token(replace(request, recompute=True, reference=True))[0] == pytest.approx(8 * active)
    attended = 2 * 32 * 32 * (128 + 128)  # layers, heads, query·key and weights·values
    assert train_flops_per_token(request)[1] == pytest.approx(3 * attended * (request.prompt_tokens + 7) / 2)


def test_short_sequences_share_a_micro_batchs_fixed_time():
    def overhead(**options: Any) -> float:
        request = make_request("llama-3.1-8b", "8xH100", base="bf16", **options)
        with_it, without = (
            train_s_per_token(request, replace(DEFAULTS, train_micro_s=s), request.hardware) for s in (1.0, 0.0)
        )
        return with_it - without

    assert overhead(context=1024) == pytest.approx(1 / (8 * 16384))
    assert overhead(context=32768) == pytest.approx(1 / (8 * 32768))
    assert overhead(context=1024, micro_batch_tokens=2048) == pytest.approx(1 / (8 * 2048))


def test_a_replica_over_machines_and_an_indexer_add_to_every_tick():
    none = replace(DEFAULTS, decode_collective_node_s=0.0, decode_indexer_s=0.0)
    each = replace(none, decode_collective_node_s=1.0, decode_indexer_s=1000.0)

    def added(model: str, gpus: int) -> float:
        request = make_request(model, f"{gpus}xH100", base="fp8", attention="dp", phase="rollout")
        after, before = (step_costs(request, f, request.hardware, gpus).decode_fixed_s for f in (each, none))
        return after - before

    assert added("deepseek-v3", 8) == 0.0
    assert added("deepseek-v3", 32) == pytest.approx(61 * 3)  # hops of a ring over four machines
    assert added("glm-5", 8) == pytest.approx(78 * 1000)


def test_a_step_of_every_parameter_takes_more_than_its_phases():
    time = plan_step(kimi(layout="full", hardware="512xH100"), replace(DEFAULTS, full_step=0.5))
    assert time.idle_s == pytest.approx(0.5 * (time.sample_s + time.update_s + time.sync_s))


def test_the_best_layout_is_that_of_calibrated_factors():
    request = kimi(hardware="16xB200", context=2048, attention="tp")
    slow_links = replace(DEFAULTS, decode_collective_s=1.0, decode_collective_node_s=1.0)
    chosen = {
        best_layout(request, factors) for factors in (DEFAULTS, replace(DEFAULTS, train_flops_moe=1e-4), slow_links)
    }
    assert len(chosen) > 1


def test_an_adapter_is_published_faster_than_every_weight():
    request = kimi()
    adapter, full = (publish_s(r, DEFAULTS, r.hardware) for r in (request, replace(request, layout="full")))
    assert adapter < 2.0
    assert full > 10.0


def test_lengths_have_the_wanted_mean_and_bound():
    lengths = length_quantiles(1000.0, 8000.0, 0.99)
    assert sum(lengths) / len(lengths) == pytest.approx(1000.0, rel=1e-3)
    assert max(lengths) <= 8000.0
    assert length_quantiles(500.0, 8000.0, 0.0) == pytest.approx([500.0] * 64)


def test_a_long_tail_costs_time_and_a_full_engine_saves_it():
    request = kimi()
    costs = step_costs(request, DEFAULTS, request.hardware, 8)

    def seconds(sigma: float, live: int) -> float:
        lengths = length_quantiles(2000.0, 16_000.0, sigma)
        return sampling_s(costs, rollouts=256, live=live, prompt=512, lengths=lengths)

    assert seconds(0.0, 64) < seconds(0.5, 64) < seconds(1.0, 64)
    assert seconds(1.0, 256) < seconds(1.0, 64)


def test_separate_sides_wait_for_the_slower_and_add_up():
    request = kimi(layout="separate")
    time = plan_step(request, DEFAULTS)
    assert time.idle_s >= 0
    assert sum(time.parts.values()) == pytest.approx(time.total_s)
    alone = plan_step(replace(request, layout="shared"), DEFAULTS)
    assert alone.idle_s == 0
    slow = plan_step(replace(request, reward_s=1e6), DEFAULTS)
    assert slow.total_s == pytest.approx(1e6 * 4)
    assert slow.idle_s > 0.9 * slow.total_s


def test_rewards_are_waited_for_on_a_shared_base():
    request = kimi(reward_s=3.0, batch=128)
    assert plan_step(request, DEFAULTS).reward_s == 6.0  # 128 on 64 workers


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of 2 batches of 8 rollouts: 16 tokens on 4 of a prompt, 2 s of training, 0.5 s of publishing."""
    rows = [
        {"kind": "train", "groups": 1, "train_s": 2.0, "publish_s": 0.5, "reward_s": 1.6},
        {"kind": "rollout", "tok_per_s": 50.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows * 2))
    (tmp_path / "run.json").write_text(json.dumps({"machine": {"processor": "x86_64"}}))
    with closing(sqlite3.connect(tmp_path / "pool.sqlite")) as db:
        db.execute("CREATE TABLE rollout_group (group_id INTEGER, prompt_tokens BLOB)")
        db.execute("CREATE TABLE rollout (group_id INTEGER, n_tokens INTEGER, cause TEXT)")
        db.executemany("INSERT INTO rollout_group VALUES (?, ?)", [(g, b"\0" * 16) for g in (1, 2)])
        db.executemany("INSERT INTO rollout VALUES (?, 16, NULL)", [(1 + i % 2,) for i in range(16)])
        db.execute("INSERT INTO rollout VALUES (1, 9999, 'timeout')")
        db.commit()
    return tmp_path


def test_a_run_is_read_as_data(run_dir: Path):
    run = read_run(str(run_dir))
    assert (run.rollouts, run.mean_new_tokens, run.mean_prompt_tokens) == (16, 16.0, 4.0)
    assert run.log_length_sigma == 0.0
    assert run.train_s_per_token == pytest.approx(2.0 / (8 * 20))
    assert run.reward_s_per_rollout == pytest.approx(0.2)
    assert run.is_cpu


def test_a_calibrated_plan_of_the_same_machine_says_what_the_run_said(run_dir: Path):
    request = make_request("smollm2-135m", "1xCPU", context=64, batch=8, sequences=8)
    run = read_run(str(run_dir))
    request, factors, sources = calibrated(request, DEFAULTS, run)
    time = plan_step(request, factors)
    assert time.costs.train_s_per_token == pytest.approx(run.train_s_per_token)
    assert time.costs.publish_s == pytest.approx(0.5)
    assert time.decode_tok_per_s == pytest.approx(50.0, rel=0.01)
    assert (request.new_tokens, request.prompt_tokens) == (16, 4)
    assert "16 rollouts" in sources["publish_fixed_s"]


def test_the_engines_own_seconds_count_and_not_the_training_beside_it(run_dir: Path):
    """On a shared lane the clock of `tok_per_s` runs through the training."""
    rows = [
        {"kind": "rollout", "tok_per_s": 50.0, "generated_tok": 128.0, "decode_s": 1.0, "prefill_s": 0.28},
        {"kind": "rollout", "tok_per_s": 40.0, "generated_tok": 90.0, "decode_s": 1.0, "prefill_s": 0.0},
        {"kind": "rollout", "generated_tok": 0.0, "decode_s": 0.0, "prefill_s": 0.0},
        {"kind": "rollout", "tok_per_s": 60.0, "generated_tok": 128.0, "decode_s": 1.0, "prefill_s": 0.28},
    ]
    (run_dir / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    assert read_run(str(run_dir)).tok_per_s == pytest.approx(100.0)
    for row in rows:
        row.pop("prefill_s")
    (run_dir / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    assert read_run(str(run_dir)).tok_per_s == 50.0


def test_a_calibrated_plan_does_not_ask_to_be_calibrated(run_dir: Path):
    sizes = {"context": 64, "batch": 8, "sequences": 8}
    assert "calibrate it with a run" in plan("smollm2-135m", "cpu", **sizes)["text"]
    text = plan("smollm2-135m", "cpu", calibrate=str(run_dir), **sizes)["text"]
    assert "nominal" not in text
    assert "speed of sampling as in a run of 16 rollouts" in text
    (run_dir / "metrics.jsonl").write_text('{"kind": "rollout", "tok_per_s": 50.0}')
    text = plan("smollm2-135m", "cpu", calibrate=str(run_dir), **sizes)["text"]
    assert "speed of training is nominal" in text


def test_a_run_on_a_processor_says_nothing_about_a_gpus_rates(run_dir: Path):
    request, factors, sources = calibrated(kimi(), DEFAULTS, read_run(str(run_dir)))
    assert factors == DEFAULTS
    assert request.new_tokens == 16
    assert "publish_fixed_s" not in sources


def test_a_run_in_an_oddly_named_folder_with_broken_numbers_is_read(run_dir: Path):
    rows = (run_dir / "metrics.jsonl").read_text()
    (run_dir / "metrics.jsonl").write_text(rows + '\n{"train_s": Infinity, "publish_s": NaN, "groups": true}')
    odd = run_dir / "a run?#1%"
    odd.mkdir()
    for name in ("metrics.jsonl", "run.json", "pool.sqlite"):
        (run_dir / name).rename(odd / name)
    assert read_run(str(odd)).train_s_per_token == pytest.approx(2.0 / (8 * 20))
    (odd / "metrics.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_run(str(odd))


@pytest.mark.parametrize("missing", ["metrics.jsonl", "pool.sqlite"])
def test_what_a_run_lacks_is_named(run_dir: Path, missing: str):
    (run_dir / missing).unlink()
    with pytest.raises(ConfigError, match=missing):
        read_run(str(run_dir))


def test_the_page_is_whole_and_escaped(tmp_path: Path):
    (tmp_path / "<b>").mkdir()
    config = Path(__file__).parents[3] / "src" / "tithe" / "arch" / "known" / "qwen3-30b-a3b.json"
    (tmp_path / "<b>" / "config.json").write_text(config.read_text())
    page = tmp_path / "plan.html"
    plan(str(tmp_path / "<b>"), "8xH100", base="int4", html=str(page))
    text = page.read_text()
    assert "<b>/config" not in text
    assert "&lt;b&gt;" in text
    assert "<svg" in text
    assert "<script" not in text
    with pytest.raises(ConfigError, match="cannot write"):
        plan("qwen3-30b-a3b", "8xH100", base="int4", html=str(tmp_path / "no" / "plan.html"))
