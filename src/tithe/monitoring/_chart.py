"""Small SVG charts: lines with an optional interval band, and stacked areas. No script, no external file.

Colours come from the page's style sheet (classes ``s1`` to ``s6``), so a chart follows the light or dark scheme. Every
chart has a text alternative, and a column under the pointer tells its values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from markupsafe import Markup

from tithe.monitoring._format import format_number, format_percent

Value = float | None

_WIDTH, _HEIGHT = 480, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 30
_MAX_POINTS = 400  # more than a chart has pixels for
_MAX_HINTS = 120
_SMOOTH_FROM = 30


@dataclass(frozen=True)
class Series:
    """One line: `xs` ascending, `ys` with None where there is no value; `lo` and `hi` bound an interval. `neutral` is
    drawn in grey.

    >>> Series("sampled", [0.0, 10.0], [0.1, 0.8]).last
    0.8
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[Value]
    lo: Sequence[Value] = ()
    hi: Sequence[Value] = ()
    markers: bool = False
    neutral: bool = False

    @property
    def last(self) -> Value:
        """The last value there is."""
        return next((y for y in reversed(self.ys) if y is not None), None)

    @property
    def has_data(self) -> bool:
        """Whether there is any value to draw."""
        return self.last is not None


@dataclass(frozen=True)
class Scale:
    """How the vertical axis is made. `percent` shows fractions in percent over the whole range 0 to 1."""

    unit: str = ""
    from_zero: bool = False
    percent: bool = False
    whole: bool = False

    def plain(self, value: Value) -> str:
        """A value where the unit is said nearby."""
        return format_percent(value, 1) if self.percent else format_number(value)

    def label(self, value: Value) -> str:
        """A value with its unit."""
        return f"{self.plain(value)} {self.unit}".strip()


@dataclass(frozen=True)
class _Frame:
    """Maps data to the drawing."""

    x_ticks: list[float]
    y_ticks: list[float]
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    scale: Scale = field(default_factory=Scale)

    def x(self, value: float) -> float:
        low, high = self.x_range
        share = 0.5 if high == low else (value - low) / (high - low)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)


def nice_ticks(low: float, high: float, count: int = 4, *, whole: bool = False) -> list[float]:
    """About `count` round values (1, 2 or 5 times a power of ten apart) that enclose low to high.

    >>> nice_ticks(0.0, 0.93)
    [0.0, 0.25, 0.5, 0.75, 1.0]
    >>> nice_ticks(0, 7, whole=True)
    [0, 2, 4, 6, 8]
    """
    if high - low <= max(1e-300, 1e-9 * max(abs(low), abs(high))):  # flat: centre it, or stand on zero
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if abs(low) > 1e-300 else (0.0, 1.0)
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    if whole:
        step = max(1, math.ceil(step))
    first = math.floor(low / step + 1e-9)
    last = max(first + 1, math.ceil(high / step - 1e-9))
    return [i * step if whole else float(f"{i * step:.12g}") for i in range(first, last + 1)]


def line_chart(title: str, series: Sequence[Series], scale: Scale, *, note: str = "") -> Markup:
    """A figure with one line per series over batches. A single noisy series gets its moving mean drawn over it. Series
    without any value are left out; when none is left the figure says that nothing was recorded.
    """
    drawn = [thin(s) for s in series if s.has_data]
    if not drawn:
        return _empty_figure(title)
    frame = _frame(drawn, scale)
    noisy = not (scale.whole or drawn[0].markers) and len(drawn[0].xs) >= _SMOOTH_FROM
    smooth = noisy and len(drawn) == 1
    parts = [_axes(frame)]
    parts.extend(_band(frame, s, i) for i, s in enumerate(drawn, 1))
    for i, s in enumerate(drawn, 1):
        parts.append(_path(frame, s.xs, s.ys, f"line s{i}" + (" faint" if smooth else "")))
        if smooth:
            window = smoothing_window(len(s.xs))
            parts.append(_path(frame, s.xs, moving_mean(s.ys, window), f"line s{i}"))
            note = note or f"Bold: mean of {window} batches."
        if s.markers or sum(y is not None for y in s.ys) == 1:
            parts.append(_dots(frame, s, i))
    parts.append(_hints(frame, drawn))
    return _figure(title, scale, drawn, parts, note)


