"""Cases whose times follow from arithmetic."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tithe.config import load_config
from tithe.simulator import Fixed, LaneCosts, PublishCosts, Workload, scenario_of, simulate
from unit.simulator.scenes import RICH, SECOND, TWO_LANES, bounds, check, scene


def test_a_synchronous_step_is_the_sum_of_its_parts():
    costs = LaneCosts(tick_fixed_s=1.0, micro_fixed_s=1.0, optimizer_s=0.5, publish=PublishCosts(0.25, 0.125, 0.125))
    work = Workload(prompt_tokens=Fixed(5), new_tokens=Fixed(3), reward_s=Fixed(2.0))
    outcome = simulate(scene(bounds(0), costs, work, steps=10))
    check(outcome)
    step_s = 3.0 + 2.0 + 1.0 + 0.5 + 0.5  # three ticks, reward, micro-batch, optimizer, publication
    assert outcome.step_s == pytest.approx(step_s)
    assert outcome.span_s == pytest.approx(0.5 + 10 * step_s)
    shares = outcome.utilisation()["shared"]
    assert shares["sample_frac"] == pytest.approx(30.0 / outcome.span_s)
    assert shares["train_frac"] == pytest.approx(15.0 / outcome.span_s)
    assert outcome.rollouts_per_s == pytest.approx(1 / step_s)


def test_a_long_prompt_takes_several_ticks_and_is_computed_once_for_its_group():
    work = Workload(prompt_tokens=Fixed(10), new_tokens=Fixed(4))
    costs = LaneCosts(tick_fixed_s=1.0, prefill_s_per_token=0.5)
    outcome = simulate(scene(bounds(0, batch=3, group=3), costs, work, prefill_tokens=4))
    # ticks of 4, 4 and 2 rows, whose last draws the first token; then three of decoding
    assert outcome.step_s == pytest.approx(6 * 1.0 + 10 * 0.5)


def test_two_prompts_of_a_batch_are_both_computed():
    costs = LaneCosts(prefill_s_per_token=1.0)
    work = Workload(prompt_tokens=Fixed(7), new_tokens=Fixed(1))
    assert simulate(scene(bounds(0, batch=4, group=2), costs, work)).step_s == pytest.approx(14.0)


def test_a_tick_costs_what_is_live_and_what_is_cached():
    costs = LaneCosts(decode_s_per_sequence=1.0, decode_s_per_cached_token=0.01)
    work = Workload(prompt_tokens=Fixed(9), new_tokens=Fixed(5))
    outcome = simulate(scene(bounds(0, batch=2, group=2), costs, work))
    # the first token comes with the prompt; then 4 ticks of 2 rows over 2·10, 2·11, 2·12, 2·13 cached tokens
    assert outcome.step_s == pytest.approx(4 * 2 * 1.0 + 0.01 * 2 * (10 + 11 + 12 + 13), rel=0.01)


def test_little_s_law_where_only_latency_counts():
    """M + 1 rollouts are under way; each takes a second to sample, eight to judge and one to train."""
    work = Workload(prompt_tokens=Fixed(1), new_tokens=Fixed(1), reward_s=Fixed(8.0))
    for age in (0, 1, 3):
        outcome = simulate(scene(bounds(age), SECOND, work, layout=TWO_LANES, steps=40))
        check(outcome)
        assert outcome.step_s == pytest.approx(10.0 / (age + 1))


def test_a_shared_base_does_no_more_arithmetic_when_it_overlaps():
    """Nothing waits for anything but the lane: asynchrony gains nothing there, and everything on two lanes."""
    costs = LaneCosts(decode_s_per_sequence=1.0, prefill_s_per_token=1.0, micro_fixed_s=4.0)
    work = Workload(prompt_tokens=Fixed(2), new_tokens=Fixed(3))
    sync, late = (simulate(scene(bounds(lag), costs, work, steps=60)) for lag in (0, 3))
    assert sync.step_s == pytest.approx(8.0)
    assert late.step_s == pytest.approx(8.0, rel=0.02)
    assert sync.ledger.busy_s("shared", "train") == late.ledger.busy_s("shared", "train")
    apart = simulate(scene(bounds(3), costs, work, steps=60, layout=TWO_LANES))
    assert apart.step_s == pytest.approx(4.0)


def test_judging_with_one_worker_is_a_queue():
    work = Workload(prompt_tokens=Fixed(1), new_tokens=Fixed(1), reward_s=Fixed(3.0))
    rules = bounds(0, batch=4, group=4)
    one, two, free = (simulate(scene(rules, SECOND, work, reward_workers=n)) for n in (1, 2, None))
    assert [o.step_s for o in (one, two, free)] == pytest.approx([1 + 12 + 1, 1 + 6 + 1, 1 + 3 + 1])
    assert one.record()["reward_worker_busy_frac"] == pytest.approx(12 / 14)


def test_tools_wait_outside_the_lane_and_their_answers_are_read_as_a_prompt():
    work = Workload(
        prompt_tokens=Fixed(4), new_tokens=Fixed(2), turns=Fixed(3), tool_s=Fixed(5.0), tool_tokens=Fixed(10)
    )
    costs = LaneCosts(tick_fixed_s=1.0, prefill_s_per_token=0.1, train_s_per_token=1.0)
    outcome = simulate(scene(bounds(0), costs, work))
    prefilled = 4 + (4 + 2 + 10) + (4 + 2 + 10 + 2 + 10)
    rows = 4 + 3 * 2 + 2 * 10
    assert outcome.step_s == pytest.approx(3 * 2 * 1.0 + 0.1 * prefilled + 2 * 5.0 + rows)


def test_a_full_engine_makes_requests_wait():
    work = Workload(prompt_tokens=Fixed(1), new_tokens=Fixed(10))
    wide, narrow = (simulate(scene(bounds(0, batch=8, group=2), SECOND, work, max_running=n)) for n in (8, 2))
    assert wide.step_s == pytest.approx(1 + 10 + 1)  # the first group's tick has begun when the others come
    assert narrow.step_s == pytest.approx(4 * 10 + 1)


def test_an_answer_that_waits_for_its_reward_takes_no_place_in_the_engine():
    """Little's law again, with one place: still four rollouts are under way, three of which are judged."""
    work = Workload(prompt_tokens=Fixed(1), new_tokens=Fixed(1), reward_s=Fixed(8.0))
    outcome = simulate(scene(bounds(3), SECOND, work, layout=TWO_LANES, steps=40, max_running=1))
    assert outcome.step_s == pytest.approx(10.0 / 4)


