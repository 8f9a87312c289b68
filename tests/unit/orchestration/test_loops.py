"""Both loops around a real pool, with a fake engine, environment and trainer."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import threading
import time

import pytest

from tithe.errors import ConfigError, EngineError, NonFiniteError, PoolError, PublishRefused, RunError
from tithe.orchestration import StopReason
from tithe.pool import GroupState, PoolReader
from tithe.staleness import Bounds
from unit.orchestration.fakes import World


def rows_of(folder, sql):
    with PoolReader(folder / "pool.sqlite") as reader:
        return reader.query(sql)


ASYNC = Bounds(batch_rollouts=6, group_size=2, max_lag=3, max_age=3, sync_every=2)


def test_synchronous_run_trains_each_batch_on_the_version_it_was_sampled_from(tmp_path):
    world = World(tmp_path, steps=5)
    outcome = world.run()
    assert (outcome.reason, outcome.serial) == (StopReason.MAX_STEPS, 5)
    assert world.trainer.batches == [[3 * i, 3 * i + 1, 3 * i + 2] for i in range(5)]
    assert set(world.trainer.ages) == {0}
    assert [v.serial for v in world.published] == [0, 1, 2, 3, 4, 5]
    counts = rows_of(tmp_path, "SELECT batch_serial, COUNT(*) AS n FROM groups WHERE state = 'trained' GROUP BY 1")
    assert counts == [{"batch_serial": s, "n": 3} for s in range(1, 6)]
    assert world.sink.named("version_gap") == [(s, 0.0) for s in range(1, 6)]
    assert rows_of(tmp_path, "SELECT COUNT(*) AS n FROM rollout_group WHERE state IN ('running', 'leased')") == [
        {"n": 0}
    ]


def test_same_seed_same_weights_whatever_the_timing(tmp_path):
    weights = set()
    for i, delay_s in enumerate((0.0, 0.01, 0.02)):
        folder = tmp_path / str(i)
        folder.mkdir()
        world = World(folder, delay_s=delay_s, steps=4)
        world.run()
        weights.add(world.trainer.weights)
    assert len(weights) == 1


def test_asynchronous_run_keeps_its_bounds(tmp_path):
    world = World(tmp_path, bounds=ASYNC, steps=12, delay_s=0.01)
    gaps = []
    world.trainer.on_micro = lambda: gaps.append(world.pool.serial - world.served.current().version.serial)
    world.run()
    assert world.pool.path.exists()
    assert max(world.trainer.ages) <= ASYNC.max_age
    assert max(gaps) <= ASYNC.max_lag
    assert [v.serial for v in world.published] == [0, 2, 4, 6, 8, 10, 12]
    assert len({g for batch in world.trainer.batches for g in batch}) == 12 * 3


@pytest.mark.parametrize("on_publish", ["recompute", "keep"])
def test_running_groups_follow_the_served_version_when_they_are_not_bound(tmp_path, on_publish):
    world = World(tmp_path, bounds=ASYNC, steps=6, delay_s=0.005, on_publish=on_publish)
    world.run()
    assert {request.adapter for request in world.engine.requests} == {None}
    assert world.train is not None
    assert max(world.trainer.ages) <= ASYNC.max_age


def test_an_answer_that_waits_for_its_reward_takes_no_place_in_the_engine(tmp_path):
    """The engine has 12 places; the rewards of the first 12 answers come when it has been asked for more."""
    world = World(tmp_path, bounds=ASYNC, steps=2, timeout_s=20.0)
    play, more = world.env.rollout, asyncio.Event()

    async def judged_late(item, request, generate):
        if len(world.engine.requests) >= 12:
            more.set()
        rollout = await play(item, request, generate)
        await more.wait()
        return rollout

    world.env.rollout = judged_late
    world.run()
    assert rows_of(tmp_path, "SELECT COUNT(*) AS n FROM rollouts WHERE cause IS NOT NULL") == [{"n": 0}]


def test_old_versions_are_dropped_once_nobody_uses_them_and_never_before(tmp_path):
    """A request under a dropped version would fail as an engine error; there are none."""
    world = World(tmp_path, bounds=ASYNC, steps=10, delay_s=0.01, max_live=2)
    live = []
    world.before_load = lambda _version: live.append(len(world.engine.versions))
    world.run()
    assert max(live) <= 1
    assert len(world.engine.dropped) >= 4
    assert rows_of(tmp_path, "SELECT COUNT(*) AS n FROM rollouts WHERE cause IS NOT NULL") == [{"n": 0}]


def test_samples_carry_the_old_version_until_the_engine_confirms(tmp_path):
    """D13: loading takes 200 ms; what starts in between belongs to the version before."""
    roomy = Bounds(batch_rollouts=6, group_size=2, max_lag=6, max_age=6, sync_every=2)
    world = World(tmp_path, bounds=roomy, steps=3)
    loading, has_loaded = threading.Event(), threading.Event()
    started_while_loading = threading.Event()
    versions = []
    submit = world.engine.submit

    def watched(request):
        if loading.is_set():
            versions.append(request.adapter)
            started_while_loading.set()
        return submit(request)

    def load(version):
        if version.serial == 2:
            loading.set()
            has_loaded.set()
            assert started_while_loading.wait(20)
            time.sleep(0.2)
            loading.clear()

    def fault(request):
        if request.params.group >= 6:
            has_loaded.wait(20)  # so that room for new groups comes up while version 2 is being loaded

    world.engine.submit, world.engine.fault, world.before_load = watched, fault, load
    world.run()
    assert set(versions) == {"run-0-v0"}
    tagged = rows_of(tmp_path, "SELECT COUNT(*) AS n FROM rollouts WHERE min_serial != max_serial")
    assert tagged == [{"n": 0}]


def test_a_refused_version_is_not_served_and_ends_the_run(tmp_path):
    world = World(tmp_path, bounds=ASYNC, steps=8)

    def refuse(version):
        if version.serial == 4:
            raise PublishRefused("probe: the engine still answers as v2")

    world.before_load = refuse
    with pytest.raises(PublishRefused, match="still answers"):
        world.run()
    assert world.served.current().version.serial == 2
    admitted = rows_of(tmp_path, "SELECT MAX(admitted_serial) AS newest FROM groups")
    assert admitted[0]["newest"] <= 2


def test_an_engine_that_answers_with_another_version_ends_the_run(tmp_path):
    world = World(tmp_path, steps=8)
    load = world.engine.load
    world.engine.load = lambda name, serial, weights: load(name, max(0, serial - 1), weights)
    with pytest.raises(
        EngineError, match=r"was to be sampled from version 1; the engine answered with versions 0 to 0"
    ):
        world.run()


@pytest.mark.parametrize("answer", [None, "nonsense"])
def test_a_worker_that_returns_nothing_and_one_that_raises_are_replaced(tmp_path, answer):
    """D17: one rollout returns nothing, one raises; the batch is filled by others and the run goes on."""
    world = World(tmp_path, bounds=Bounds(batch_rollouts=8, group_size=1, max_lag=0, max_age=0), steps=2)

    def fault(_item, request):
        if request.params.group == 1:
            return answer
        if request.params.group == 2:
            raise ZeroDivisionError("in the tool")
        return "play"

    world.env.fault = fault
    assert world.run().serial == 2
    dropped = rows_of(tmp_path, "SELECT group_id, detail FROM groups WHERE state = 'dropped' ORDER BY group_id")
    assert [row["group_id"] for row in dropped] == [1, 2]
    assert "returned" in dropped[0]["detail"]
    assert dropped[1]["detail"] == "environment: ZeroDivisionError: in the tool"
    assert world.sink.named("failures")[0] == (1, 2.0)
    assert world.sink.named("failures_environment") == [(1, 2.0), (2, 0.0)]


def test_one_failed_sample_leaves_the_group_trainable(tmp_path):
    world = World(tmp_path, steps=1)

    def fault(_item, request):
        if request.params.sample == 1:
            raise TimeoutError
        return "play"

    world.env.fault = fault
    world.run()
    trained = rows_of(tmp_path, "SELECT sample, cause FROM rollouts WHERE state = 'trained' ORDER BY group_id, sample")
    assert trained == [{"sample": 0, "cause": None}, {"sample": 1, "cause": "timeout"}] * 3


def test_a_lasting_failure_is_an_error_and_not_the_end_of_data(tmp_path):
    """D19: out of memory from the third step on."""
    world = World(tmp_path, steps=9)

    def fault(request):
        if request.params.group >= 9:
            raise MemoryError("out of memory")

    world.engine.fault = fault
    with pytest.raises(RunError, match=r"in groups of which nothing can be used.*MemoryError: out of memory"):
        world.run()
    assert world.pool.path.exists()
    assert len(world.trainer.batches) == 3


def test_what_the_user_has_to_mend_ends_the_run_as_it_is(tmp_path):
    """F15: a reward function that breaks its contract is no rollout's failure."""
    world = World(tmp_path)

    def fault(_item, _request):
        raise ConfigError("reward function f returned True", "reward.function")

    world.env.fault = fault
    with pytest.raises(ConfigError, match="returned True"):
        world.run()


