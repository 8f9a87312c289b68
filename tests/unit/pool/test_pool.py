"""The pool's contracts, one property each."""

from __future__ import annotations

import dataclasses
import json
import os
import sqlite3
import threading

import numpy as np
import pytest

from tithe.errors import DataError, Failure, FailureCause, PoolError, ResumeError, RunError, UserError
from tithe.pool import DropReason, GroupState, Pool, PoolReader, PromptSource
from tithe.types import FinishReason, Rollout, RolloutGroup


def make_rollout(sample=0, *, serial=0, n=3, reward=1.0, failure=None, **parts):
    return Rollout(
        sample=sample,
        token_ids=np.arange(n, dtype=np.int32) + 10 * sample,
        loss_mask=np.arange(n) % 2 == 0,
        logp=np.linspace(-1, -0.1, n, dtype=np.float32),
        logp_behaviour=np.linspace(-0.9, -0.05, n, dtype=np.float32),
        serials=np.full(n, serial, np.int32),
        temperature=0.7,
        finish=FinishReason.STOP,
        text=f"text {sample} ünï",
        reward=reward,
        reward_parts=parts,
        failure=failure,
    )


def make_group(group_id, prompt_id="p", *, serial=0, lineage=0, rollouts=None):
    rollouts = rollouts or (make_rollout(0, serial=serial), make_rollout(1, serial=serial, reward=0.0))
    return RolloutGroup(group_id, prompt_id, np.array([1, 2, 3], np.int32), tuple(rollouts), lineage, serial)


def add_ready(pool, n=1, *, serial=0, prompt_id="p"):
    ids = [pool.admit(prompt_id, pool.lineage, serial) for _ in range(n)]
    for group_id in ids:
        pool.commit(make_group(group_id, prompt_id, serial=serial, lineage=pool.lineage))
    return ids


def keep_all(_min_serial):
    return False


def train(pool, n):
    lease = pool.lease_batch(n, pool.serial, keep_all)
    ids = [g.group_id for g in lease.groups]
    assert ids
    pool.mark_trained(ids, pool.serial + 1)
    return ids


@pytest.fixture
def path(tmp_path):
    return tmp_path / "pool.sqlite"


@pytest.fixture
def pool(path):
    with Pool.create(path, "run-1") as pool:
        yield pool


def test_groups_come_back_exactly_as_they_were_committed(pool):
    rollouts = (
        make_rollout(0, serial=4, n=5, reward=0.25, format=0.5, answer=-0.25),
        make_rollout(2, n=0, reward=None, failure=Failure(FailureCause.TIMEOUT, "after 5 s")),
    )
    group_id = pool.admit("p1", 0, 4)
    pool.commit(make_group(group_id, "p1", serial=4, rollouts=rollouts))
    (back,) = pool.lease_batch(1, 0, keep_all).groups
    assert (back.group_id, back.prompt_id, back.lineage, back.admitted_serial) == (group_id, "p1", 0, 4)
    assert back.prompt_ids.dtype == np.int32
    assert back.min_serial == 4
    for given, got in zip(rollouts, back.rollouts, strict=True):
        for field in dataclasses.fields(Rollout):
            a, b = getattr(given, field.name), getattr(got, field.name)
            if isinstance(a, np.ndarray):
                assert (a.dtype, a.shape) == (b.dtype, b.shape)
                np.testing.assert_array_equal(a, b)
                b[:] = 0  # writable: a copy and not a view of SQLite's buffer
            else:
                assert a == b, field.name


def test_equal_prompts_stay_apart_as_groups(pool):
    """C03: what groups rewards is the id, never the prompt's text or tokens."""
    a, b = (pool.admit("same", 0, 0) for _ in range(2))
    pool.commit(make_group(a, "same", rollouts=[make_rollout(i, reward=0.0) for i in range(4)]))
    pool.commit(make_group(b, "same", rollouts=[make_rollout(i, reward=1.0) for i in range(4)]))
    groups = pool.lease_batch(2, 0, keep_all).groups
    assert [[r.reward for r in g.rollouts] for g in groups] == [[0.0] * 4, [1.0] * 4]


def test_rejected_group_never_reaches_a_batch(pool):
    """C05: what is dropped for staleness is out of the batch as a whole, so it is in nobody's baseline."""
    (old,) = add_ready(pool, serial=0)
    (young,) = add_ready(pool, serial=3)
    lease = pool.lease_batch(1, 0, lambda min_serial: min_serial < 2)
    assert lease.dropped == (old,)
    assert [g.group_id for g in lease.groups] == [young]


