"""Sets of real numbers as unions of intervals with constant ends, in ascending order and without overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

from tithe.rewards.symbolic.numeric import approximate
from tithe.rewards.symbolic.tree import INFINITY, MINUS_INFINITY, Node, Region, Relation, Span, Unreadable

REALS: Final = (Span(MINUS_INFINITY, INFINITY, False, False),)


@dataclass(frozen=True, order=True)
class _End:
    """A place on the line: `side` is -1 just below the value, 0 at it, 1 just above."""

    value: Fraction | float
    side: int


def between(relation: Relation) -> Region | None:
    """`x > 2`, `1 < x <= 3`, `x != 2` as a region of x; None for relations of another form."""
    sides, ops = relation.sides, relation.ops
    named = [at for at, side in enumerate(sides) if side.op == "sym"]
    if len(named) != 1 or any(side.symbols() for at, side in enumerate(sides) if at != named[0]) or len(sides) > 3:
        return None
    at = named[0]
    variable = str(sides[at].value)
    spans: tuple[Span, ...] = REALS
    for position, op in enumerate(ops):
        if position not in (at - 1, at) or op == "=":
            return None
        bound = sides[position + 1] if position == at else sides[position]
        if op == "!=":
            spans = without(spans, (bound,))
            continue
        upper = (op in ("<", "<=")) == (position == at)
        closed = op in ("<=", ">=")
        half = Span(MINUS_INFINITY, bound, False, closed) if upper else Span(bound, INFINITY, closed, False)
        met = intersection([Region(spans), Region((half,))])
        spans = met
    return Region(spans, variable)


def ordered(spans: Sequence[Span]) -> tuple[Span, ...] | None:
    """Spans in ascending order, touching ones joined; None when an end is no real constant or the ends are reversed."""
    placed = []
    for span in spans:
        low, high = _place(span.low), _place(span.high)
        if low is None or high is None or low > high or (low == high and not (span.low_closed and span.high_closed)):
            return None
        placed.append((_End(low, 0 if span.low_closed else 1), _End(high, 0 if span.high_closed else -1), span))
    placed.sort(key=lambda item: item[:2])
    joined: list[tuple[_End, _End, Span]] = []
    for low, high, span in placed:
        if joined and _touch(joined[-1][1], low):
            before_low, before_high, before = joined[-1]
            if high > before_high:
                joined[-1] = (before_low, high, replace(before, high=span.high, high_closed=span.high_closed))
        else:
            joined.append((low, high, span))
    return tuple(replace(span, is_pair=False) for _, _, span in joined)


def union(regions: Sequence[Region]) -> tuple[Span, ...]:
    """All points of any region."""
    return _known(ordered([span for region in regions for span in region.spans]))


def complement(spans: Sequence[Span]) -> tuple[Span, ...]:
    """All real numbers outside."""
    rest, low, low_closed = [], MINUS_INFINITY, False
    for span in _known(ordered(spans)):
        gap = Span(low, span.low, low_closed, not span.low_closed)
        if _is_proper(gap):
            rest.append(gap)
        low, low_closed = span.high, not span.high_closed
    last = Span(low, INFINITY, low_closed, False)
    return tuple([*rest, last] if _is_proper(last) else rest)


def intersection(regions: Sequence[Region]) -> tuple[Span, ...]:
    """Points of every region."""
    outside = [Region(complement(region.spans)) for region in regions]
    return complement(union(outside))


def without(spans: Sequence[Span], points: Sequence[Node]) -> tuple[Span, ...]:
    """All but some points."""
    cut = [Region(complement((Span(point, point, True, True),))) for point in points]
    return intersection([Region(tuple(spans)), *cut])


def _known(spans: tuple[Span, ...] | None) -> tuple[Span, ...]:
    if spans is None:
        raise Unreadable("an interval with ends that are no real numbers in order")
    return spans


def _is_proper(span: Span) -> bool:
    low, high = _place(span.low), _place(span.high)
    if low is None or high is None:
        return False
    if low in (float("-inf"), float("inf")) and low == high:
        return False
    return low < high or (low == high and span.low_closed and span.high_closed)


def _touch(high: _End, low: _End) -> bool:
    """Whether nothing lies between an end and the next beginning."""
    if high.value != low.value:
        return high.value > low.value
    return low.side - high.side < 2


def _place(node: Node) -> Fraction | float | None:
    if node == INFINITY:
        return float("inf")
    if node == MINUS_INFINITY:
        return float("-inf")
    return approximate(node)
