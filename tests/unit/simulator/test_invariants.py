"""What holds whatever the setting."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tithe.errors import ConfigError, PoolError
from tithe.pool import Draw
from tithe.simulator import Exponential, Failures, Fixed, Layout, LogNormal, Measured, Uniform, Workload, simulate
from tithe.simulator.groups import GroupPool
from tithe.simulator.scenario import Sample, Turn
from tithe.simulator.shapes import Shape
from unit.simulator.scenes import RICH, TWO_LANES, bounds, check, overlaps, scene

WILD = Workload(
    prompt_tokens=Uniform(5, 60),
    new_tokens=LogNormal(20, 1.0),
    turns=Uniform(1, 3),
    tool_s=Exponential(0.3),
    tool_tokens=Fixed(8),
    reward_s=LogNormal(0.5, 1.2),
)

rules = st.integers(0, 4).flatmap(
    lambda lag: st.builds(
        bounds,
        st.just(lag),
        age=st.integers(0, lag + 2),
        sync_every=st.just(1) if lag < 2 else st.integers(1, lag),
        batch=st.sampled_from([4, 8, 12]),
        group=st.sampled_from([2, 4]),
    )
)
layouts = st.sampled_from([Layout(), TWO_LANES, Layout("separate", 3, 2)])
failures = st.sampled_from([Failures(), Failures(rollout_rate=0.2), Failures(0.1, crash_mean_s=6.0, restart_s=2.0)])


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    rules=rules,
    layout=layouts,
    failing=failures,
    on_publish=st.sampled_from(["finish", "recompute", "keep"]),
    in_flight=st.sampled_from([4, 9, 64]),
    workers=st.sampled_from([None, 2]),
    live=st.sampled_from([2, 4]),
    seed=st.integers(0, 3),
)
def test_bounds_hold_and_every_group_leaves_once(rules, layout, failing, on_publish, in_flight, workers, live, seed):
    made = scene(
        rules,
        RICH,
        WILD,
        layout=layout,
        failures=failing,
        on_publish=on_publish,
        max_running=in_flight,
        reward_workers=workers,
        max_live_versions=live,
        micro_batch_tokens=200,
        checkpoint_every=2,
        seed=seed,
        steps=10,
    )
    outcome = simulate(made)
    check(outcome)
    if failing.rollout_rate == 0:
        assert outcome.pool.left["failed"] == outcome.ledger.counts["failed_rollouts"] == 0
    if failing.crash_mean_s is None:
        assert outcome.crashes == outcome.ledger.counts["given_up"] == outcome.ledger.counts["replayed"] == 0


def test_the_backlog_never_exceeds_its_bound(monkeypatch):
    most, size = [], 4
    admit = GroupPool.admit

    def watch(pool, *args):
        group = admit(pool, *args)
        most.append((pool.running + pool.waiting + pool.leased) * size)
        return group

    monkeypatch.setattr(GroupPool, "admit", watch)
    for age in (0, 1, 3):
        most.clear()
        simulate(scene(bounds(age, batch=8, group=size), RICH, WILD, steps=20))
        assert max(most) == (age + 1) * 8


def test_the_buffer_bounds_what_waits_or_runs(monkeypatch):
    most = []
    admit = GroupPool.admit

    def watch(pool, *args):
        group = admit(pool, *args)
        most.append((pool.running + pool.waiting) * 4)
        return group

    monkeypatch.setattr(GroupPool, "admit", watch)
    outcome = simulate(scene(bounds(4, batch=8, group=4), RICH, WILD, steps=20, buffer=12))
    check(outcome)
    assert max(most) == 12
    assert outcome.record()["admission_held_back_s"]["buffer"] > 0


def test_synchronous_sides_never_work_at_the_same_time():
    sync = simulate(scene(bounds(0, batch=8, group=4), RICH, WILD, layout=TWO_LANES))
    late = simulate(scene(bounds(1, batch=8, group=4), RICH, WILD, layout=TWO_LANES))
    assert not overlaps(sync, "rollout-0", "train")
    assert overlaps(late, "rollout-0", "train")
    assert sync.age_histogram() == {0: 1.0}


@pytest.mark.parametrize("on_publish", ["finish", "recompute", "keep"])
def test_the_same_seed_gives_the_same_outcome(on_publish):
    def record(seed):
        rules = bounds(2, batch=8, group=4)
        return simulate(scene(rules, RICH, WILD, seed=seed, on_publish=on_publish)).record()

    assert record(5) == record(5)
    assert record(5)["span_s"] != record(6)["span_s"]


def test_what_happens_to_a_group_does_not_depend_on_the_setting():
    """The lengths and rewards of group 7 are its own, so settings differ by what they are and not by luck."""
    shapes = [
        simulate(scene(bounds(lag, batch=8, group=4), RICH, WILD, steps=6)).pool.groups[7].shape for lag in (0, 3)
    ]
    assert shapes[0] == shapes[1]
    assert len({sample.new_tokens for sample in shapes[0].samples}) > 1


def test_more_room_is_never_slower_here():
    """Equal rollouts, so that none is overtaken and dropped: more room can only fill waiting."""

    def steps(new_tokens=30, age=2, **more):
        work = Workload(prompt_tokens=Fixed(10), new_tokens=Fixed(new_tokens), reward_s=Fixed(2.0))
        made = scene(bounds(age, batch=8, group=4), RICH, work, layout=TWO_LANES, steps=40, **more)
        outcome = simulate(made)
        assert outcome.pool.left["stale"] == 0
        return outcome.step_s

    slack = 1.02  # the order of rollouts differs
    by_age = [steps(age=age) for age in (0, 1, 2, 4)]
    by_workers = [steps(reward_workers=n) for n in (1, 2, 4, 16)]
    # with places enough for a batch, decoding the next one beside it only delays it
    by_slots = [steps(new_tokens=120, max_running=n) for n in (2, 4, 8)]
    for times in (by_age, by_workers, by_slots):
        assert all(b <= a * slack for a, b in pairwise(times)), times
        assert times[-1] < 0.8 * times[0]


def test_illegal_moves_are_refused():
    pool = GroupPool()
    group = pool.admit(Draw(), lambda _size, _prompt, _group: Shape(1, (Sample((Turn(1),)),)), 0, 0.0)
    with pytest.raises(PoolError, match="running and cannot be leased"):
        pool.lease([group])
    pool.commit(group)
    with pytest.raises(PoolError, match="ready and cannot be committed"):
        pool.commit(group)


def test_a_setting_that_cannot_work_is_refused_by_name():
    with pytest.raises(ConfigError, match="rollout_buffer_size"):
        scene(bounds(0, batch=8, group=4), buffer=4)
    with pytest.raises(ConfigError, match="separate"):
        Layout("shared", rollout_copies=2)


def test_a_prompt_that_is_put_back_is_drawn_before_new_ones_and_is_slow_again():
    """What was measured belongs to its prompt, so under a tight age a slow one takes up room again and again."""
    fast, slow = Measured(5, (4, 4), 0.1), Measured(5, (4, 4), 3.0)
    work = Workload(measured=(fast, fast, slow, *[fast] * 61))
    outcome = simulate(scene(bounds(1, batch=4, group=2), RICH, work, steps=30))
    check(outcome)
    prompts = [group.prompt for group in outcome.pool.groups.values()]
    assert outcome.pool.left["stale"] >= 1
    assert prompts.count(2) == 1 + outcome.pool.left["stale"]
    assert all(prompts.count(prompt) == 1 for prompt in set(prompts) - {2})
