"""The symbolic grader: builds sympy expressions by its constructors (never from text) and asks whether their difference
is zero.

True is a proof of equality, False one of inequality (the difference is a number other than 0, or a polynomial that does
not vanish); None is neither. Everything that could grow without bound is bounded before sympy sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final

from tithe.errors import FailureCause, boundary
from tithe.rewards.symbolic.tree import Node

_MAX_NODES: Final = 120
_MAX_EXPANDED_EXPONENT: Final = 24
_MAX_NUMBER_BITS: Final = 4000


class Unsuitable(ValueError):
    """An expression that this grader leaves to the other one."""


def same_by_algebra(one: Node, other: Node) -> bool | None:
    """Whether two expressions are the same; see the module."""
    if one.size() + other.size() > _MAX_NODES:
        return None
    with boundary(FailureCause.REWARD):  # sympy raises many kinds of exceptions for expressions it cannot treat
        above_one, below_one = _fraction(one)
        above_other, below_other = _fraction(other)
        if below_one == 0 or below_other == 0:
            return None
        return _is_zero(above_one * below_other - above_other * below_one)
    return None


def _fraction(node: Node) -> tuple[Any, Any]:
    """Numerator and denominator. Multiplying across costs an expansion; sympy's `together` and `cancel` ten times as
    much."""
    one = _sympy().S.One
    if node.op == "neg":
        above, below = _fraction(node.args[0])
        return -above, below
    if node.op == "pow" and node.args[1].op == "neg" and node.args[1].args[0].op == "num":
        return one, _build(Node("pow", (node.args[0], node.args[1].args[0])))
    if node.op not in ("add", "mul", "div"):
        return _build(node), one
    above, below = _fraction(node.args[0])
    for arg in node.args[1:]:
        up, down = _fraction(arg)
        if node.op == "div":
            up, down = down, up
        if node.op != "add":
            above, below = above * up, below * down
        elif below == down:
            above = above + up
        else:
            above, below = above * down + up * below, below * down
    return above, below


def _is_zero(difference: Any) -> bool | None:
    if (known := _decided(difference)) is not None:
        return known
    if not _is_small(difference):
        return None
    sympy = _sympy()
    expanded = sympy.expand(difference)
    if (known := _decided(expanded)) is not None:
        return known
    symbols = expanded.free_symbols
    if symbols and expanded.is_polynomial(*symbols):
        return all(c.is_zero for c in sympy.Poly(expanded, *symbols).coeffs()) or _if_rational(expanded)
    return _decided(sympy.radsimp(expanded)) if not symbols else None


def _if_rational(polynomial: Any) -> bool | None:
    """False for a polynomial with rational coefficients that was not zero; others may vanish by identities."""
    return False if all(number.is_Rational for number in polynomial.atoms(_sympy().Number)) else None


def _decided(difference: Any) -> bool | None:
    sympy = _sympy()
    if difference == 0:
        return True
    return False if difference.is_Rational or difference in (sympy.oo, -sympy.oo) else None


def _is_small(expression: Any) -> bool:
    """Whether expanding it ends soon."""
    terms = 1
    for power in expression.atoms(_sympy().Pow):
        if power.exp.is_Integer and abs(int(power.exp)) > 1 and power.base.is_Add:
            if abs(int(power.exp)) > _MAX_EXPANDED_EXPONENT:
                return False
            terms *= len(power.base.args) ** abs(int(power.exp)) if len(power.base.args) > 2 else abs(int(power.exp))
    return terms < 5000


@lru_cache(maxsize=1)
def _sympy() -> Any:
    import sympy  # noqa: PLC0415  half a second, and only workers need it

    return sympy


@lru_cache(maxsize=4096)
def _build(node: Node) -> Any:
    sympy = _sympy()
    if node.op == "num":
        assert isinstance(node.value, Fraction)
        if max(node.value.numerator.bit_length(), node.value.denominator.bit_length()) > _MAX_NUMBER_BITS:
            raise Unsuitable("a long number")
        return sympy.Rational(node.value.numerator, node.value.denominator)
    if node.op == "sym":
        return sympy.Symbol(str(node.value), real=True)
    if node.op in ("pi", "e", "i", "inf"):
        return {"pi": sympy.pi, "e": sympy.E, "i": sympy.I, "inf": sympy.oo}[node.op]
    args = [_build(arg) for arg in node.args]
    if node.op == "pow":
        _check_power(*args)
    if node.op not in _BUILDERS:
        raise Unsuitable(node.op)
    return _BUILDERS[node.op](sympy, *args)


def _check_power(base: Any, exponent: Any) -> None:
    if exponent.is_Number and abs(exponent) > 10_000:
        raise Unsuitable("a large exponent")
    if base.is_Rational and exponent.is_Rational:
        bits = max(int(base.p).bit_length(), int(base.q).bit_length()) * abs(int(exponent) + 1)
        if bits > _MAX_NUMBER_BITS:
            raise Unsuitable("a large power")


def _factorial(sympy: Any, value: Any) -> Any:
    if value.is_Number and not 0 <= value <= 500:
        raise Unsuitable("a large factorial")
    return sympy.factorial(value)


def _quotient(sympy: Any, above: Any, below: Any) -> Any:
    if below == 0:
        raise Unsuitable("division by zero")
    del sympy
    return above / below


def _negative(sympy: Any, value: Any) -> Any:
    del sympy
    return -value


def _named(name: str) -> Callable[..., Any]:
    return lambda sympy, value: getattr(sympy, name)(value)


_BUILDERS: Final[dict[str, Callable[..., Any]]] = {
    "add": lambda sympy, *args: sympy.Add(*args),
    "mul": lambda sympy, *args: sympy.Mul(*args),
    "div": _quotient,
    "pow": lambda sympy, base, exponent: sympy.Pow(base, exponent),
    "neg": _negative,
    "sqrt": lambda sympy, value: sympy.sqrt(value),
    "ln": lambda sympy, value: sympy.log(value),
    "exp": lambda sympy, value: sympy.exp(value),
    "abs": lambda sympy, value: sympy.Abs(value),
    "factorial": _factorial,
    **{
        name: _named(function)
        for name, function in {
            "sin": "sin", "cos": "cos", "tan": "tan", "cot": "cot", "sec": "sec", "csc": "csc", "arcsin": "asin",
            "arccos": "acos", "arctan": "atan", "sinh": "sinh", "cosh": "cosh", "tanh": "tanh",
        }.items()
    },
}  # fmt: skip
