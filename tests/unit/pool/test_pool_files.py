"""The pool as a file: resume, retention, readers, full disks, second owners."""

from __future__ import annotations

import json
import os
import sqlite3

import pytest

from tithe.errors import PoolError, ResumeError, UserError
from tithe.pool import GroupState, Pool, PoolReader, PromptSource
from tithe.pool import reader as reader_module
from unit.pool.groups import add_ready, keep_all, make_group, make_rollout, train


def test_counts_are_what_staleness_needs_also_after_resume(pool, path):
    """D15: the acceptance counter comes from the pool's serial and rows, not from zero."""
    for _ in range(3):
        add_ready(pool, 2)
        train(pool, 2)
    add_ready(pool, 1)
    pool.admit("p", 0, 3)
    pool.record_checkpoint(3, path.parent, {})
    assert pool.counts().accepted_rollouts(batch_rollouts=8) == 3 * 8 + 2
    pool.close()
    with Pool.open(path) as again:
        assert again.rewind_to_checkpoint().serial == 3
        counts = again.counts()
        assert (counts.serial, counts.running, counts.ready, counts.leased) == (3, 0, 1, 0)
        assert counts.accepted_rollouts(batch_rollouts=8) == 3 * 8 + 2


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
    pool.lease_batch(2, 3, keep_all)
    pool.close()
    with Pool.open(path) as resumed:
        assert resumed.counts().ready == 1, "a dead owner's lease has ended"
        rewind = resumed.rewind_to_checkpoint()
        assert (rewind.serial, rewind.replayed) == (1, 4)
        assert rewind.checkpoint is not None
        assert rewind.checkpoint.directory == path.parent / "step_1"
        assert rewind.checkpoint.state == {"note": "x"}
        assert (train(resumed, 2), train(resumed, 2)) == (second, third)
        assert resumed.serial == 3


def test_a_batch_that_waits_again_may_be_trained_in_another_order(pool, path):
    """The old places of its groups are free: none may stand in another's way."""
    add_ready(pool, 2)
    first, second = train(pool, 2)
    pool.close()
    with Pool.open(path) as resumed:
        resumed.rewind_to_checkpoint()
        resumed.lease_batch(4, 0, keep_all)
        resumed.mark_trained([second, first], 1)
    with PoolReader(path) as reader:
        places = reader.query("SELECT group_id, batch_position FROM groups ORDER BY batch_position")
    assert [tuple(row.values()) for row in places] == [(second, 0), (first, 1)]


def test_a_reader_sees_one_instant_while_the_owner_prunes(pool, path, monkeypatch):
    for _ in range(3):
        add_ready(pool, 2)
        train(pool, 2)
    pool.record_checkpoint(3, path.parent, {})
    load = reader_module.load_group

    def pruned_meanwhile(db, group_id):
        pool.prune_trained(0)
        return load(db, group_id)

    monkeypatch.setattr(reader_module, "load_group", pruned_meanwhile)
    with PoolReader(path) as reader:
        assert len(reader.groups()) == 6
        assert reader.groups() == [], "the next call sees what was pruned"


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


def test_a_finished_run_on_a_read_only_disk_is_read(pool, path, monkeypatch):
    """Where SQLite may not make its index file. An empty log, which an earlier reader left, holds nothing back."""
    add_ready(pool, 2)
    pool.close()
    first_read, asked = reader_module._first_read, []

    def refused(uri):
        asked.append(uri.partition("?")[2])
        if "immutable" not in uri:
            raise sqlite3.OperationalError("attempt to write a readonly database")
        return first_read(uri)

    monkeypatch.setattr(reader_module, "_first_read", refused)
    log = path.with_name(path.name + "-wal")
    for leave in (lambda: log.unlink(missing_ok=True), log.touch):
        leave()
        with PoolReader(path) as reader:
            assert reader.state_counts()[GroupState.READY] == 2
    assert asked == ["mode=ro", "immutable=1"] * 2
    log.write_bytes(b"what was not yet written into the file")
    with pytest.raises(PoolError, match="readonly"):
        PoolReader(path)


def test_a_later_owner_fences_the_earlier_one(pool, path):
    add_ready(pool, 1)
    with Pool.open(path):
        with pytest.raises(PoolError, match="taken over"):
            pool.admit("p", 0, 0)
        with pytest.raises(PoolError, match="taken over"):
            pool.lease_batch(2, 0, keep_all)


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
