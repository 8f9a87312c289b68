"""The values of a schedule at a batch, and what a schedule may not say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tithe.config import Phase, PhaseValues, Schedule, build_config, load_config, schedule_of
from tithe.config.phases import phase_starts
from tithe.errors import ConfigError

THREE = (
    "schedule.phases=[{name: explore, temperature: 1.0, top_p: 0.95, samples_per_prompt: 8},"
    " {name: converge, temperature: 0.8, top_p: 0.9, samples_per_prompt: 4},"
    " {name: refine, temperature: 0.6, top_p: 0.85, samples_per_prompt: 2}]"
)


def test_three_phases_by_name():
    schedule = schedule_of(load_config(None, [THREE, "run.max_steps=90"]))
    seen = [(v.name, v.temperature, v.top_p, v.samples) for v in map(schedule.at, (0, 29, 30, 59, 60, 89, 200))]
    explore, converge, refine = ("explore", 1.0, 0.95, 8), ("converge", 0.8, 0.9, 4), ("refine", 0.6, 0.85, 2)
    assert seen == [explore, explore, converge, converge, refine, refine, refine]


def test_what_a_phase_leaves_out_is_the_run_files_own_value():
    overrides = [
        "schedule.phases=[{name: a, kl_coef: 0.5}, {name: b, lr: 1e-5}]",
        "rl.kl_coef=0.25",
        "optimizer.lr=2e-5",
    ]
    schedule = schedule_of(load_config(None, overrides))
    assert [(v.kl_coef, v.lr) for v in schedule.values] == [(0.5, 2e-5), (0.25, 1e-5)]


def test_without_phases_everything_is_constant():
    cfg = load_config(None, ["rollout.temperature=0.7"])
    schedule = schedule_of(cfg)
    assert schedule.at(0) == schedule.at(10**9)
    values = schedule.at(5)
    assert (values.temperature, values.samples) == (0.7, cfg.rl.samples_per_prompt)


def test_a_line_over_the_whole_run():
    first, last = "name: a, share: 1, temperature: 1.0, lr: 1e-3", "name: b, share: 0, temperature: 0.5, lr: 5e-4"
    line = f"schedule.phases=[{{{first}}}, {{{last}}}]"
    cfg = load_config(None, [line, "schedule.change=linear", "run.max_steps=10"])
    schedule = schedule_of(cfg)
    assert [round(schedule.at(b).temperature, 6) for b in range(12)] == [
        *[1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55],
        0.5,
        0.5,
    ]
    assert schedule.at(5).lr == pytest.approx(7.5e-4)


def values(name, index, temperature=1.0, samples=8):
    return PhaseValues(name, index, temperature, 1.0, samples, 0.0, 1e-4)


@st.composite
def schedules(draw):
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=5))
    starts = tuple(sum(lengths[:i]) for i in range(len(lengths)))
    kept = tuple(
        values(f"p{i}", i, draw(st.floats(0.1, 2.0)), draw(st.sampled_from([2, 4, 8]))) for i in range(len(lengths))
    )
    return Schedule(starts, kept, is_linear=draw(st.booleans()))


@given(schedule=schedules(), batch=st.integers(0, 200))
def test_a_batch_is_in_the_phase_that_began_last_and_between_its_values_and_the_next(schedule, batch):
    got = schedule.at(batch)
    index = max(i for i, start in enumerate(schedule.starts) if start <= batch)
    here = schedule.values[index]
    assert (got.name, got.samples, got.index) == (here.name, here.samples, index)
    following = schedule.values[min(index + 1, len(schedule.values) - 1)] if schedule.is_linear else here
    low, high = sorted((here.temperature, following.temperature))
    assert low - 1e-12 <= got.temperature <= high + 1e-12
    if batch == schedule.starts[index]:
        assert got == here


@given(shares=st.lists(st.floats(0.01, 10), min_size=1, max_size=6), total=st.integers(1, 500))
def test_shares_fill_the_run_in_order_within_half_a_batch(shares, total):
    phases = tuple(Phase(name=f"p{i}", share=share) for i, share in enumerate(shares))
    starts = phase_starts(phases, total)
    assert starts[0] == 0
    assert list(starts) == sorted(starts)
    for i, start in enumerate(starts):
        assert abs(start - total * sum(shares[:i]) / sum(shares)) <= 0.5 + 1e-9


@given(total=st.integers(1, 12), n=st.integers(1, 6))
def test_phases_that_are_given_no_batch_are_left_out(total, n):
    phases = [{"name": f"p{i}", "temperature": 0.1 * (i + 1)} for i in range(n)]
    schedule = schedule_of(build_config({"schedule": {"phases": phases}, "run": {"max_steps": total}}))
    assert list(schedule.starts) == sorted(set(schedule.starts))
    assert schedule.starts[0] == 0


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["schedule.phases=[{name: a}, {name: a}]"], "schedule.phases", ["share a name"]),
        (["schedule.phases=[{name: a, share: 1}, {name: b}]"], "schedule.phases", ["every phase has a share"]),
        (["schedule.phases=[{name: a, share: 0}]"], "schedule.phases", ["more than 0"]),
        (["schedule.phases=[{name: a, share: 1}, {name: b, until_step: 4}]"], "schedule.phases", ["until_step"]),
        (["schedule.phases=[{name: a}, {name: b, until_step: 4}, {name: c}]"], "schedule.phases", ["but the last"]),
        (
            ["schedule.phases=[{name: a, until_step: 9}, {name: b, until_step: 4}, {name: c}]"],
            "schedule.phases",
            ["must rise"],
        ),
        (
            ["schedule.phases=[{name: a, samples_per_prompt: 3}]"],
            "schedule.phases",
            ["a: samples_per_prompt = 3", "rl.batch_size_per_update = 64"],
        ),
        (["schedule.phases=[{name: a, temperature: 0}]"], "schedule.phases", ["entry 1, temperature"]),
        (["schedule.phases=[{name: a, top_k: 3}]"], "schedule.phases", ["entry 1, top_k: no such key"]),
        (["schedule.phases=[{name: a, lr: -1}]"], "schedule.phases", ["entry 1, lr"]),
        (["schedule.adaptive_samples=[1, 16]"], "schedule.adaptive_samples", [">= 2"]),
        (["schedule.adaptive_samples=true"], "schedule.adaptive_samples", ["[fewest, most]"]),
        (["schedule.adaptive_samples=[16, 32]"], "schedule.adaptive_samples", ["16 is more than", "8"]),
        (["schedule.adaptive_samples=[2, 4]"], "schedule.adaptive_samples", ["4 is less than", "8"]),
        (["schedule.rest_outside=[0.6, 0.5]"], "schedule.rest_outside", ["less than the second"]),
    ],
)
def test_what_a_schedule_may_not_say_names_the_key(overrides, key, words):
    """F05: values that would break the run hours later are refused at the start."""
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    assert caught.value.key == key
    for word in words:
        assert word in str(caught.value)
