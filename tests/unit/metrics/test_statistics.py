"""Intervals, running statistics and rates against plain numpy."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tithe.metrics import RunningStats, WindowRate, bootstrap_ci

finite = st.floats(-1e6, 1e6)


def test_interval_matches_the_normal_approximation_for_many_questions():
    values = (np.random.default_rng(0).random(400) < 0.3).astype(float)
    interval = bootstrap_ci(values, seed=1)
    half = 1.96 * values.std() / math.sqrt(400)
    assert interval.mean == values.mean()
    assert interval.lo == pytest.approx(values.mean() - half, abs=0.006)
    assert interval.hi == pytest.approx(values.mean() + half, abs=0.006)


def test_questions_are_resampled_and_samples_are_not():
    questions = [[1.0] * 50] * 5 + [[0.0] * 50] * 5
    by_question = bootstrap_ci(questions, seed=0)
    by_sample = bootstrap_ci([v for q in questions for v in q], seed=0)
    assert by_question == bootstrap_ci([1.0] * 5 + [0.0] * 5, seed=0)
    assert by_question.hi - by_question.lo > 5 * (by_sample.hi - by_sample.lo)


def test_every_question_weighs_the_same_whatever_its_samples():
    assert bootstrap_ci([[1.0], [0.0] * 99], seed=0).mean == 0.5


def test_the_seed_decides_and_the_level_widens():
    values = list(np.random.default_rng(3).random(40))
    assert bootstrap_ci(values, seed=5) == bootstrap_ci(values, seed=5)
    narrow, wide = bootstrap_ci(values, seed=5, level=0.5), bootstrap_ci(values, seed=5, level=0.99)
    assert wide.lo < narrow.lo < narrow.hi < wide.hi


def test_chunks_give_what_one_piece_gives(monkeypatch):
    values = list(np.random.default_rng(3).random(30))
    whole = bootstrap_ci(values, seed=5)
    monkeypatch.setattr("tithe.metrics.intervals._CHUNK_VALUES", 100)
    chunked = bootstrap_ci(values, seed=5)
    assert chunked == whole


def test_one_question_has_no_spread():
    interval = bootstrap_ci([0.25], seed=0)
    assert (interval.mean, interval.lo, interval.hi) == (0.25, 0.25, 0.25)


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ([], {}, "no question"),
        ([[1.0], []], {}, "question 1 has no samples"),
        ([0.0, math.nan], {}, "question 1"),
        ([1.0], {"n": 0}, "n must"),
        ([1.0], {"level": 1.0}, "level"),
    ],
)
def test_bad_input_is_named(values, options, message):
    with pytest.raises(ValueError, match=message):
        bootstrap_ci(values, seed=0, **options)


@settings(max_examples=60, deadline=None)
@given(st.lists(finite, max_size=30), st.lists(finite, max_size=30))
def test_running_stats_equal_numpy_also_after_a_merge(left, right):
    stats = RunningStats(left)
    stats.merge(RunningStats(right))
    both = left + right
    assert stats.count == len(both)
    if both:
        assert stats.mean == pytest.approx(np.mean(both), abs=1e-6)
        assert (stats.minimum, stats.maximum) == (min(both), max(both))
    if len(both) > 1:
        assert stats.std == pytest.approx(np.std(both, ddof=1), rel=1e-6, abs=1e-4)


def test_running_stats_count_what_is_not_finite():
    stats = RunningStats([1.0, math.nan, math.inf, 3.0])
    assert (stats.mean, stats.count, stats.non_finite) == (2.0, 2, 2)


def test_window_rate_forgets_what_is_older_than_the_window():
    now_s = [0.0]
    rate = WindowRate(10.0, clock=lambda: now_s[0])
    assert rate.rate_per_s() == 0.0
    for second in range(1, 6):
        now_s[0] = float(second)
        rate.add(100)
    assert rate.rate_per_s() == 100.0
    now_s[0] = 12.0
    assert rate.rate_per_s() == 40.0  # seconds 2 to 5 remain
    now_s[0] = 60.0
    assert rate.rate_per_s() == 0.0
    assert rate.total == 500
    with pytest.raises(ValueError, match="window_s"):
        WindowRate(0.0)