def test_an_incomplete_batch_leases_nothing_but_keeps_its_drops(pool, path):
    add_ready(pool, 2, serial=0)
    add_ready(pool, 1, serial=5)
    lease = pool.lease_batch(2, 0, lambda min_serial: min_serial < 5)
    assert (len(lease.groups), len(lease.dropped)) == (0, 2)
    assert pool.counts().ready == 1
    with PoolReader(path) as reader:
        assert reader.query("SELECT reason, COUNT(*) AS n FROM groups WHERE state = 'dropped' GROUP BY reason") == [
            {"reason": "stale", "n": 2}
        ]


def test_batches_are_leased_in_order_of_admission(pool):
    ids = [pool.admit("p", 0, 0) for _ in range(4)]
    for group_id in reversed(ids):
        pool.commit(make_group(group_id))
    assert [g.group_id for g in pool.lease_batch(2, 0, keep_all).groups] == ids[:2]


@pytest.mark.parametrize(
    ("reach", "act"),
    [
        ("running", lambda pool, g: pool.mark_trained([g], 1)),
        ("running", lambda pool, g: pool.requeue([g])),
        ("ready", lambda pool, g: pool.commit(make_group(g))),
        ("ready", lambda pool, g: pool.mark_trained([g], 1)),
        ("ready", lambda pool, g: pool.reject(make_group(g), "no")),
        ("leased", lambda pool, g: pool.commit(make_group(g))),
        ("leased", lambda pool, g: pool.mark_trained([g, g], 1)),
        ("leased", lambda pool, g: pool.mark_trained([g], 2)),
        ("leased", lambda pool, g: pool.mark_trained([g], 0)),
        ("leased", lambda pool, g: pool.mark_trained([], 1)),
        ("leased", lambda pool, g: pool.lease_batch(1, 1, keep_all)),
        ("leased", lambda pool, g: pool.requeue([g, g])),
        ("trained", lambda pool, g: pool.mark_trained([g], 2)),
        ("trained", lambda pool, g: pool.requeue([g])),
        ("trained", lambda pool, g: pool.drop([g], DropReason.STALE)),
        ("trained", lambda pool, g: pool.record_checkpoint(2, pool.path.parent, {})),
        ("dropped", lambda pool, g: pool.drop([g], DropReason.STALE)),
        ("dropped", lambda pool, g: pool.commit(make_group(g))),
        ("absent", lambda pool, g: pool.drop([g + 99], DropReason.STALE)),
    ],
)
def test_illegal_moves_raise_and_change_nothing(pool, path, reach, act):
    group_id = pool.admit("p", 0, 0)
    if reach in ("ready", "leased", "trained"):
        pool.commit(make_group(group_id))
    if reach in ("leased", "trained"):
        pool.lease_batch(1, 0, keep_all)
    if reach == "trained":
        pool.mark_trained([group_id], 1)
    if reach == "dropped":
        pool.drop([group_id], DropReason.STALE)
    with sqlite3.connect(path) as db:
        before = list(db.iterdump())
    with pytest.raises(PoolError):
        act(pool, group_id)
    after = list(db.iterdump())
    db.close()
    assert after == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_id": "other"}, "admitted as"),
        ({"admitted_serial": 9}, "admitted as"),
        ({"rollouts": ()}, "sample numbers"),
        ({"rollouts": (make_rollout(1), make_rollout(1))}, "sample numbers"),
        ({"rollouts": (make_rollout(0, reward=float("nan")),)}, "not finite"),
        ({"rollouts": (make_rollout(0, part=float("inf")),)}, "not finite"),
        ({"rollouts": (dataclasses.replace(make_rollout(0), logp=np.zeros(2, np.float32)),)}, "differ in shape"),
        ({"rollouts": (dataclasses.replace(make_rollout(0), token_ids=np.array([1, 2, 2**40])),)}, "do not fit"),
    ],
)
def test_a_group_that_could_not_be_read_back_is_refused(pool, change, message):
    group_id = pool.admit("p", 0, 0)
    with pytest.raises(PoolError, match=message):
        pool.commit(dataclasses.replace(make_group(group_id), **change))
    assert pool.counts().running == 1


def test_requeued_groups_keep_their_place(pool):
    ids = add_ready(pool, 4)
    batch = [g.group_id for g in pool.lease_batch(2, 0, keep_all).groups]
    pool.requeue(batch)
    assert [g.group_id for g in pool.lease_batch(4, 0, keep_all).groups] == ids


