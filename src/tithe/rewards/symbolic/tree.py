"""What the parser makes of an answer: expressions, and the forms that answers take round them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

MAX_BITS: Final = 20_000
"""Longest numerator or denominator that is computed exactly."""


@dataclass(frozen=True)
class Node:
    """An expression. `op` is one of num, sym, pi, e, i, inf, add, mul, div, pow, neg, pm, mp, or a function's name;
    `value` is the number of num and the name of sym.

    >>> Node("add", (Node("num", value=Fraction(1)), Node("sym", value="x"))).symbols()
    frozenset({'x'})
    """

    op: str
    args: tuple[Node, ...] = ()
    value: Fraction | str | None = None

    def symbols(self) -> frozenset[str]:
        """Names of the variables in it."""
        if self.op == "sym":
            return frozenset((str(self.value),))
        return frozenset().union(*(arg.symbols() for arg in self.args))

    def has(self, *ops: str) -> bool:
        """Whether one of these operations is in it."""
        return self.op in ops or any(arg.has(*ops) for arg in self.args)

    def size(self) -> int:
        """Number of nodes."""
        return 1 + sum(arg.size() for arg in self.args)


@dataclass(frozen=True)
class Expression:
    """One value and the unit written after it ("" when none is)."""

    node: Node
    unit: str = ""


@dataclass(frozen=True)
class Based:
    """Digits with a base: value and the digits as written."""

    value: int
    digits: str


@dataclass(frozen=True)
class Series:
    """A list. `bracket`: "" for a bare one, "(" or "[" for an ordered one, "{" for a set."""

    items: tuple[Value, ...]
    bracket: str = ""


@dataclass(frozen=True)
class Span:
    """An interval of real numbers. A pair in round brackets is an open interval or a point: `is_pair` says that it was
    written so."""

    low: Node
    high: Node
    low_closed: bool
    high_closed: bool
    is_pair: bool = False


@dataclass(frozen=True)
class Region:
    """A union of intervals and points; the variable it was told about, if any."""

    spans: tuple[Span, ...]
    variable: str = ""


@dataclass(frozen=True)
class Relation:
    """`sides[0] ops[0] sides[1] ops[1] …` with = < > <= >= !=."""

    sides: tuple[Node, ...]
    ops: tuple[str, ...]


@dataclass(frozen=True)
class Named:
    """`x = value`, `f(x) = value`."""

    name: str
    value: Value


@dataclass(frozen=True)
class Matrix:
    """Rows of equal length."""

    rows: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True)
class Words:
    """What is no formula that is read here; compared as a string."""

    text: str


class Unreadable(ValueError):
    """What is written is none of the forms that are read."""


Value = Expression | Based | Series | Span | Region | Relation | Named | Matrix | Words


def number(value: int | Fraction) -> Node:
    """A constant."""
    return Node("num", value=Fraction(value))


INFINITY: Final = Node("inf")
MINUS_INFINITY: Final = Node("neg", (INFINITY,))


def rational(node: Node) -> Fraction | None:
    """The exact value of an expression of rational numbers, powers and factorials; None when it is another kind, is
    undefined, or has more than `MAX_BITS` bits."""
    if node.op == "num":
        assert isinstance(node.value, Fraction)
        return node.value
    if node.op not in _EXACT:
        return None
    values = []
    for arg in node.args:
        value = rational(arg)
        if value is None:
            return None
        values.append(value)
    result = _EXACT[node.op](*values)
    return result if result is not None and _bits(result) <= MAX_BITS else None


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _sum(*values: Fraction) -> Fraction | None:
    return sum(values, Fraction(0)) if sum(map(_bits, values)) <= MAX_BITS else None


def _product(*values: Fraction) -> Fraction | None:
    if sum(map(_bits, values)) > 2 * MAX_BITS:
        return None
    result = Fraction(1)
    for value in values:
        result *= value
    return result


def _quotient(above: Fraction, below: Fraction) -> Fraction | None:
    return above / below if below else None


def _power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator != 1:
        return _root_power(base, exponent)
    n = exponent.numerator
    if base == 1:
        return base
    if (base == 0 and n <= 0) or abs(n) * _bits(base) > MAX_BITS:
        return None
    return base**n


def _root_power(base: Fraction, exponent: Fraction) -> Fraction | None:
    """A rational root of a positive rational; None when there is none."""
    if base <= 0 or exponent.denominator > 64:
        return Fraction(0) if base == 0 and exponent > 0 else None
    above, below = _root(base.numerator, exponent.denominator), _root(base.denominator, exponent.denominator)
    if above is None or below is None:
        return None
    return _power(Fraction(above, below), Fraction(exponent.numerator))


def _root(value: int, degree: int) -> int | None:
    """The whole root, by bisection."""
    low, high = 0, 1 << (value.bit_length() // degree + 1)
    while low < high:
        middle = (low + high + 1) // 2
        if middle**degree <= value:
            low = middle
        else:
            high = middle - 1
    return low if low**degree == value else None


def _absolute(value: Fraction) -> Fraction:
    return abs(value)


def _factorial(value: Fraction) -> Fraction | None:
    if value.denominator != 1 or not 0 <= value <= 2000:
        return None
    result = 1
    for factor in range(2, int(value) + 1):
        result *= factor
    return Fraction(result)


def _binomial(above: Fraction, below: Fraction) -> Fraction | None:
    if above.denominator != 1 or below.denominator != 1 or not 0 <= below <= above <= 2000:
        return None
    result = 1
    for k in range(int(min(below, above - below))):
        result = result * (int(above) - k) // (k + 1)
    return Fraction(result)


def _whole(function: Callable[..., int]) -> Callable[..., Fraction | None]:
    def of_fractions(*values: Fraction) -> Fraction | None:
        if any(value.denominator != 1 for value in values):
            return None
        return Fraction(function(*(int(value) for value in values)))

    return of_fractions


_EXACT: Final[dict[str, Callable[..., Fraction | None]]] = {
    "add": _sum,
    "mul": _product,
    "div": _quotient,
    "pow": _power,
    "neg": lambda value: -value,
    "factorial": _factorial,
    "binom": _binomial,
    "sqrt": lambda value: _root_power(value, Fraction(1, 2)),
    "abs": _absolute,
    "floor": lambda value: Fraction(value.numerator // value.denominator),
    "ceil": lambda value: Fraction(-(-value.numerator // value.denominator)),
    "gcd": _whole(math.gcd),
    "lcm": _whole(math.lcm),
    "max": lambda *values: max(values),
    "min": lambda *values: min(values),
}