def test_an_error_of_the_pool_is_not_blamed_on_generation(tmp_path, monkeypatch):
    """E11: the writer raises once; the error names the writer and no sample is replaced by an empty one."""
    world = World(tmp_path)
    encode = world.pool._store.transaction
    calls = iter(range(10**6))

    def failing():
        if threading.current_thread().name == "rollout-loop" and next(calls) == 4:
            raise sqlite3.OperationalError("disk I/O error")
        return encode()

    monkeypatch.setattr(world.pool._store, "transaction", failing)
    with pytest.raises(sqlite3.OperationalError, match="disk I/O"):
        world.run()
    assert rows_of(tmp_path, "SELECT COUNT(*) AS n FROM rollouts WHERE reward IS NULL") == [{"n": 0}]


def test_three_prompts_fill_a_batch_of_eight(tmp_path):
    """F11: never "done" after no step."""
    bounds = Bounds(batch_rollouts=16, group_size=2, max_lag=0, max_age=0)
    world = World(tmp_path, bounds=bounds, prompts=3, steps=2)
    assert world.run().serial == 2
    assert all(len(batch) == 8 for batch in world.trainer.batches)


@pytest.mark.liveness
def test_a_loop_that_hears_nothing_says_so(tmp_path):
    world = World(tmp_path, stall_s=1.0)
    release = threading.Event()
    world.engine.fault = lambda _request: release.wait(20)
    world.engine.cancel = lambda _group: release.set()
    with pytest.raises(RunError, match=r"no rollout finished for 1 s while waiting: PoolCounts\(serial=0, running=3"):
        world.run()


