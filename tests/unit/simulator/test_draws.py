"""Distributions and histograms."""

from __future__ import annotations

import math

import pytest

from tithe.errors import UserError
from tithe.simulator import (
    Clipped,
    Empirical,
    Exponential,
    Fixed,
    LogNormal,
    Uniform,
    histogram,
    parse_distribution,
    total_variation,
)
from tithe.simulator.draws import percentile, uniform


@pytest.mark.parametrize(
    "distribution",
    [Fixed(3.0), Uniform(1.0, 5.0), Exponential(2.0), LogNormal(4.0, 0.9), Empirical.of([5.0, 1.0, 3.0])],
    ids=lambda d: type(d).__name__,
)
def test_draws_have_the_mean_that_is_said_and_quantiles_ascend(distribution):
    drawn = [distribution.quantile(uniform(1, "x", i)) for i in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(distribution.mean, rel=0.03)
    quantiles = [distribution.quantile(i / 100) for i in range(1, 100)]
    assert quantiles == sorted(quantiles)


def test_a_long_tail_has_the_spread_of_its_sigma():
    logs = sorted(math.log(LogNormal(1.0, 0.7).quantile(uniform(0, "tail", i))) for i in range(20_000))
    assert (logs[16_827] - logs[3_173]) / 2 == pytest.approx(0.7, rel=0.03)  # one sigma to each side


def test_a_cut_is_counted_in_the_mean():
    assert Clipped(Uniform(0.0, 2.0), 1.0).mean == pytest.approx(0.75, abs=1e-3)


def test_addresses_draw_independently():
    assert len({uniform(seed, what, i) for seed in (0, 1) for what in ("a", "b") for i in range(50)}) == 200


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("2", Fixed(2.0)),
        ("exp:0.5", Exponential(0.5)),
        ("lognormal:2,1", LogNormal(2.0, 1.0)),
        ("uniform:1,3", Uniform(1.0, 3.0)),
    ],
)
def test_a_distribution_is_read_from_text(text, made):
    assert parse_distribution(text, "--reward-s") == made


@pytest.mark.parametrize("text", ["", "fast", "exp:", "exp:-1", "lognormal:1", "uniform:3,1", "2,3", "nan", "exp:1,2"])
def test_what_is_no_distribution_is_refused_by_its_option(text):
    with pytest.raises(UserError, match=r"--reward-s = .*lognormal:MEAN,SIGMA"):
        parse_distribution(text, "--reward-s")


def test_histograms_and_their_distance():
    a = histogram([0, 0, 1, 2])
    assert a == {0: 0.5, 1: 0.25, 2: 0.25}
    assert total_variation(a, a) == 0
    assert total_variation(a, {3: 1.0}) == 1
    assert total_variation(a, {0: 1.0}) == 0.5


def test_percentiles():
    assert [percentile([4.0, 1.0, 3.0, 2.0], share) for share in (0.0, 0.5, 0.9)] == [1.0, 3.0, 4.0]
