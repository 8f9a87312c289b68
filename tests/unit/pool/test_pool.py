"""What the loops do with the pool: admissions, commits, leases, one property each."""

from __future__ import annotations

import dataclasses
import sqlite3
import threading

import numpy as np
import pytest

from tithe.errors import DataError, Failure, FailureCause, PoolError, ResumeError, RunError
from tithe.pool import DropReason, PoolReader, PromptSource
from tithe.types import Rollout
from unit.pool.groups import add_ready, keep_all, make_group, make_rollout


def test_groups_come_back_exactly_as_they_were_committed(pool):
    rollouts = (
        dataclasses.replace(
            make_rollout(0, serial=4, n=5, reward=0.25, format=0.5, answer=-0.25),
            experts=np.arange(7 * 2 * 3, dtype=np.uint16).reshape(7, 2, 3) + 65_000,
        ),
        make_rollout(2, n=0, reward=None, failure=Failure(FailureCause.TIMEOUT, "after 5 s")),
    )
    group_id = pool.admit("p1", 0, 4)
    pool.commit(make_group(group_id, "p1", serial=4, rollouts=rollouts))
    (back,) = pool.lease_batch(2, 0, keep_all).groups
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
    groups = pool.lease_batch(8, 0, keep_all).groups
    assert [[r.reward for r in g.rollouts] for g in groups] == [[0.0] * 4, [1.0] * 4]


def test_rejected_group_never_reaches_a_batch(pool):
    """C05: what is dropped for staleness is out of the batch as a whole, so it is in nobody's baseline."""
    (old,) = add_ready(pool, serial=0)
    (young,) = add_ready(pool, serial=3)
    lease = pool.lease_batch(2, 0, lambda min_serial: min_serial < 2)
    assert lease.dropped == (old,)
    assert [g.group_id for g in lease.groups] == [young]


def test_an_incomplete_batch_leases_nothing_but_keeps_its_drops(pool, path):
    add_ready(pool, 2, serial=0)
    add_ready(pool, 1, serial=5)
    lease = pool.lease_batch(4, 0, lambda min_serial: min_serial < 5)
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
    assert [g.group_id for g in pool.lease_batch(4, 0, keep_all).groups] == ids[:2]


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
        ("leased", lambda pool, g: pool.lease_batch(2, 1, keep_all)),
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
        pool.lease_batch(2, 0, keep_all)
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
        ({"rollouts": (dataclasses.replace(make_rollout(0), experts=np.zeros((4, 2, 3), np.uint16)),)}, r"\[5, L, k\]"),
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
    batch = [g.group_id for g in pool.lease_batch(4, 0, keep_all).groups]
    pool.requeue(batch)
    assert [g.group_id for g in pool.lease_batch(8, 0, keep_all).groups] == ids


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
    pool.lease_batch(2, 0, lambda _serial: True)
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
    with pytest.raises(ResumeError, match="prompts of the task"):
        pool.bind_prompts(PromptSource(["a", "b", "c"], 0))


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
    assert sorted(g.group_id for g in pool.lease_batch(80, 0, keep_all).groups) == list(range(40))


def test_groups_given_up_come_first_again_under_their_ids(pool):
    pool.bind_prompts(PromptSource([f"p{i}" for i in range(9)], 0))
    first = [pool.admit_next(0, 0) for _ in range(3)]
    pool.drop([first[1].group_id], DropReason.STALE)
    assert pool.give_up_running() == 2
    assert pool.counts().running == 0
    again = [pool.admit_next(0, 0) for _ in range(3)]
    assert again[:2] == [first[0], first[2]]
    assert again[2].prompt_id == first[1].prompt_id
    assert again[2].group_id == 3
