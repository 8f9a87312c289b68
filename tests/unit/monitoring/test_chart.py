"""Charts draw what they are given: round ticks, gaps, escaped names, few points."""

import re
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tithe.monitoring._chart import Scale, Series, line_chart, nice_ticks, stacked_chart, thin
from tithe.monitoring._format import format_bytes, format_number


def parse(figure):
    return ET.fromstring(str(figure).replace("<!doctype html>", ""))


def by_class(figure, tag, name):
    return [element for element in parse(figure).iter(tag) if name in element.get("class", "").split()]


@settings(max_examples=200, deadline=None)
@given(st.floats(-1e9, 1e9), st.floats(0, 1e9), st.booleans())
def test_ticks_are_few_ascending_and_enclose_the_data(low, span, whole):
    high = low + span
    ticks = nice_ticks(low, high, whole=whole)
    slack = 1e-6 * max(1.0, abs(low), abs(high))
    assert 2 <= len(ticks) <= 8
    assert all(a < b for a, b in pairwise(ticks))
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack
    if whole:
        assert all(isinstance(tick, int) for tick in ticks)


def test_the_line_runs_from_the_first_to_the_last_value():
    figure = line_chart("Speed", [Series("s", [0, 10], [0.0, 100.0])], Scale("tok/s", from_zero=True))
    (path,) = by_class(figure, "path", "line")
    assert path.get("d") == "M46.0 180.0L468.0 10.0"
    labels = [text.text for text in by_class(figure, "text", "tick")]
    assert labels == ["0", "25", "50", "75", "100", "0", "2", "4", "6", "8", "10", "batch"]
    assert by_class(figure, "span", "unit")[0].text == "tok/s"


def test_a_missing_value_is_a_gap_and_not_a_zero():
    figure = line_chart("Loss", [Series("s", [1, 2, 3, 4], [1.0, None, 3.0, 2.0])], Scale())
    (path,) = by_class(figure, "path", "line")
    assert re.findall(r"[ML]", path.get("d")) == ["M", "M", "L"]


def test_one_value_alone_is_a_dot():
    figure = line_chart("Loss", [Series("s", [7], [0.5])], Scale())
    assert len(by_class(figure, "circle", "dot")) == 1
    figure = stacked_chart("Step time", [Series("a", [7], [2.0])], Scale("s"))
    assert len(by_class(figure, "polygon", "area")) == 1


@pytest.mark.parametrize("ys", [[], [None], [None, None]])
def test_nothing_recorded_is_said(ys):
    series = Series("s", list(range(len(ys))), ys)
    assert "Not recorded." in line_chart("KL", [series], Scale())
    assert "Not recorded." in stacked_chart("Time", [series], Scale())


def test_a_long_noisy_series_is_thinned_and_smoothed():
    xs = list(range(5000))
    series = thin(Series("s", xs, [float(x % 2) for x in xs], markers=False))
    assert len(series.xs) == 400
    assert series.xs[-1] == 4999
    assert all(0.3 < y < 0.7 for y in series.ys)
    figure = line_chart("Loss", [Series("s", xs, [float(x % 2) for x in xs])], Scale())
    assert len(by_class(figure, "path", "line")) == 2
    assert "Bold: mean of 41 batches." in figure
    assert len(by_class(figure, "rect", "hint")) <= 120


def test_layers_add_up_and_the_caption_tells_the_sum():
    layers = [Series("sampling", [1, 2], [2.0, 3.0]), Series("training", [1, 2], [1.0, None])]
    figure = stacked_chart("Step time", layers, Scale("s"))
    lower, upper = (polygon.get("points").split() for polygon in by_class(figure, "polygon", "area"))
    assert lower[:2] == list(reversed(upper[2:]))  # the second layer stands on the first
    assert by_class(figure, "span", "now")[0].text == "last 3"


def test_an_interval_is_drawn_as_a_band_or_as_whiskers():
    band = Series("s", [0, 1], [0.5, 0.6], [0.4, None], [0.6, None])
    assert len(by_class(line_chart("R", [band], Scale()), "polygon", "band")) == 1
    marked = Series("s", [0, 1], [0.5, 0.6], [0.4, 0.5], [0.6, 0.7], markers=True)
    assert len(by_class(line_chart("R", [marked], Scale(percent=True)), "line", "whisker")) == 2


def test_names_are_escaped_and_the_chart_is_told_in_words():
    name = '"><script>alert(1)</script>'
    figure = line_chart(name, [Series(name, [0, 1], [1.0, 2.0]), Series("b", [0, 1], [0.0, 1.0])], Scale(name))
    assert "<script" not in figure
    (svg,) = [element for element in parse(figure).iter("svg") if element.get("role") == "img"]
    assert svg.get("aria-label").startswith(f"{name} by batch: {name} ends at 2")


def test_numbers_read_well():
    assert [format_number(x) for x in (0.0, 999.6, 0.00049, -0.25, 1e8, 12345.6)] == [
        "0", "1,000", "4.9e-4", "-0.25", "1e8", "12,346"
    ]  # fmt: skip
    assert [format_bytes(x) for x in (0, 1023, 1024, 1024**2 - 1, 1024**4 * 5000)] == [
        "0 bytes", "1023 bytes", "1 KiB", "1,024 KiB", "5,000 TiB"
    ]  # fmt: skip