@pytest.mark.liveness
def test_a_slow_sampler_is_not_a_stalled_one(tmp_path):
    """Groups that take longer than `stall_s`, while tokens come all the time."""
    world = World(tmp_path, steps=1, stall_s=0.1)
    world.engine.fault = lambda _request: time.sleep(0.4)
    world.train._work = time.monotonic
    assert world.run().serial == 1


def test_a_failure_after_the_last_batch_is_not_lost(tmp_path, monkeypatch):
    world = World(tmp_path, steps=2)

    def broken():
        raise PoolError("no more")

    monkeypatch.setattr(world.pool, "give_up_running", broken)
    with pytest.raises(PoolError, match="no more"):
        world.run()
    assert (tmp_path / "step_2").is_dir(), "the checkpoint is there all the same"


@pytest.mark.liveness
def test_a_rollout_that_takes_too_long_is_a_failure_and_its_request_is_cancelled(tmp_path):
    world = World(tmp_path, steps=1, timeout_s=1.5)
    release = threading.Event()
    cancelled = []

    def cancel(group):
        cancelled.append(group)
        release.set()

    def fault(request):
        if (request.params.group, request.params.sample) == (0, 1):
            release.wait(20)

    world.engine.fault, world.engine.cancel = fault, cancel
    assert world.run().serial == 1
    assert cancelled[0] == 0
    failed = rows_of(tmp_path, "SELECT group_id, sample, cause FROM rollouts WHERE cause IS NOT NULL")
    assert failed == [{"group_id": 0, "sample": 1, "cause": "timeout"}]


