"""The page of `benchmarks.learning`: two charts in SVG, nothing loaded from anywhere."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 760, 380, 46, 34, 12
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e")
SMOOTH = 4
"""Batches of a moving mean."""


@dataclass(frozen=True)
class Curve:
    """Mean rewards by batch, one list a seed."""

    name: str
    seeds: list[list[float]]


def smoothed(values: Sequence[float]) -> list[float]:
    """A moving mean over the last few batches.

    >>> smoothed([1.0, 3.0])
    [1.0, 2.0]
    """
    windows = [values[max(0, i - SMOOTH + 1) : i + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def page(title: str, algorithms: Sequence[Curve], lags: Sequence[Curve]) -> str:
    """HTML: the algorithms beside each other, the lags beside each other; a band spans the seeds."""
    charts = [("Algorithms, synchronous", algorithms), ("GRPO by lag, without and with correction", lags)]
    body = "".join(f"<h2>{name}</h2>{chart(curves)}" for name, curves in charts if curves)
    style = "body{font:15px system-ui;margin:2em;max-width:60em}svg{max-width:100%}text{font:12px system-ui}"
    head = f"<meta charset=utf-8><title>Learning: {html.escape(title)}</title><style>{style}</style>"
    note = f"Mean reward of each batch, moving mean over {SMOOTH}; bands span the seeds."
    top = f"<h1>Learning: {html.escape(title)}</h1><p>{note}</p>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{top}{body}</body></html>\n"


def chart(curves: Sequence[Curve]) -> str:
    """One SVG."""
    seeds = [[smoothed(seed) for seed in curve.seeds] for curve in curves]
    values = [value for own in seeds for seed in own for value in seed]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    length = max(len(seed) for own in seeds for seed in own)

    def place(i: int, value: float) -> str:
        x = LEFT + (WIDTH - LEFT - 8) * i / max(1, length - 1)
        y = TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value - low) / span)
        return f"{x:.1f},{y:.1f}"

    parts = [_axes(low, high, length)]
    for curve, own, colour in zip(curves, seeds, _colours(len(curves)), strict=True):
        columns = list(zip(*own, strict=True))
        band = [place(i, max(c)) for i, c in enumerate(columns)] + [
            place(i, min(c)) for i, c in reversed(list(enumerate(columns)))
        ]
        line = [place(i, sum(c) / len(c)) for i, c in enumerate(columns)]
        parts.append(f'<polygon points="{" ".join(band)}" fill="{colour}" opacity=".15"/>')
        parts.append(
            f'<polyline points="{" ".join(line)}" fill="none" stroke="{colour}" stroke-width="2">'
            f"<title>{html.escape(curve.name)}</title></polyline>"
        )
    legend = "".join(
        f'<span style="margin-right:1.2em"><b style="color:{colour}">&#9644;</b> {html.escape(curve.name)}</span>'
        for curve, colour in zip(curves, _colours(len(curves)), strict=True)
    )
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg><p>{legend}</p>'


def _colours(n: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(n)]


def _axes(low: float, high: float, length: int) -> str:
    parts = []
    for step in range(5):
        value = low + (high - low) * step / 4
        y = TOP + (HEIGHT - TOP - BOTTOM) * (1 - step / 4)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.2f}</text>')
    parts.append(f'<text x="{WIDTH}" y="{HEIGHT - 8}" text-anchor="end">batch {length}</text>')
    return "".join(parts)