def stacked_chart(title: str, layers: Sequence[Series], scale: Scale, *, note: str = "") -> Markup:
    """A figure with the layers stacked from the bottom; all share the same xs, and a missing value counts as 0."""
    layers = [thin(s) for s in layers if s.has_data]
    if not layers:
        return _empty_figure(title)
    xs = layers[0].xs
    floors: list[list[float]] = [[0.0] * len(xs)]
    for layer in layers:
        floors.append([base + (y or 0.0) for base, y in zip(floors[-1], layer.ys, strict=True)])
    top = Series("total", xs, floors[-1])
    frame = _frame([top], Scale(scale.unit, from_zero=True))
    parts = [_axes(frame)]
    parts.extend(
        _area(frame, xs, below, above, f"area {_shade(layer, i)}")
        for i, (layer, (below, above)) in enumerate(zip(layers, pairwise(floors), strict=True), 1)
    )
    parts.append(_hints(frame, layers))
    return _figure(title, scale, layers, parts, note, total=top)


def thin(series: Series) -> Series:
    """At most 400 points, each the mean of its bucket (the bounds of an interval likewise)."""
    n = len(series.xs)
    if n <= _MAX_POINTS:
        return series
    edges = [round(i * n / _MAX_POINTS) for i in range(_MAX_POINTS + 1)]
    slices = [slice(a, b) for a, b in pairwise(edges)]

    def bucket(values: Sequence[Value]) -> list[Value]:
        return [_mean(values[s]) for s in slices] if values else []

    xs = [series.xs[s][-1] for s in slices]
    return Series(
        series.name, xs, bucket(series.ys), bucket(series.lo), bucket(series.hi), series.markers, series.neutral
    )