def test_counts_are_what_staleness_needs_also_after_resume(pool, path):
    """D15: the acceptance counter comes from the pool's serial and rows, not from zero."""
    for _ in range(3):
        add_ready(pool, 2)
        train(pool, 2)
    add_ready(pool, 1)
    pool.admit("p", 0, 3)
    pool.record_checkpoint(3, path.parent, {})
    assert pool.counts().accepted_rollouts(batch_rollouts=8, group_size=4) == 3 * 8 + 4
    pool.close()
    with Pool.open(path) as again:
        assert again.rewind_to_checkpoint().serial == 3
        counts = again.counts()
        assert (counts.serial, counts.running, counts.ready, counts.leased) == (3, 0, 1, 0)
        assert counts.accepted_rollouts(batch_rollouts=8, group_size=4) == 3 * 8 + 4


def test_prompts_are_shuffled_and_every_pass_holds_each_once():
    ids = [f"p{i}" for i in range(20)]
    source = PromptSource(ids, seed=3)
    first, second = ([source.at(i + 20 * k) for i in range(20)] for k in range(2))
    assert sorted(first) == sorted(second) == sorted(ids)
    assert first != second
    assert first == [PromptSource(ids[::-1], seed=3).at(i) for i in range(20)]
    assert first != [PromptSource(ids, seed=4).at(i) for i in range(20)]
    assert PromptSource(ids, 3).digest != PromptSource(ids, 4).digest != PromptSource(ids[1:], 4).digest


def test_empty_and_repeating_tasks_are_refused():
    with pytest.raises(DataError, match="no prompts"):
        PromptSource([], 0)
    with pytest.raises(DataError, match="'b'"):
        PromptSource(["a", "b", "b"], 0)


def test_fewer_prompts_than_a_batch_still_fill_it(pool):
    """F11: three rows, batch of eight groups: the next pass begins within the batch."""
    pool.bind_prompts(PromptSource(["a", "b", "c"], 0))
    drawn = [pool.admit_next(0, 0).prompt_id for _ in range(8)]
    assert sorted(drawn[:3]) == sorted(drawn[3:6]) == ["a", "b", "c"]


def test_dropped_prompts_come_back_before_new_ones(pool):
    pool.bind_prompts(PromptSource(["a", "b", "c", "d"], 0))
    first, second = pool.admit_next(0, 0), pool.admit_next(0, 0)
    pool.commit(make_group(first.group_id, first.prompt_id))
    pool.lease_batch(1, 0, lambda _serial: True)
    again = pool.admit_next(0, 0)
    assert again.prompt_id == first.prompt_id
    assert again.group_id not in (first.group_id, second.group_id)


def test_a_prompt_that_keeps_failing_is_given_up_and_the_last_one_ends_the_run(pool):
    pool.bind_prompts(PromptSource(["good", "bad"], 0), max_failures=2)
    failed = Failure(FailureCause.REWARD, "boom")
    drawn = []
    for _ in range(12):
        admission = pool.admit_next(0, 0)
        drawn.append(admission.prompt_id)
        if admission.prompt_id == "bad":
            group = make_group(admission.group_id, "bad", rollouts=[make_rollout(0, reward=None, failure=failed)])
            put_back = pool.reject(group, "reward: boom")
            assert put_back == (drawn.count("bad") < 2)
        else:
            pool.commit(make_group(admission.group_id, "good"))
    assert drawn.count("bad") == 2
    for _ in range(2):
        pool.reject(make_group(pool.admit_next(0, 0).group_id, "good"), "reward: boom")
    with pytest.raises(RunError, match="reward: boom"):
        pool.admit_next(0, 0)


def test_a_success_between_failures_counts_the_failures_from_zero(pool):
    pool.bind_prompts(PromptSource(["a"], 0), max_failures=2)
    for fails in [True, False] * 4:
        admission = pool.admit_next(0, 0)
        group = make_group(admission.group_id, "a")
        if fails:
            assert pool.reject(group, "sometimes")
        else:
            pool.commit(group)


def test_other_prompts_than_the_run_began_with_are_refused(pool):
    pool.bind_prompts(PromptSource(["a", "b"], 0))
    pool.bind_prompts(PromptSource(["b", "a"], 0))
    with pytest.raises(ResumeError, match=r"task\.seed"):
        pool.bind_prompts(PromptSource(["a", "b", "c"], 0))


