"""Samples and prompts that follow pass rates: the pool's own decisions, in simulated time."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import pytest

from tithe.config import load_config
from tithe.errors import ConfigError, UserError
from tithe.pool import Curriculum, Draw, Pool, PromptRecord, PromptSource, adaptive_samples
from tithe.simulator import Empirical, Fixed, Options, Scenario, Uniform, Workload, simulate, simulate_target
from tithe.simulator.prompts import Prompts
from tithe.simulator.settings import scenario_of
from tithe.staleness import fit_group
from unit.pool.groups import make_group
from unit.simulator.scenes import RICH, bounds, scene


def school(rates, *, lag: int = 0, prompts: int = 12, **more) -> Scenario:
    """Batches of 16 rollouts, usually in groups of 4."""
    work = Workload(prompt_tokens=Fixed(5), new_tokens=Uniform(2, 9), pass_rate=rates, prompts=prompts)
    return scene(bounds(lag, batch=16, group=4), RICH, work, steps=40, **more)


def test_a_group_has_the_samples_that_the_pools_function_gives_its_record():
    outcome = simulate(school(Uniform(0.0, 1.0), samples_span=(2, 8)))
    newest: dict[int, PromptRecord] = {}
    before: dict[int, PromptRecord] = {}
    sizes, batch, taken = set[int](), 0, 0
    for group in sorted(outcome.trained_groups, key=lambda one: one.group_id):
        if taken == 16:
            batch, taken, before = batch + 1, 0, dict(newest)
        wanted = adaptive_samples(before.get(group.prompt), usual=4, least=2, most=8)
        assert (group.batch, group.shape.size) == (batch, fit_group(wanted, 16 - taken, 2))
        taken += group.shape.size
        sizes.add(group.shape.size)
        assert group.pass_rate == sum(sample.is_right for sample in group.shape.samples) / group.shape.size
        newest[group.prompt] = PromptRecord(group.pass_rate, batch)
    assert {2, 8} <= sizes


@pytest.mark.parametrize("lag", [0, 2])
def test_batches_stay_whole(lag: int):
    outcome = simulate(school(Uniform(0.0, 1.0), lag=lag, samples_span=(2, 8)))
    assert {row.rollouts for row in outcome.ledger.batches} == {16}
    assert outcome.record()["rollouts_per_group"] != 4.0


def test_more_samples_where_answers_differ_make_more_rollouts_that_teach():
    plain, adaptive = (
        simulate(school(Uniform(0.0, 1.0), samples_span=span)).record()["rollouts_mixed_frac"]
        for span in (None, (2, 8))
    )
    assert 0 < plain < adaptive


def test_solved_prompts_rest_and_come_back():
    outcome = simulate(school(Fixed(1.0), prompts=24, curriculum=Curriculum(rest_batches=4)))
    drawn = defaultdict(list)
    for group in outcome.pool.groups.values():
        drawn[group.prompt].append(group.batch)
    assert set(drawn) == set(range(24))
    gaps = [after - before for batches in drawn.values() for before, after in pairwise(batches)]
    assert min(gaps) == 5
    assert outcome.record()["rollouts_mixed_frac"] == 0.0


def test_prompts_that_differ_are_drawn_more_often():
    weights = Curriculum(is_weighted=True)
    outcome = simulate(school(Empirical((0.0, 0.5)), prompts=30, curriculum=weights))
    rates = defaultdict(list)
    for group in outcome.trained_groups:
        rates[group.prompt].append(group.pass_rate)
    never, half = ([len(found) for found in rates.values() if (max(found) > 0) is mixed] for mixed in (False, True))
    assert sum(half) / len(half) > 1.5 * sum(never) / len(never)


def test_prompts_are_drawn_in_the_order_of_the_real_pool(tmp_path):
    """The same task, seed, curriculum and judgements: the pool and the simulator ask for the same prompts."""
    curriculum = Curriculum(rest_batches=2, is_weighted=True)
    mine, rates = Prompts(7, seed=3, curriculum=curriculum), [0.0, 1.0, 0.5, 0.25]
    seen = Counter[str]()
    with Pool.create(tmp_path / "pool.sqlite", "mine") as pool:
        pool.bind_prompts(PromptSource([str(i) for i in range(7)], seed=3), curriculum=curriculum)
        for number in range(40):
            batch = number // 2
            real = pool.admit_next(0, 0, Draw(batch=batch, samples=lambda _record: 1))
            prompt = mine.draw(batch)
            assert str(prompt) == real.prompt_id
            rate = rates[(number * 5 + prompt) % 4]
            pool.commit(make_group(real.group_id, real.prompt_id, lineage=0), pass_rate=rate)
            mine.admit(prompt, batch)
            mine.measure(prompt, batch, real.group_id, rate)
            seen[real.prompt_id] += 1
    assert len(set(seen.values())) > 1


def test_what_follows_pass_rates_needs_them():
    with pytest.raises(ConfigError, match="pass rates"):
        scene(bounds(0, batch=16, group=4), RICH, samples_span=(2, 8))


KEYS = ["rl.batch_size_per_update=16", "rl.samples_per_prompt=4"]
SCHEDULE = ["schedule.adaptive_samples=[2, 8]", "schedule.rest_batches=3", "schedule.prompt_weights=pass_rate"]


def test_a_run_files_schedule_is_simulated_where_pass_rates_are_given(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("run: {name: mine}\n")
    lengths = {"new_tokens": "9", "prompt_tokens": "5"}

    def told(**more):
        rates = more.pop("distributions", {})
        options = Options(steps=6, costs="tick_fixed_s=0.1", distributions=lengths | rates, **more)
        return simulate_target(str(path), [*KEYS, *SCHEDULE], options).record()

    without = told()
    assert any("--prompts and --pass-rate" in text for text in without["assumptions"])
    assert without["setting"]["rollouts_per_group"] == 4.0
    followed = told(prompts=9, distributions={"pass_rate": "uniform:0,1"})
    assert any("keeps its pass rate" in text for text in followed["assumptions"])
    assert followed["setting"]["rollouts_per_group"] != 4.0


def test_the_curriculum_of_a_configuration():
    work = Workload(pass_rate=Fixed(0.5), prompts=5)
    made = scenario_of(load_config(None, [*KEYS, *SCHEDULE, "schedule.rest_outside=[0.1, 0.9]"]), RICH, work, steps=3)
    assert made.samples_span == (2, 8)
    assert made.curriculum == Curriculum(rest_batches=3, rest_below=0.1, rest_above=0.9, is_weighted=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (Options(distributions={"pass_rate": "0.5", "new_tokens": "9"}, costs="tick_fixed_s=1"), "--prompts"),
        (Options(prompts=-1, costs="tick_fixed_s=1"), "--prompts = -1"),
        (Options(distributions={"new_tokens": "9"}, costs="publish_s=0"), "nothing takes any time"),
        (Options(crash_hours=float("nan"), costs="tick_fixed_s=1"), "--crash-hours"),
        (Options(restart_s=float("inf"), costs="tick_fixed_s=1"), "--restart-s"),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_its_option(tmp_path, options, said):
    path = tmp_path / "mine.yaml"
    path.write_text("run: {name: mine}\n")
    with pytest.raises(UserError, match=said):
        simulate_target(str(path), KEYS, options)