def smoothing_window(points: int) -> int:
    """An odd number of points, about a tenth of the chart.

    >>> smoothing_window(60), smoothing_window(400)
    (7, 41)
    """
    return max(5, points // 10) | 1


def moving_mean(values: Sequence[Value], window: int) -> list[Value]:
    """Centred mean over `window` points, over fewer at the ends; None stays None.

    >>> moving_mean([0.0, 3.0, None, 3.0], 3)
    [1.5, 1.5, None, 3.0]
    """
    half = window // 2
    return [None if value is None else _mean(values[max(0, i - half) : i + half + 1]) for i, value in enumerate(values)]


def _shade(series: Series, number: int) -> str:
    return "s6" if series.neutral else f"s{number}"


def _mean(values: Sequence[Value]) -> Value:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _frame(series: Sequence[Series], scale: Scale) -> _Frame:
    xs = [x for s in series for x in s.xs]
    ys = [y for s in series for values in (s.ys, s.lo, s.hi) for y in values if y is not None]
    low, high = min(ys), max(ys)
    if scale.percent:
        low, high = min(0.0, low), max(1.0, high)
    elif scale.from_zero:
        low, high = min(0.0, low), max(0.0, high)
    y_ticks = nice_ticks(low, high, whole=scale.whole)
    x_ticks = [t for t in nice_ticks(min(xs), max(xs), 6, whole=True) if min(xs) <= t <= max(xs)]
    return _Frame(x_ticks, y_ticks, (min(xs), max(xs)), (y_ticks[0], y_ticks[-1]), scale)


def _axes(frame: _Frame) -> Markup:
    parts: list[Markup] = []
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    for tick in frame.y_ticks:
        y = frame.y(tick)
        label = format_percent(tick) if frame.scale.percent else format_number(tick)
        kind = "base" if tick in (frame.y_ticks[0], 0) else "grid"
        parts.append(
            Markup('<line class="{}" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(kind, _LEFT, right, y, y)
        )
        parts.append(Markup('<text class="tick end" x="{}" y="{:.1f}">{}</text>').format(_LEFT - 7, y + 4, label))
    for tick in frame.x_ticks:
        x = frame.x(tick)
        parts.append(
            Markup('<line class="base" x1="{0:.1f}" x2="{0:.1f}" y1="{1}" y2="{2}"/>').format(x, bottom, bottom + 4)
        )
        parts.append(
            Markup('<text class="tick mid" x="{:.1f}" y="{}">{}</text>').format(x, bottom + 17, format_number(tick))
        )
    return Markup("").join(parts)


def _path(frame: _Frame, xs: Sequence[float], ys: Sequence[Value], css: str) -> Markup:
    steps: list[str] = []
    pen = "M"
    for x, y in zip(xs, ys, strict=True):
        if y is None:
            pen = "M"
            continue
        steps.append(f"{pen}{frame.x(x):.1f} {frame.y(y):.1f}")
        pen = "L"
    return Markup('<path class="{}" d="{}"/>').format(css, "".join(steps))


def _area(frame: _Frame, xs: Sequence[float], below: Sequence[float], above: Sequence[float], css: str) -> Markup:
    if len(xs) == 1:  # one batch has no width: draw it as a bar
        x = frame.x(xs[0])
        ring = [(x - 20, above[0]), (x + 20, above[0]), (x + 20, below[0]), (x - 20, below[0])]
    else:
        ring = [(frame.x(x), y) for x, y in zip(xs, above, strict=True)]
        ring += [(frame.x(x), y) for x, y in zip(reversed(xs), reversed(below), strict=True)]
    points = " ".join(f"{x:.1f},{frame.y(y):.1f}" for x, y in ring)
    return Markup('<polygon class="{}" points="{}"/>').format(css, points)


def _band(frame: _Frame, series: Series, number: int) -> Markup:
    bounds = [
        (x, low, high)
        for x, low, high in zip(series.xs, series.lo, series.hi, strict=False)
        if low is not None and high is not None
    ]
    if not bounds:
        return Markup("")
    if series.markers:
        bars = [
            Markup('<line class="whisker s{0}" x1="{1:.1f}" x2="{1:.1f}" y1="{2:.1f}" y2="{3:.1f}"/>').format(
                number, frame.x(x), frame.y(low), frame.y(high)
            )
            for x, low, high in bounds
        ]
        return Markup("").join(bars)
    xs = [x for x, _, _ in bounds]
    return _area(frame, xs, [low for _, low, _ in bounds], [high for _, _, high in bounds], f"band s{number}")


def _dots(frame: _Frame, series: Series, number: int) -> Markup:
    dots = [
        Markup('<circle class="dot s{}" cx="{:.1f}" cy="{:.1f}" r="3.5"/>').format(number, frame.x(x), frame.y(y))
        for x, y in zip(series.xs, series.ys, strict=True)
        if y is not None
    ]
    return Markup("").join(dots)


def _hints(frame: _Frame, series: Sequence[Series]) -> Markup:
    """Transparent columns whose titles tell the values under the pointer."""
    at: dict[float, list[str]] = {}
    for s in series:
        for x, y in zip(s.xs, s.ys, strict=True):
            if y is not None:
                name = f"{s.name}: " if len(series) > 1 else ""
                at.setdefault(x, []).append(name + frame.scale.label(y))
    stride = math.ceil(len(at) / _MAX_HINTS)
    xs = sorted(at)[::stride]
    half = (_WIDTH - _LEFT - _RIGHT) / max(1, len(xs)) / 2
    columns = [
        Markup('<rect class="hint" x="{:.1f}" y="{}" width="{:.1f}" height="{}"><title>{}</title></rect>').format(
            frame.x(x) - half,
            _TOP,
            2 * half,
            _HEIGHT - _TOP - _BOTTOM,
            "\n".join([f"batch {format_number(x)}", *at[x]]),
        )
        for x in xs
    ]
    return Markup("").join(columns)


def _figure(
    title: str,
    scale: Scale,
    series: Sequence[Series],
    parts: Sequence[Markup],
    note: str,
    *,
    total: Series | None = None,
) -> Markup:
    """Caption, legend for more than one series, drawing, note. `total` is given for stacked layers."""
    spoken = "; ".join(f"{s.name} ends at {scale.label(s.last)}" for s in series)
    shown = total or (series[0] if len(series) == 1 else None)
    return Markup(
        '<figure><figcaption><span class="name">{}{}</span><span class="now">{}</span></figcaption>{}'
        '<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}'
        '<text class="tick end" x="{}" y="{}">batch</text></svg>{}</figure>'
    ).format(
        title,
        Markup(' <span class="unit">{}</span>').format(scale.unit) if scale.unit else "",
        f"last {scale.plain(shown.last)}" if shown else "",
        _legend(series, scale, with_values=total is None) if len(series) > 1 else "",
        _WIDTH,
        _HEIGHT,
        f"{title} by batch: {spoken}.",
        Markup("").join(parts),
        _WIDTH - _RIGHT,
        _HEIGHT - 2,
        Markup('<p class="note">{}</p>').format(note) if note else "",
    )


def _legend(series: Sequence[Series], scale: Scale, *, with_values: bool) -> Markup:
    items = [
        Markup(
            '<li><svg class="key" viewBox="0 0 12 10" aria-hidden="true">'
            '<rect class="area {}" width="12" height="10" rx="2"/></svg>{}{}</li>'
        ).format(_shade(s, i), s.name, Markup(" <b>{}</b>").format(scale.plain(s.last)) if with_values else "")
        for i, s in enumerate(series, 1)
    ]
    return Markup('<ul class="legend">{}</ul>').format(Markup("").join(items))


def _empty_figure(title: str) -> Markup:
    return Markup(
        '<figure class="empty"><figcaption><span class="name">{}</span></figcaption><p>Not recorded.</p></figure>'
    ).format(title)