def test_resume_trains_every_prompt_exactly_once(path):
    """E05: 8 prompts, 4 generated at a time, 2 trained; stopped after one batch. In-flight ones are made again."""
    source = PromptSource([f"p{i}" for i in range(8)], 1)
    pool = Pool.create(path, "run")
    pool.bind_prompts(source)
    first = [pool.admit_next(0, 0) for _ in range(4)]
    for admission in first[:3]:
        pool.commit(make_group(admission.group_id, admission.prompt_id))
    train(pool, 2)
    pool.record_checkpoint(1, path.parent / "checkpoints" / "step_1", {"kl": 0.1})
    pool.close()
    with Pool.open(path) as resumed:
        resumed.bind_prompts(source)
        assert resumed.rewind_to_checkpoint().replayed == 0
        orphan = resumed.admit_next(0, 1)
        assert orphan == first[3], "the orphan's prompt comes first and keeps its id"
        rest = [orphan, *(resumed.admit_next(0, 1) for _ in range(4))]
        for admission in rest:
            resumed.commit(make_group(admission.group_id, admission.prompt_id, serial=1))
        for _ in range(3):
            train(resumed, 2)
    with PoolReader(path) as reader:
        trained = reader.query("SELECT prompt_id FROM groups WHERE state = 'trained'")
    assert sorted(row["prompt_id"] for row in trained) == sorted(f"p{i}" for i in range(8))


def test_rewind_brings_back_later_batches_in_their_order(pool, path):
    add_ready(pool, 6)
    train(pool, 2)
    pool.record_checkpoint(1, path.parent / "step_1", {"note": "x"})
    second, third = train(pool, 2), train(pool, 2)
    add_ready(pool, 1)
    pool.lease_batch(1, 3, keep_all)
    pool.close()
    with Pool.open(path) as resumed:
        assert resumed.counts().ready == 1, "a dead owner's lease has ended"
        rewind = resumed.rewind_to_checkpoint()
        assert (rewind.serial, rewind.replayed, rewind.lineage) == (1, 4, 1)
        assert rewind.checkpoint is not None
        assert rewind.checkpoint.directory == path.parent / "step_1"
        assert rewind.checkpoint.state == {"note": "x"}
        assert (train(resumed, 2), train(resumed, 2)) == (second, third)
        assert resumed.serial == 3


def test_rewind_without_loss_stays_in_its_lineage(pool, path):
    add_ready(pool, 2)
    train(pool, 2)
    pool.record_checkpoint(1, path.parent, {})
    pool.close()
    with Pool.open(path) as resumed:
        assert resumed.rewind_to_checkpoint().lineage == resumed.lineage == 0


def test_rewind_without_checkpoint_begins_again(pool, path):
    ids = add_ready(pool, 2)
    train(pool, 2)
    pool.close()
    with Pool.open(path) as resumed:
        rewind = resumed.rewind_to_checkpoint()
        assert (rewind.checkpoint, rewind.serial, rewind.replayed) == (None, 0, 2)
        assert train(resumed, 2) == ids


def test_rewind_to_an_older_checkpoint_forgets_the_later_one(pool, path):
    """E01: the newest files turned out to be broken, so the caller names the one before."""
    for step in (1, 2, 3):
        add_ready(pool, 2)
        train(pool, 2)
        pool.record_checkpoint(step, path.parent / f"step_{step}", {})
    assert [c.serial for c in pool.checkpoints()] == [3, 2]
    pool.close()
    with Pool.open(path) as resumed:
        with pytest.raises(ResumeError, match="no checkpoint 1"):
            resumed.rewind_to_checkpoint(1)
        assert resumed.rewind_to_checkpoint(2).replayed == 2
        assert [c.serial for c in resumed.checkpoints()] == [2]


def test_pruning_strips_arrays_but_never_what_a_rewind_needs(pool, path):
    for _ in range(4):
        add_ready(pool, 2)
        train(pool, 2)
    assert pool.prune_trained(1) == 0, "no checkpoint: everything may be trained again"
    pool.record_checkpoint(4, path.parent, {})
    for _ in range(2):
        add_ready(pool, 2)
        train(pool, 2)
    assert pool.prune_trained(3) == 6
    assert pool.prune_trained(0) == 2
    with PoolReader(path) as reader:
        assert reader.query("SELECT COUNT(text) AS n FROM rollouts WHERE reward IS NOT NULL") == [{"n": 24}]
        assert len(reader.groups()) == 4
        assert {g.group_id for g in reader.groups(first_batch=6)} == {10, 11}
        assert len(reader.groups(limit=1)) == 1
    pool.close()
    with Pool.open(path) as resumed:
        assert resumed.rewind_to_checkpoint().replayed == 4
        assert len(train(resumed, 2)) == 2


