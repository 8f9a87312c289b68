"""The planner's costs in a simulation."""

from __future__ import annotations

import pytest

from tithe.config import load_config
from tithe.errors import UserError
from tithe.planner.costs import StepCosts
from tithe.simulator import Fixed, Options, PublishCosts, Workload, simulate, simulate_target
from tithe.simulator.planned import PlannedCosts, plan_of
from unit.simulator.scenes import bounds, check, scene

STEP = StepCosts(
    **{
        **dict.fromkeys(StepCosts.__dataclass_fields__, 0.0),
        "prefill_s_per_token": 0.001,
        "decode_fixed_s": 0.01,
        "decode_dense_s": 0.02,
        "n_experts": 0,
        "experts_per_token": 0,
        "decode_s_per_cached_token": 0.0001,
        "train_s_per_token": 0.002,
        "publish_s": 0.5,
    }
)


def test_a_tick_costs_what_the_planner_says():
    costs = PlannedCosts(STEP)
    tick_s = costs.tick_s(prefill_tokens=100, sequences=4, context_tokens=400)
    assert tick_s == pytest.approx(100 * 0.001 + STEP.decode_tick_s(4, 100.0)) == pytest.approx(0.17)
    assert costs.tick_s(prefill_tokens=100, sequences=0, context_tokens=0) == pytest.approx(0.1)
    assert costs.publish == PublishCosts(engine_s=0.5)


def test_replicas_on_one_lane_divide_the_sequences():
    one, two = PlannedCosts(STEP), PlannedCosts(STEP, replicas=2)
    whole = one.tick_s(prefill_tokens=50, sequences=4, context_tokens=400)
    assert two.tick_s(prefill_tokens=100, sequences=8, context_tokens=800) == pytest.approx(whole)


def test_a_step_by_hand():
    work = Workload(prompt_tokens=Fixed(10), new_tokens=Fixed(3), reward_s=Fixed(1.0))
    outcome = simulate(scene(bounds(0), PlannedCosts(STEP), work))
    check(outcome)
    decode = sum(STEP.decode_tick_s(1, 10 + i) for i in (1, 2))
    assert outcome.step_s == pytest.approx(10 * 0.001 + decode + 1.0 + 13 * 0.002 + 0.5, rel=1e-3)


@pytest.fixture
def plan():
    cfg = load_config(None, ["rl.batch_size_per_update=8", "rl.samples_per_prompt=4", "model.max_context=4096"])
    return plan_of(cfg, "qwen3-8b", "8xB200", "bf16", prompt=64, new=40)


def test_gpus_are_split_with_costs_of_their_own(plan):
    start = scene(bounds(1, batch=8, group=4))
    shared, split, other = (plan.place(start, how) for how in (None, (6, 2), (2, 6)))
    assert (shared.layout.kind, shared.layout.units) == ("shared", 8)
    assert (split.layout.name, split.layout.units) == ("6 rollout + 2 train GPUs", 8)
    assert split.costs.train_s(1000) == pytest.approx(3 * other.costs.train_s(1000))
    assert split.costs.publish.engine_s == 0 < split.costs.publish.transfer_s
    assert shared.costs.publish.transfer_s == 0 < shared.costs.publish.engine_s
    with pytest.raises(UserError, match="needs 5 GPUs, --hardware has 8"):
        plan.place(start, (3, 2))


def test_a_run_file_is_simulated_on_planned_hardware(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("rl: {samples_per_prompt: 4, batch_size_per_update: 8}\nrollout: {max_new_tokens: 200}\n")
    lengths = {"new_tokens": "lognormal:100,0.5", "prompt_tokens": "50", "reward_s": "2"}
    options = Options(steps=8, hardware="8xB200", model="qwen3-8b", distributions=lengths, sweep=["split=shared,6:2"])
    found = simulate_target(str(path), ["model.max_context=4096"], options)
    record = found.record()
    assert record["source"].startswith("planned for qwen3-8b (")
    assert record["source"].endswith(") on 8xB200-SXM")
    assert [row["layout"] for row in record["sweep"]] == ["8 GPUs shared", "6 rollout + 2 train GPUs"]
    assert any("planner" in text for text in record["assumptions"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (Options(hardware="8xB200", distributions={"new_tokens": "9"}), "add --model"),
        (Options(model="kimi-k2", costs="tick_fixed_s=1", distributions={"new_tokens": "9"}), "add --hardware"),
        (Options(hardware="8xB200", costs="tick_fixed_s=1"), "--costs and --hardware"),
        (Options(hardware="8xB2O0", model="kimi-k2", distributions={"new_tokens": "9"}), "B2O0"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, options, said):
    path = tmp_path / "mine.yaml"
    path.write_text("run: {name: mine}\n")
    with pytest.raises(UserError, match=said):
        simulate_target(str(path), [], options)
