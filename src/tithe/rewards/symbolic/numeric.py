"""The numeric grader: evaluates two expressions at points and tells whether they agree there.

Constants are computed to 40 and again to 110 digits: equal when they agree to 85 digits, unequal when their difference
stays as the precision rises (to 200 digits, if need be), undecided otherwise. There is no absolute tolerance, so 2**-80
and 2**-81 differ. Variables are replaced by fixed points of both signs; at least three must be defined, and where both
sides are real at three points only those count. A difference at one point is a proof (up to the arithmetic); agreement
at all of them is none, but each point has 25 digits in which to differ, and the first two 85.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final

from tithe.rewards.symbolic.tree import Node, rational

LOW_DIGITS: Final = 40
HIGH_DIGITS: Final = 110
N_POINTS: Final = 8
FAR_POINTS: Final = 4
_SHARP_POINTS: Final = 2
_EXTRA_DIGITS: Final = 200
_MAX_EXPONENT: Final = 10_000_000
_BROKEN: Final = ("max", "min", "floor", "ceil", "abs")
"""Functions that may be one formula near 0 and another far away: `max(x, -1000)` is x at all near points."""


class Undefined(ArithmeticError):
    """There is no value here, or none that can be computed in bounded time."""


def approximate(node: Node) -> Fraction | None:
    """A real constant to about 35 digits, so that equal constants in different notation give the same value; None when
    it is none."""
    exact = rational(node)
    if exact is not None:
        return exact
    if node.symbols():
        return None
    context = _context(LOW_DIGITS)
    try:
        value = _evaluate(node, {}, context)
    except (ArithmeticError, ValueError, TypeError):
        return None
    if abs(context.im(value)) > context.mpf(10) ** -30 * abs(value) or not context.isfinite(value):
        return None
    rounded = context.nstr(context.re(value), 30)
    return Fraction(rounded)


def same_value(one: Node, other: Node) -> bool | None:
    """Whether two expressions have the same values; None when too few points are defined."""
    if one == other:
        return True
    exact = rational(one), rational(other)
    if exact[0] is not None and exact[1] is not None:
        return exact[0] == exact[1]
    names = sorted(one.symbols() | other.symbols())
    if not names:
        return _same_constant(one, other)
    n_points = N_POINTS + (FAR_POINTS if one.has(*_BROKEN) or other.has(*_BROKEN) else 0)
    found = (_compare(one, other, _point(names, k), is_sharp=k < _SHARP_POINTS) for k in range(n_points))
    pairs = [pair for pair in found if pair is not None]
    real = [pair for pair in pairs if pair[1]]
    used = real if len(real) >= 3 and not (one.has("i") or other.has("i")) else pairs
    if len(used) < 3:
        return None
    verdicts = [same for same, _ in used]
    if False in verdicts:
        return False
    return None if None in verdicts else True


def is_defined(node: Node) -> bool:
    """Whether an expression has a value that can be computed, at three points at least where it has variables."""
    names = sorted(node.symbols())
    points = [_point(names, k) for k in range(N_POINTS)] if names else [{}]
    values = [_values(node, node, point) for point in points]
    return len(values) - values.count(None) >= min(3, len(points))


def proportional(one: Node, other: Node, *, positive: bool = False) -> bool | None:
    """Whether one expression is a constant multiple (not 0; above 0 where `positive`) of another: the same equation."""
    names = sorted(one.symbols() | other.symbols())
    if not names or one.symbols() != other.symbols():
        return False
    factor: Any = None
    for k in range(N_POINTS):
        point = _point(names, k)
        if (values := _values(one, other, point)) is None or not values[0] or not values[1]:
            continue
        found = values[0] / values[1]
        context = _context(LOW_DIGITS)
        if abs(context.im(found)) > abs(found) * context.mpf(10) ** -20:
            continue
        if positive and context.re(found) < 0:
            return False
        factor = context.re(found)
        break
    if factor is None:
        return None
    agreed = 0
    for k in range(N_POINTS):
        values = _values(one, other, _point(names, k))
        if values is None:
            continue
        context = _context(LOW_DIGITS)
        left, right = values[0], values[1] * factor
        if abs(left - right) > max(abs(left), abs(right)) * context.mpf(10) ** -25:
            return False
        agreed += 1
    return True if agreed >= 3 else None


def _same_constant(one: Node, other: Node) -> bool | None:
    verdicts = _compare(one, other, {}, is_sharp=True)
    return None if verdicts is None else verdicts[0]


def _values(one: Node, other: Node, point: Mapping[str, Fraction], digits: int = LOW_DIGITS) -> tuple[Any, Any] | None:
    context = _context(digits)
    try:
        left, right = _evaluate(one, point, context), _evaluate(other, point, context)
    except (ArithmeticError, ValueError, TypeError):
        return None
    return (left, right) if context.isfinite(left) and context.isfinite(right) else None


def _compare(
    one: Node, other: Node, point: Mapping[str, Fraction], *, is_sharp: bool
) -> tuple[bool | None, bool] | None:
    """Whether they agree at a point (None: cannot be told), and whether both are real there; None when undefined. At a
    sharp point, agreement to the lower precision is confirmed at the higher one."""
    values = _values(one, other, point)
    if values is None:
        return None
    low, high = _context(LOW_DIGITS), _context(HIGH_DIGITS)
    left, right = values
    scale = max(abs(left), abs(right))
    is_real = all(abs(low.im(value)) <= scale * low.mpf(10) ** -30 for value in values)
    gap = abs(left - right)
    if not is_sharp and gap <= scale * low.mpf(10) ** -25 and scale > low.mpf(10) ** -10:
        return True, is_real
    if gap > scale * low.mpf(10) ** -12 and scale > low.mpf(10) ** -20:
        return False, is_real
    values = _values(one, other, point, HIGH_DIGITS)
    if values is None:
        return None
    left, right = values
    sharper, sharper_gap = max(abs(left), abs(right)), abs(left - right)
    if sharper < high.mpf(10) ** -(HIGH_DIGITS - 20) and not _is_steady(scale, sharper, high):
        return True, is_real  # both are 0 up to the rounding of larger terms
    if sharper_gap <= sharper * high.mpf(10) ** -(HIGH_DIGITS - 25):
        return True, is_real
    if _is_steady(gap, sharper_gap, high):
        return False, is_real
    values = _values(one, other, point, _EXTRA_DIGITS)
    extra = _context(_EXTRA_DIGITS)
    is_proved = values is not None and _is_steady(sharper_gap, abs(values[0] - values[1]), extra)
    return (False if is_proved else None), is_real


def _is_steady(before: Any, after: Any, context: Any) -> bool:
    """Whether a magnitude stays when the precision rises: then it is no rounding error."""
    before = context.mpf(before)
    return after > 0 and abs(before - after) <= after * context.mpf(10) ** -3


@lru_cache(maxsize=4)
def _context(digits: int) -> Any:
    from mpmath.ctx_mp import MPContext  # noqa: PLC0415  an optional package

    context = MPContext()
    context.dps = digits
    return context


@lru_cache(maxsize=512)
def _coordinate(name_at: int, k: int) -> Fraction:
    """Between 0.3 and 2.8 in size; the first four points are positive, the others of mixed signs. Far points are the
    last of these, times a thousand or ten million."""
    if k >= N_POINTS:
        return _coordinate(name_at, k - FAR_POINTS) * (1000 if k % 2 else 10_000_000)
    step = Fraction((name_at + 1) * (k + 1) * 610, 987) + Fraction(k * 377 + name_at * 233, 1597)
    size = Fraction(3, 10) + (step - step.numerator // step.denominator) * Fraction(5, 2)
    is_negative = k == 7 or (k >= 4 and (name_at + k) % 2 == 0)
    return -size if is_negative else size


def _point(names: list[str], k: int) -> dict[str, Fraction]:
    return {name: _coordinate(at, k) if name != r"\log" else abs(_coordinate(at, k)) for at, name in enumerate(names)}


def _evaluate(node: Node, point: Mapping[str, Fraction], context: Any) -> Any:
    if node.op == "num":
        assert isinstance(node.value, Fraction)
        return context.mpf(node.value.numerator) / node.value.denominator
    if node.op == "sym":
        value = point[str(node.value)]
        return context.mpf(value.numerator) / value.denominator
    if node.op in ("pi", "e", "i"):
        return {"pi": +context.pi, "e": +context.e, "i": context.j}[node.op]
    function = _FUNCTIONS.get(node.op)
    if function is None:
        raise Undefined(node.op)
    return function(context, *(_evaluate(arg, point, context) for arg in node.args))


def _sum(context: Any, *values: Any) -> Any:
    del context
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def _product(context: Any, one: Any, other: Any) -> Any:
    del context
    return one * other


def _quotient(context: Any, one: Any, other: Any) -> Any:
    del context
    if other == 0:
        raise Undefined("division by zero")
    return one / other


def _power(context: Any, base: Any, exponent: Any) -> Any:
    if base == 0:
        if context.re(exponent) > 0:
            return context.mpf(0)
        raise Undefined("0 to a power that is not positive")
    size = abs(context.ln(abs(base))) * abs(exponent) if abs(exponent) <= _MAX_EXPONENT else None
    if size is None or size > _MAX_EXPONENT:
        raise Undefined("too large")
    if context.im(exponent) == 0 and context.isint(context.re(exponent)):
        return base ** int(context.re(exponent))
    return context.power(base, exponent)


def _logarithm(context: Any, value: Any) -> Any:
    if value == 0:
        raise Undefined("logarithm of 0")
    return context.ln(value)


def _bounded(name: str, largest: int) -> Callable[..., Any]:
    def apply(context: Any, *values: Any) -> Any:
        if any(abs(value) > largest for value in values):
            raise Undefined("too large")
        return getattr(context, name)(*values)

    return apply


def _real(function: Callable[..., Any]) -> Callable[..., Any]:
    def apply(context: Any, *values: Any) -> Any:
        if any(context.im(value) != 0 for value in values):
            raise Undefined("not real")
        return function(context, *(context.re(value) for value in values))

    return apply


def _whole_part(context: Any, value: Any) -> Any:
    nearest = context.nint(value)
    if abs(value - nearest) < context.mpf(10) ** -(context.dps // 2):
        return nearest  # rounding must not decide
    return context.floor(value)


def _root(context: Any, value: Any, degree: Any) -> Any:
    if degree == 0:
        raise Undefined("a root of degree 0")
    is_odd = context.im(degree) == 0 and context.isint(degree) and int(context.re(degree)) % 2 == 1
    if is_odd and context.im(value) == 0 and context.re(value) < 0:
        return -_power(context, -value, 1 / degree)
    return _power(context, value, 1 / degree)


_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "add": _sum,
    "mul": _product,
    "div": _quotient,
    "pow": _power,
    "neg": lambda _, value: -value,
    "sqrt": lambda context, value: context.sqrt(value),
    "root": _root,
    "ln": _logarithm,
    "exp": _bounded("exp", _MAX_EXPONENT),
    "abs": lambda _, value: abs(value),
    "factorial": _bounded("factorial", 1_000_000),
    "binom": _bounded("binomial", 1_000_000),
    "floor": _real(_whole_part),
    "ceil": _real(lambda context, value: -_whole_part(context, -value)),
    "max": _real(lambda _, *values: max(values)),
    "min": _real(lambda _, *values: min(values)),
    "arcsin": lambda context, value: context.asin(value),
    "arccos": lambda context, value: context.acos(value),
    "arctan": lambda context, value: context.atan(value),
    **{name: _bounded(name, 1_000_000_000_000) for name in ("sin", "cos", "tan", "cot", "sec", "csc")},
    **{name: _bounded(name, _MAX_EXPONENT) for name in ("sinh", "cosh", "tanh")},
}
