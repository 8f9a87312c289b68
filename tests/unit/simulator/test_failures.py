"""Rollouts that crash, judges that take too long, a process that dies."""

from __future__ import annotations

import pytest

from tithe.errors import RunError
from tithe.simulator import Failures, Fixed, LogNormal, Workload, simulate
from unit.simulator.scenes import RICH, SECOND, bounds, check, scene

WORK = Workload(prompt_tokens=Fixed(10), new_tokens=LogNormal(20, 0.8), reward_s=Fixed(0.2))
RULES = bounds(1, batch=8, group=4)


def test_failed_rollouts_are_counted_and_their_groups_go_on_without_them():
    outcome = simulate(scene(RULES, RICH, WORK, failures=Failures(rollout_rate=0.3), steps=30))
    check(outcome)
    ended = [g for g in outcome.pool.groups.values() if g.usable or g.state == "dropped"]
    crashes = sum(sample.crashes for group in ended for sample in group.shape.samples)
    assert outcome.ledger.counts["failed_rollouts"] == crashes
    assert 0.2 < crashes / (4 * len(ended)) < 0.4


def test_a_group_without_any_usable_rollout_is_dropped():
    rules = bounds(1, batch=8, group=2)
    outcome = simulate(scene(rules, RICH, WORK, failures=Failures(rollout_rate=0.5), steps=20))
    check(outcome)
    lost = [g for g in outcome.pool.groups.values() if all(s.crashes for s in g.shape.samples)]
    assert outcome.pool.left["failed"] > 5
    assert outcome.pool.left["failed"] <= len(lost)


def test_when_every_rollout_fails_the_run_ends_with_the_reason():
    with pytest.raises(RunError, match="rollouts in a row are in groups that failed"):
        simulate(scene(RULES, RICH, WORK, failures=Failures(rollout_rate=1.0)))


def test_a_judge_is_killed_at_its_time_limit():
    slow = Workload(prompt_tokens=Fixed(1), new_tokens=Fixed(1), reward_s=LogNormal(2.0, 1.0))
    rules = bounds(0, batch=16, group=16)
    outcome = simulate(scene(rules, SECOND, slow, reward_timeout_s=3.0, steps=10))
    check(outcome)
    trained = [group for group in outcome.pool.groups.values() if group.state == "trained"]
    judged = [sample.reward_s for group in trained for sample in group.shape.samples]
    assert outcome.ledger.counts["failed_rollouts"] == sum(seconds > 3.0 for seconds in judged) > 0
    assert outcome.step_s == pytest.approx(1 + 3 + 1)  # in every batch somebody reaches the limit


def test_a_crash_costs_the_restart_and_what_was_trained_since_the_checkpoint():
    calm = simulate(scene(RULES, RICH, WORK, steps=60, checkpoint_every=5))
    mean_s = calm.span_s / 3
    failures = Failures(crash_mean_s=mean_s, restart_s=7.0)
    stormy = simulate(scene(RULES, RICH, WORK, steps=60, checkpoint_every=5, failures=failures))
    check(stormy)
    assert stormy.crashes >= 2
    assert stormy.ledger.counts["replayed"] > 0 < stormy.ledger.counts["given_up"]
    assert stormy.span_s > calm.span_s + stormy.crashes * 7.0
    rare = simulate(scene(RULES, RICH, WORK, steps=60, checkpoint_every=60, failures=failures))
    check(rare)
    assert rare.ledger.counts["replayed"] > stormy.ledger.counts["replayed"]


def test_a_group_that_was_given_up_is_made_again_under_its_number():
    failures = Failures(crash_mean_s=5.0, restart_s=1.0)
    outcome = simulate(scene(bounds(0, batch=8, group=4), RICH, WORK, steps=20, checkpoint_every=1, failures=failures))
    check(outcome)
    assert outcome.crashes > 0
    assert sorted(outcome.pool.groups) == list(range(len(outcome.pool.groups)))


def test_crashes_that_let_no_checkpoint_be_reached_end_the_simulation():
    failures = Failures(crash_mean_s=0.5, restart_s=0.0)
    with pytest.raises(RunError, match="crashes and only batch"):
        simulate(scene(RULES, RICH, WORK, failures=failures, checkpoint_every=50, steps=50))