def test_plain_sql_reads_rewards_while_the_owner_writes(pool, path):
    group_id = pool.admit("p", 0, 0)
    rollouts = [make_rollout(0, reward=0.5, format=0.5), make_rollout(1, reward=None)]
    pool.commit(make_group(group_id, rollouts=rollouts))
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
        rows = db.execute("SELECT reward, reward_parts, text, state FROM rollouts ORDER BY sample").fetchall()
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            db.execute("DELETE FROM rollout")
    db.close()
    assert [(r[0], json.loads(r[1])) for r in rows] == [(0.5, {"format": 0.5}), (None, {})]
    with PoolReader(path) as reader:
        assert reader.state_counts()[GroupState.READY] == 1


def test_a_later_owner_fences_the_earlier_one(pool, path):
    add_ready(pool, 1)
    with Pool.open(path):
        with pytest.raises(PoolError, match="taken over"):
            pool.admit("p", 0, 0)
        with pytest.raises(PoolError, match="taken over"):
            pool.lease_batch(1, 0, keep_all)


def test_many_threads_lose_nothing(pool):
    def work():
        for _ in range(10):
            add_ready(pool, 1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.counts().ready == 40
    assert sorted(g.group_id for g in pool.lease_batch(40, 0, keep_all).groups) == list(range(40))


def test_a_full_disk_is_said_clearly_and_leaves_no_half_group(pool):
    add_ready(pool, 1)
    group_id = pool.admit("p", 0, 0)
    with pool._store.reading() as db:
        pages = db.execute("PRAGMA page_count").fetchone()[0]
        db.execute(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(UserError, match="no space left"):
        pool.commit(make_group(group_id, rollouts=[make_rollout(0, n=20_000)]))
    assert (pool.counts().running, pool.counts().ready) == (1, 1)
    with pool._store.reading() as db:
        assert db.execute("SELECT COUNT(*) FROM rollout WHERE group_id = ?", (group_id,)).fetchone()[0] == 0
        db.execute("PRAGMA max_page_count = 100000")
    pool.commit(make_group(group_id))


def test_a_place_that_cannot_be_written_is_said_clearly(tmp_path):
    with pytest.raises(UserError, match=r"run\.dir"):
        Pool.create(tmp_path / "missing" / "pool.sqlite", "run")
    assert list(tmp_path.iterdir()) == []


def test_failed_creation_leaves_nothing(path, monkeypatch):
    monkeypatch.setattr("tithe.pool.store.DDL", "CREATE TABLE broken (")
    with pytest.raises(PoolError):
        Pool.create(path, "run")
    assert list(path.parent.iterdir()) == []


def test_read_only_pool_is_said_clearly(pool, path):
    with pool._store.reading() as db:
        db.execute("PRAGMA query_only = 1")
        with pytest.raises(UserError, match="read-only"):
            pool.admit("p", 0, 0)
        db.execute("PRAGMA query_only = 0")


def test_existing_missing_foreign_and_newer_files_are_refused(pool, path, tmp_path):
    with pytest.raises(UserError, match="already holds"):
        Pool.create(path, "run-2")
    with pytest.raises(ResumeError, match="no pool"):
        Pool.open(tmp_path / "absent.sqlite")
    with pytest.raises(ResumeError, match="no pool"):
        PoolReader(tmp_path / "absent.sqlite")
    foreign = tmp_path / "foreign.sqlite"
    foreign.write_bytes(b"not a database, but long enough to be read as one" * 20)
    with pytest.raises(ResumeError):
        Pool.open(foreign)
    with pytest.raises(ResumeError):
        PoolReader(foreign)
    empty = tmp_path / "empty.sqlite"
    empty.touch()
    with pytest.raises(ResumeError, match="interrupted"):
        Pool.open(empty)
    with pool._store.reading() as db:
        db.execute("PRAGMA user_version = 99")
    pool.close()
    with pytest.raises(ResumeError, match="schema 99"):
        Pool.open(path)


def test_a_second_process_is_kept_out(pool, path):
    pid = os.fork()
    if pid == 0:
        try:
            Pool.open(path)
        except UserError as error:
            os._exit(7 if "in use" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_disk_use_is_reported(pool, path):
    before = pool.disk_bytes()
    add_ready(pool, 20)
    assert pool.disk_bytes() > before >= path.stat().st_size


def test_a_finished_pool_on_a_read_only_disk_can_be_read(pool, path, monkeypatch):
    add_ready(pool, 2)
    pool.close()
    connect = sqlite3.connect

    def read_only_disk(database, **kwargs):
        if "mode=ro" in database:
            raise sqlite3.OperationalError("unable to open database file")
        return connect(database, **kwargs)

    monkeypatch.setattr("tithe.pool.reader.sqlite3.connect", read_only_disk)
    with PoolReader(path) as reader:
        assert len(reader.groups(GroupState.READY)) == 2
