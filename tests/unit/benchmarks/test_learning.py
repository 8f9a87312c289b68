"""The learning benchmark's parts that need no training."""

from __future__ import annotations

import re

import pytest

from benchmarks.learning import CORRECTIONS, LAGS, Outcome, lag_changes, summary
from benchmarks.learning_plot import Curve, chart, page, smoothed
from tithe.config import load_config


@pytest.mark.parametrize("lag", LAGS)
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_an_asynchronous_run_publishes_as_seldom_as_its_lag_allows(lag: int, correction: str) -> None:
    rl = load_config(None, [*lag_changes(lag, correction), "rl.batch_size_per_update=32"]).rl
    assert (rl.max_policy_update_lag, rl.max_sample_age, rl.correction) == (lag, lag, correction)
    assert rl.sync_every == max(1, lag)


def test_a_summary_spans_the_seeds() -> None:
    outcomes = [Outcome(0.5, 0.8, [0.5, 0.8], 64), Outcome(0.6, 1.0, [0.6, 1.0], 64)]
    assert summary(outcomes) == pytest.approx(
        {"start": 0.55, "end": 0.9, "end_min": 0.8, "end_max": 1.0, "samples": 64}
    )


def test_curves_lie_inside_their_chart_and_bands_span_the_seeds() -> None:
    curves = [Curve("a <b>", [[0.0, 0.5, 1.0], [0.2, 0.7, 1.0]]), Curve("c", [[0.1] * 3])]
    svg = chart(curves)
    assert svg.count("<polyline") == svg.count("<polygon") == 2
    places = [
        tuple(map(float, pair.split(","))) for text in re.findall(r'points="([^"]+)"', svg) for pair in text.split()
    ]
    assert all(0 <= x <= 760 and 0 <= y <= 380 for x, y in places)
    assert "a &lt;b&gt;" in svg
    whole = page("tiny", curves, [])
    assert whole.count("<svg") == 1
    assert "http" not in whole, "nothing is loaded from anywhere"


def test_a_moving_mean_starts_with_what_there_is() -> None:
    assert smoothed([4.0, 0.0, 2.0, 2.0, 2.0]) == [4.0, 2.0, 2.0, 2.0, 1.5]
