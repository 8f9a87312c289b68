"""How the train loop ends, and what it does between batches."""

from __future__ import annotations

import pytest

from tithe.orchestration import StopReason
from tithe.pool import PoolReader
from tithe.staleness import Bounds
from unit.orchestration.fakes import World


def test_evaluations_are_made_before_between_and_after_and_never_twice(tmp_path):
    world = World(tmp_path, steps=5, eval_every=2)
    world.run()
    assert [step for step, _ in world.sink.named("eval_sampled")] == [0, 2, 4, 5]


def test_without_a_rhythm_only_the_first_and_last_policies_are_evaluated(tmp_path):
    world = World(tmp_path, steps=4)
    world.run()
    assert [step for step, _ in world.sink.named("eval_sampled")] == [0, 4]


def test_only_served_policies_are_evaluated(tmp_path):
    bounds = Bounds(batch_rollouts=4, group_size=2, max_lag=3, max_age=3, sync_every=3)
    world = World(tmp_path, bounds=bounds, steps=7, eval_every=1)
    world.run()
    assert [step for step, _ in world.sink.named("eval_sampled")] == [0, 3, 6, 7]
    assert [v.serial for v in world.published] == [0, 3, 6, 7]


def test_a_falling_held_out_score_stops_the_run(tmp_path):
    world = World(tmp_path, steps=50, eval_every=1, patience=2)
    scores = iter([0.5, 0.6, 0.55, 0.58, 0.57, 0.56, 0.9])
    world.score = lambda _version: next(scores)
    outcome = world.run()
    assert (outcome.reason, outcome.serial) == (StopReason.PATIENCE, 5)
    assert outcome.checkpoint.name == "step_5"


def test_checkpoints_come_in_their_rhythm_and_at_the_end(tmp_path):
    world = World(tmp_path, steps=5, checkpoint_every=2, keep_checkpoints=2)
    outcome = world.run()
    assert outcome.checkpoint == tmp_path / "step_5"
    assert {path.name for path in tmp_path.glob("step_*")} == {"step_2", "step_4", "step_5"}
    with PoolReader(tmp_path / "pool.sqlite") as reader:
        assert reader.query("SELECT serial, directory FROM checkpoint ORDER BY serial") == [
            {"serial": 4, "directory": "step_4"},
            {"serial": 5, "directory": "step_5"},
        ]


def test_files_are_saved_before_the_pool_names_them_and_pruned_after(tmp_path):
    world = World(tmp_path, steps=2, checkpoint_every=1)
    order = []
    save, record, prune = world.save, world.pool.record_checkpoint, world.train._hooks.prune

    def spy(name, call):
        def told(*args, **kwargs):
            order.append(name)
            return call(*args, **kwargs)

        return told

    object.__setattr__(world.train._hooks, "save", spy("save", save))
    object.__setattr__(world.train._hooks, "prune", spy("prune", prune))
    world.pool.record_checkpoint = spy("record", record)
    world.run()
    assert order == ["save", "record", "prune"] * 2


def test_time_runs_out_cleanly(tmp_path):
    world = World(tmp_path, steps=50, max_minutes=1.0)
    now = [0.0]

    def clock():
        now[0] += 1.0
        return now[0]

    world.train._clock = clock
    outcome = world.run()
    assert outcome.reason is StopReason.MAX_MINUTES
    assert 0 < outcome.serial < 50
    assert world.served.current().version.serial == outcome.serial
    assert world.sink.named("eval_sampled")[-1][0] == outcome.serial


def test_a_signal_requeues_the_batch_in_work_and_skips_publication_and_evaluation(tmp_path):
    world = World(tmp_path, steps=50)

    def on_micro():
        if world.pool.serial == 2:
            world.control.request_stop(StopReason.SIGNAL)

    world.trainer.on_micro = on_micro
    outcome = world.run()
    assert (outcome.reason, outcome.serial) == (StopReason.SIGNAL, 2)
    assert [step for step, _ in world.sink.named("eval_sampled")] == [0]
    with PoolReader(tmp_path / "pool.sqlite") as reader:
        requeued = reader.query("SELECT state, requeues FROM groups WHERE requeues > 0")
    assert requeued == [{"state": "ready", "requeues": 1}] * 3


def test_a_signal_during_the_last_evaluation_overrules(tmp_path):
    world = World(tmp_path, steps=2)

    def score(version):
        if version.version.serial == 2:
            world.control.request_stop(StopReason.SIGNAL)
        return 0.5

    world.score = score
    assert world.run().reason is StopReason.SIGNAL


@pytest.mark.parametrize("steps", [3])
def test_rows_carry_what_the_report_shows(tmp_path, steps):
    world = World(tmp_path, steps=steps)
    world.run()
    row = next(row for step, row in world.sink.rows if step == steps and "loss" in row)
    wanted = {"reward_mean", "reward_std", "readable_rate", "truncated_frac", "completion_tokens_mean", "groups"}
    wanted |= {
        "age_mean",
        "age_max",
        "dropped_groups",
        "failures",
        "step_s",
        "wait_s",
        "train_s",
        "publish_s",
        "kl_mean",
    }
    assert wanted <= row.keys()
    assert (row["groups"], row["completion_tokens_mean"], row["readable_rate"]) == (3.0, 6.0, 1.0)
    at = [name for _, values in world.sink.rows for name in ("tok_per_s", "loss") if name in values]
    assert at == ["tok_per_s", "loss"] * steps, "progress shows the two together, at the second"
    speeds = world.sink.named("tok_per_s")
    assert len(speeds) == steps
    assert all(speed > 0 for _, speed in speeds)


def test_old_token_arrays_are_stripped_as_the_run_goes_on(tmp_path):
    world = World(tmp_path, steps=8, checkpoint_every=2, keep_checkpoints=1, keep_pool_batches=1)
    world.run()
    with PoolReader(tmp_path / "pool.sqlite") as reader:
        assert {g.group_id for g in reader.groups()} == {21, 22, 23}
        assert reader.query("SELECT COUNT(*) AS n FROM rollouts WHERE text != ''")[0]["n"] >= 48
