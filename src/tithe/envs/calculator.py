"""Exact arithmetic for a model: parsed, never evaluated as code."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Annotated, Any, Final

MAX_CHARS: Final = 300
MAX_BITS: Final = 4096
"""Largest numerator or denominator of any intermediate result."""

MAX_DECIMALS: Final = 12

_WRITTEN: Final = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "^": "**", "$": ""})
_GROUPED: Final = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})++(?![\d,])")
_FUNCTIONS: Final[dict[str, Callable[[Fraction], Fraction]]] = {
    "abs": abs,
    "round": lambda value: Fraction(round(value)),
    "floor": lambda value: Fraction(math.floor(value)),
    "ceil": lambda value: Fraction(math.ceil(value)),
}


def calculator(expression: Annotated[str, "such as (12 + 7) * 3"]) -> str:
    """Compute an arithmetic expression exactly."""
    return calculate(expression)


def calculate(expression: str) -> str:
    """The value of an expression of numbers, ``+ - * / // % **``, brackets, and abs, round, floor, ceil, sqrt, as text.

    Whole numbers and finite decimals are exact, others have ten digits. Raises `ValueError` for anything else.

    >>> calculate("3 * (4 + 5)"), calculate("1/4"), calculate("2^10")
    ('27', '0.25', '1024')
    """
    if len(expression) > MAX_CHARS:
        raise ValueError(f"the expression has more than {MAX_CHARS} characters")
    try:
        plain = _GROUPED.sub(lambda match: match[0].replace(",", ""), expression.translate(_WRITTEN))
        tree = ast.parse(plain.strip().rstrip("= "), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError("this is no arithmetic expression") from error
    return _written(_value(tree.body))


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value = Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            value = _value(operand)
        case ast.BinOp(left=left, op=operator, right=right):
            value = _binary(operator, _value(left), _value(right))
        case ast.Call(func=ast.Name(id="sqrt"), args=[argument], keywords=[]):
            value = _root(_value(argument))
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
            value = _FUNCTIONS[name](_value(argument))
        case _:
            raise ValueError("only numbers, + - * / // % **, brackets, abs, round, floor, ceil and sqrt are known")
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ValueError("the number is too large")
    return value


def _binary(operator: ast.operator, left: Fraction, right: Fraction) -> Fraction:
    simple: dict[type, Callable[[Any, Any], Any]] = {
        ast.Add: lambda a, b: a + b,
        ast.Sub: lambda a, b: a - b,
        ast.Mult: lambda a, b: a * b,
        ast.Div: lambda a, b: a / b,
        ast.FloorDiv: lambda a, b: a // b,
        ast.Mod: lambda a, b: a % b,
    }
    if right == 0 and isinstance(operator, ast.Div | ast.FloorDiv | ast.Mod):
        raise ValueError("division by zero")
    if type(operator) in simple:
        return Fraction(simple[type(operator)](left, right))
    if isinstance(operator, ast.Pow):
        return _power(left, right)
    raise ValueError("this operator is not known")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent == Fraction(1, 2):
        return _root(base)
    if exponent.denominator != 1:
        raise ValueError("only whole exponents and 1/2 are known")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent) * bits > MAX_BITS:
        raise ValueError("the number is too large")
    if base == 0 and exponent < 0:
        raise ValueError("division by zero")
    return base ** int(exponent)


def _root(value: Fraction) -> Fraction:
    if value < 0:
        raise ValueError("the root of a negative number")
    above, below = math.isqrt(value.numerator), math.isqrt(value.denominator)
    if above * above == value.numerator and below * below == value.denominator:
        return Fraction(above, below)
    try:
        return Fraction(math.sqrt(value))
    except OverflowError as error:
        raise ValueError("the number is too large") from error


def _written(value: Fraction) -> str:
    """Exactly where the decimals end within `MAX_DECIMALS`, else ten digits."""
    for places in range(MAX_DECIMALS + 1):
        scaled = abs(value) * 10**places
        if scaled.denominator == 1:
            digits = str(scaled.numerator).rjust(places + 1, "0")
            whole = digits if places == 0 else f"{digits[:-places]}.{digits[-places:]}"
            return f"-{whole}" if value < 0 else whole
    try:
        return f"{float(value):.10g}"
    except OverflowError as error:
        raise ValueError("the number is too large") from error