def test_too_old_groups_are_dropped_counted_and_their_prompts_put_back(tmp_path):
    """One straggler per version is overtaken by younger groups and grows too old."""
    bounds = Bounds(batch_rollouts=4, group_size=2, max_lag=1, max_age=1)
    world = World(tmp_path, bounds=bounds, steps=12)
    gate = threading.Event()
    held = {0}

    def fault(request):
        if request.params.group in held:
            gate.wait(10)

    world.engine.fault = fault
    world.trainer.on_micro = lambda: gate.set() if world.pool.serial >= 3 else None
    world.run()
    dropped = rows_of(tmp_path, "SELECT group_id, prompt_id, reason, age FROM groups WHERE state = 'dropped'")
    assert dropped[0]["group_id"] == 0
    assert {row["reason"] for row in dropped} == {"stale"}
    prompt = dropped[0]["prompt_id"]
    again = rows_of(tmp_path, f"SELECT COUNT(*) AS n FROM rollout_group WHERE prompt_id = '{prompt}' AND group_id > 0")
    assert again[0]["n"] >= 1
    assert sum(value for _, value in world.sink.named("dropped_groups")) == len(dropped)
    assert max(world.trainer.ages) <= 1


def test_skipped_steps_drop_their_batch_and_three_in_a_row_end_the_run(tmp_path):
    world = World(tmp_path, steps=9)
    world.trainer.skip = lambda batch: batch.serial == 3
    with pytest.raises(NonFiniteError, match="3 batches in a row, after batch 3"):
        world.run()
    states = rows_of(tmp_path, "SELECT reason, COUNT(*) AS n FROM groups WHERE state = 'dropped' GROUP BY reason")
    assert states == [{"reason": "non_finite", "n": 9}]
    assert [step for step, value in world.sink.named("skipped") if value] == [4, 4, 4]


def test_a_single_skipped_step_costs_a_batch_and_no_serial(tmp_path):
    world = World(tmp_path, steps=4)
    tries = iter([False, True, True] + [False] * 20)
    world.trainer.skip = lambda _batch: next(tries)
    assert world.run().serial == 4
    assert [v.serial for v in world.published] == [0, 1, 2, 3, 4]


def test_stragglers_hold_their_own_places_only(tmp_path):
    """12 places, 3 groups of 4, one slow sample in each: more groups begin beside the three that are left."""
    world = World(tmp_path, bounds=Bounds(batch_rollouts=24, group_size=4, max_lag=0, max_age=0), steps=1)
    others = threading.Event()
    running, most = [0], [0]
    play = world.env.rollout

    async def counted(item, request, generate):
        running[0] += 1
        most[0] = max(most[0], running[0])
        try:
            return await play(item, request, generate)
        finally:
            running[0] -= 1

    def fault(request):
        if request.params.group == 5:
            others.set()
        if request.params.group < 3 and request.params.sample == 0:
            assert others.wait(20)

    world.env.rollout, world.engine.fault = counted, fault
    world.run()
    assert rows_of(tmp_path, "SELECT COUNT(*) AS n FROM rollouts WHERE cause IS NOT NULL") == [{"n": 0}]
    assert 4 < most[0] <= 12


@pytest.mark.parametrize("sync_every", [1, 3])
def test_a_buffer_of_one_batch_is_enough(tmp_path, sync_every):
    """Room comes up when a batch is leased, and the rollout loop is told, also where no version follows."""
    bounds = Bounds(batch_rollouts=6, group_size=2, max_lag=3, max_age=3, sync_every=sync_every)
    world = World(tmp_path, bounds=bounds, steps=6, buffer=6)
    lease = world.pool.lease_batch

    def late(*args):
        time.sleep(0.05)  # the rollout loop has looked for room before the batch leaves
        return lease(*args)

    world.pool.lease_batch = late
    assert world.run().serial == 6


def test_leases_are_settled_whatever_ends_the_run(tmp_path):
    world = World(tmp_path, steps=5)

    def crash():
        if world.pool.serial == 2:
            raise RuntimeError("in the trainer")

    world.trainer.on_micro = crash
    with pytest.raises(RuntimeError, match="in the trainer"):
        world.run()
    again = World(tmp_path, steps=5)
    with PoolReader(tmp_path / "pool.sqlite") as reader:
        counts = reader.state_counts()
    assert (counts[GroupState.LEASED], counts[GroupState.RUNNING]) == (0, 0)
    assert again.run().serial == 5


def test_random_faults_never_hang_or_lose_the_bounds(tmp_path):
    rng = random.Random(5)
    world = World(tmp_path, bounds=ASYNC, steps=10, delay_s=0.003)

    def fault(_item, _request):
        if rng.random() < 0.2:
            raise ValueError("bad luck")
        return "play" if rng.random() < 0.9 else None

    world.env.fault = fault
    assert world.run().serial == 10
    assert max(world.trainer.ages) <= ASYNC.max_age
