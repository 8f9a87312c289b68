"""Which settings are compared, and which is named the best."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tithe.errors import UserError
from tithe.simulator import Fixed, LogNormal, Workload, parse_axis, run_sweep, throughput
from tithe.simulator.answer import synchronous
from tithe.simulator.sweep import CLOSE, settings_of
from unit.simulator.scenes import RICH, TWO_LANES, bounds, check, scene

WORK = Workload(prompt_tokens=Fixed(10), new_tokens=LogNormal(20, 0.8), reward_s=Fixed(0.3))


LINEAR = replace(RICH, tick_fixed_s=0.0)  # more sequences in a tick make none of them cheaper


def start(**more):
    return scene(bounds(1, batch=8, group=4), LINEAR, WORK, **{"steps": 20, **more})


def test_only_legal_combinations_are_simulated_and_the_others_counted():
    legal, skipped = settings_of(start(), {"lag": ["0", "1", "3"], "sync_every": ["1", "2", "3"]})
    found = [(one.bounds.max_lag, one.bounds.max_age, one.bounds.sync_every) for one in legal]
    assert found == [(0, 0, 1), (1, 1, 1), (3, 3, 1), (3, 3, 2), (3, 3, 3)]
    assert skipped == 4


def test_the_buffer_grows_with_the_lag_unless_it_was_tighter():
    usual, tight = start(buffer=16), start(buffer=12)
    assert settings_of(usual, {"lag": ["3"]})[0][0].buffer >= 4 * 8
    assert settings_of(tight, {"lag": ["3"]})[0][0].buffer == 12


def test_a_split_makes_lanes():
    legal, _ = settings_of(start(), {"split": ["3:1", "2:2"], "in_flight": ["16"]})
    assert [(o.layout.rollout_copies, o.layout.train_copies) for o in legal] == [(3, 1), (2, 2)]
    assert {one.max_running for one in legal} == {16}


def test_the_best_is_the_freshest_of_the_fastest():
    sweep = run_sweep(start(steps=60), {"lag": ["0", "1", "2", "4", "8", "16"]})
    for outcome in sweep.outcomes:
        check(outcome)
    most = max(throughput(outcome) for outcome in sweep.outcomes)
    fast = [o for o in sweep.outcomes if throughput(o) >= (1 - CLOSE) * most]
    assert sweep.best in fast
    assert sweep.best.scenario.bounds.max_age == min(o.scenario.bounds.max_age for o in fast)
    assert 0 < sweep.best.scenario.bounds.max_age < 16, "no overlap is slow, and too much brings nothing"


def test_copies_are_paid_for():
    """Two idle copies are no better than one: throughput is per copy."""
    sweep = run_sweep(start(), {"split": ["1:1", "6:6"]})
    assert sweep.best.scenario.layout == TWO_LANES


def test_the_synchronous_twin_has_every_bound_at_zero():
    twin = synchronous(start(on_publish="keep"))
    assert (twin.bounds.max_lag, twin.bounds.max_age, twin.bounds.sync_every, twin.on_publish) == (0, 0, 1, "finish")
    assert twin.mode == "sync"


@pytest.mark.parametrize(
    "text", ["", "lag", "lag=", "lag=x", "lag=-1", "gpus=1", "split=4", "split=0:1", "split=1:2:3"]
)
def test_what_is_no_axis_is_refused(text):
    with pytest.raises(UserError, match="--sweep"):
        parse_axis(text)


def test_too_many_or_no_settings_are_refused():
    with pytest.raises(UserError, match="at most 200"):
        settings_of(start(), {"lag": [str(i) for i in range(300)]})
    with pytest.raises(UserError, match="no legal setting"):
        settings_of(start(), {"lag": ["0"], "sync_every": ["2"]})