def test_between_two_micro_batches_the_engine_gets_one_tick():
    """Training of four micro-batches and an optimizer step is stretched by a tick each, no more and no less."""
    costs = LaneCosts(tick_fixed_s=1.0, micro_fixed_s=2.0, optimizer_s=2.0)
    work = Workload(prompt_tokens=Fixed(1), new_tokens=Fixed(1000))
    rules = bounds(1, batch=4, group=4)
    work_tokens = 1 + 4 * 1000
    outcome = simulate(scene(rules, costs, work, steps=6, micro_batch_tokens=-(-work_tokens // 4)))
    last = outcome.ledger.batches[-1]
    assert last.train_s == pytest.approx(5 * 2.0 + 4 * 1.0)


def test_a_publication_waits_for_room_for_one_more_version():
    work = Workload(prompt_tokens=Fixed(1), new_tokens=Fixed(1), reward_s=Fixed(20.0))
    rules = bounds(3)
    few, many = (simulate(scene(rules, SECOND, work, layout=TWO_LANES, max_live_versions=n, steps=30)) for n in (2, 9))
    check(few)
    assert few.record()["version_room_wait_s"] > 0 == many.record()["version_room_wait_s"]
    assert few.step_s > many.step_s


def test_a_batch_is_split_over_the_trainer_s_copies():
    from tithe.simulator import Layout

    costs = LaneCosts(train_s_per_token=1.0)
    work = Workload(prompt_tokens=Fixed(4), new_tokens=Fixed(4))
    one, two = (simulate(scene(bounds(0), costs, work, layout=Layout("separate", 1, n))) for n in (1, 2))
    assert (one.step_s, two.step_s) == pytest.approx((8.0, 4.0))


@pytest.mark.parametrize("sync_every", [1, 2, 3])
def test_the_trainer_runs_ahead_as_far_as_sync_every_lets_it(sync_every):
    outcome = simulate(scene(bounds(3, sync_every=sync_every), RICH, steps=30))
    check(outcome)
    assert set(outcome.lag_histogram()) == set(range(sync_every))
    assert outcome.ledger.counts["publications"] == 1 + -(-30 // sync_every)


@pytest.mark.parametrize("lag", [0, 2])
def test_a_phase_has_its_own_samples_and_a_batch_keeps_its_rollouts(lag: int) -> None:
    """A prompt's 10 tokens are computed once a group: 1, 2 and 4 groups of 8, 4 and 2 rollouts make a batch."""
    costs = LaneCosts(prefill_s_per_token=1.0)
    work = Workload(prompt_tokens=Fixed(10), new_tokens=Fixed(1))
    phases = ((0, 8), (2, 4), (3, 2))
    outcome = simulate(scene(bounds(lag, batch=8, group=8), costs, work, steps=5, group_sizes=phases))
    batches = [[g for g in outcome.pool.groups.values() if g.batch_serial == n] for n in range(1, 6)]
    assert [[g.shape.size for g in batch] for batch in batches] == [[8], [8], [4, 4], [2] * 4, [2] * 4]
    assert [row.rollouts for row in outcome.ledger.batches] == [8] * 5
    if lag == 0:
        ends = [0.0, *(row.end_s for row in outcome.ledger.batches)]
        assert [after - before for before, after in pairwise(ends)] == pytest.approx([10, 10, 20, 40, 40])


def test_the_phases_of_a_run_file_are_simulated() -> None:
    phases = "schedule.phases=[{name: a, until_step: 3, samples_per_prompt: 16}, {name: b, samples_per_prompt: 4}]"
    scenario, plain = (
        scenario_of(load_config(None, keys), SECOND, Workload(), steps=9) for keys in ([phases], ["run.max_steps=9"])
    )
    assert [scenario.group_size(batch) for batch in (0, 2, 3, 8)] == [16, 16, 4, 4]
    assert [plain.group_size(batch) for batch in (0, 8)] == [8, 8]
