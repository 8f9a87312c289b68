"""A run's figures give its costs back: of simulated runs, whose costs are known, and of a real one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.runs import write_run_files
from support.threads import one_thread
from tithe.config import load_config
from tithe.errors import ResumeError
from tithe.simulator import Exponential, Fixed, LaneCosts, LogNormal, PublishCosts, Uniform, Workload, simulate
from tithe.simulator.measured import TrainedGroup, measure, measure_run
from tithe.simulator.settings import scenario_of, scenario_of_run

COSTS = LaneCosts(
    tick_fixed_s=0.02,
    prefill_s_per_token=0.003,
    decode_s_per_sequence=0.003,
    train_s_per_token=0.002,
    publish=PublishCosts(engine_s=0.1),
)
WORK = Workload(prompt_tokens=Uniform(8, 40), new_tokens=LogNormal(20, 0.7), reward_s=Exponential(0.8))
KEYS = ["rl.batch_size_per_update=8", "rl.samples_per_prompt=4", "engine.max_live_versions=20"]


def config(lag: int):
    return load_config(None, [*KEYS, f"rl.max_policy_update_lag={lag}"])


def left_by(outcome):
    """What such a run would leave: its trained groups, and its metrics by batch."""
    groups = [
        TrainedGroup(
            group.batch_serial,
            group.ended_s - group.admitted_s,
            group.shape.prompt_tokens,
            tuple(sample.new_tokens for sample in group.shape.samples),
        )
        for group in outcome.pool.groups.values()
        if group.state == "trained"
    ]
    metrics = {
        row.serial: {
            "wait_s": row.wait_s,
            "train_s": row.train_s,
            "publish_s": row.publish_s,
            "step_s": row.step_s,
            "checkpoint_s": 0.5 if row.serial % 10 == 1 and row.serial > 1 else 0.0,  # told by the row after it
        }
        for row in outcome.ledger.batches
    }
    begin_s = 0.0
    for row in outcome.ledger.batches:
        sampling = [s for s in outcome.ledger.spans if s.kind == "sample" and begin_s < s.end_s <= row.end_s]
        own = [group for group in groups if group.serial == row.serial]
        drawn = {"generated_tok": sum(sum(g.lengths) for g in own), "prefill_tok": sum(g.prompt for g in own)}
        metrics[row.serial] |= {"decode_s": sum(s.seconds for s in sampling), **drawn}
        begin_s = row.end_s
    return groups, metrics


def test_a_synchronous_run_gives_its_costs_and_its_waiting_back():
    truth = replace(scenario_of(config(0), COSTS, WORK, steps=40), checkpoint_every=10, checkpoint_s=0.5, lease_s=0.05)
    found = measure(*left_by(simulate(truth)), config(0))
    assert found.notes == ()
    assert found.batches == 39
    assert found.costs.tick_fixed_s == pytest.approx(0.02, rel=0.03)
    assert found.costs.decode_s_per_sequence == pytest.approx(0.003, rel=0.03)
    assert found.costs.train_s_per_token == pytest.approx(0.002, rel=0.03)
    assert found.costs.publish.total_s == pytest.approx(0.1)
    assert (found.lease_s, found.checkpoint_s) == pytest.approx((0.05, 0.5), abs=0.002)
    waits = sorted(group.outside_s for group in found.groups)
    slowest_of_four = 0.8 * (1 + 1 / 2 + 1 / 3 + 1 / 4)
    assert 0.6 * slowest_of_four < sum(waits) / len(waits) < 1.1 * slowest_of_four


@pytest.mark.parametrize("lag", [1, 2, 4])
def test_what_was_measured_synchronously_says_what_asynchrony_gains(lag):
    """The prediction is made from the figures of the synchronous run alone."""
    truth = {n: simulate(scenario_of(config(n), COSTS, WORK, steps=60)) for n in (0, lag)}
    found = measure(*left_by(truth[0]), config(0))
    made = {n: scenario_of_run(config(n), found, steps=60) for n in (0, lag)}
    anew = {n: replace(one, workload=replace(one.workload, measured_by="sample")) for n, one in made.items()}
    guessed = {n: simulate(one) for n, one in anew.items()}
    gain, expected = (runs[lag].rollouts_per_s / runs[0].rollouts_per_s for runs in (guessed, truth))
    assert expected > 1.3
    assert gain == pytest.approx(expected, rel=0.05)


def test_an_asynchronous_run_is_measured_with_what_must_be_assumed():
    work = replace(WORK, reward_s=Fixed(0.0))
    found = measure(*left_by(simulate(scenario_of(config(2), COSTS, work, steps=40))), config(2))
    assert any("asynchronous" in note for note in found.notes)
    assert all(group.outside_s == 0 for group in found.groups)
    again = simulate(scenario_of_run(config(2), found, steps=40))
    assert again.step_s == pytest.approx(simulate(scenario_of(config(2), COSTS, work, steps=40)).step_s, rel=0.1)


def test_batches_that_were_slow_for_another_reason_do_not_count():
    groups, metrics = left_by(simulate(scenario_of(config(0), COSTS, WORK, steps=40)))
    for serial in (5, 17):
        metrics[serial]["decode_s"] *= 10
    found = measure(groups, metrics, config(0))
    assert found.costs.tick_fixed_s == pytest.approx(0.02, rel=0.1)


def test_too_short_a_run_is_refused():
    groups, metrics = left_by(simulate(scenario_of(config(0), COSTS, WORK, steps=2)))
    with pytest.raises(ResumeError, match="1 batches after its first"):
        measure(groups, metrics, config(0))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    from tithe.build import train

    files = write_run_files(tmp_path_factory.mktemp("measured"))
    with one_thread():
        train(load_config(files.yaml, []), files.folder / "run")
    return files.folder / "run"


def test_a_real_run_is_measured(run_dir):
    from tithe.config import load_run

    cfg = load_run(run_dir)
    found = measure_run(run_dir, cfg)
    assert found.notes == ()
    assert (found.batches, len(found.groups)) == (5, 12)
    assert all(len(g.new_tokens) == 4 and max(g.new_tokens) <= 8 and 5 < g.prompt_tokens < 48 for g in found.groups)
    costs = found.costs
    assert 0 < costs.tick_fixed_s + costs.decode_s_per_sequence < 1
    assert costs.train_s_per_token > 0 < costs.publish.total_s
    outcome = simulate(scenario_of_run(cfg, found, steps=6))
    assert outcome.age_histogram() == {0: 1.0}


def test_a_directory_without_a_pool_is_refused(tmp_path):
    with pytest.raises(ResumeError, match="no pool"):
        measure_run(tmp_path, config(0))
