r"""The grammar of latex2sympy2-extended, for sums, products, integrals and limits, which the house's own parser leaves.

It is given text of a small alphabet only (no quotes, no underscores outside bounds, no words but known commands), and
never math-verify's own `parse`, whose way for plain expressions is sympy's `parse_expr`, which evaluates Python. Both
graders must speak: the values to 30 digits, and math-verify's comparison of sympy expressions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from tithe.errors import FailureCause, boundary
from tithe.rewards.symbolic.clean import clean

_MAX_CHARS: Final = 300
_MAX_NESTING: Final = 10
_WANTED: Final = re.compile(r"\\(?:int|sum|prod|lim)(?![a-zA-Z])")
_COMMANDS: Final = frozenset(
    ("int", "sum", "prod", "lim", "to", "infty", "frac", "sqrt", "sin", "cos", "tan", "ln", "log", "exp", "pi", "cdot",
     "times", "alpha", "beta", "theta", "lambda", "limits", "arctan", "arcsin", "arccos", "rightarrow")
)  # fmt: skip
_ALPHABET: Final = re.compile(r"(?:\\[a-zA-Z]+|[0-9a-zA-Z+\-*/^_=(){}|! .,])+")


@dataclass(frozen=True)
class Second:
    """Its verdict; None where its two graders do not agree."""

    verdict: bool | None


def same_by_grammar(gold: str, answer: str) -> Second | None:
    """The verdict on two answers of which one holds a sum, product, integral or limit; None when this is no case for
    it. Slow (tens of milliseconds), and unbounded on hostile input: only where it can be killed."""
    if not (_WANTED.search(gold) or _WANTED.search(answer)):
        return None
    texts = _admitted(gold), _admitted(answer)
    if texts[0] is None or texts[1] is None:
        return None
    one, other = _read(texts[0]), _read(texts[1])
    return None if one is None or other is None else Second(_agree(one, other))


def _admitted(text: str) -> str | None:
    """The text as the grammar gets it; None when it holds anything that it must not get."""
    cleaned = re.sub(r"\\text ?\{ ?(d) ?\}", r"\1", clean(text))
    cleaned = re.sub(r"\\frac ?(\d) ?(\d)", r"\\frac{\1}{\2}", cleaned)
    if not _is_balanced(cleaned):
        return None  # the grammar's recovery from errors takes seconds
    if len(cleaned) > _MAX_CHARS or _ALPHABET.fullmatch(cleaned) is None:
        return None
    if any(name not in _COMMANDS for name in re.findall(r"\\([a-zA-Z]+)", cleaned)):
        return None
    if re.search(r"(?<!\\)(?<![a-zA-Z])[a-zA-Z]{4,}", re.sub(r"\\[a-zA-Z]+", " ", cleaned)):
        return None
    return cleaned


def _is_balanced(text: str) -> bool:
    """Whether brackets close, and nest at most ten deep."""
    expected: list[str] = []
    for mark in text:
        if mark in "([{":
            expected.append({"(": ")", "[": "]", "{": "}"}[mark])
        elif mark in ")]}" and (not expected or expected.pop() != mark):
            return False
        if len(expected) > _MAX_NESTING:
            return False
    return not expected


@lru_cache(maxsize=1024)
def _read(text: str) -> Any | None:
    from latex2sympy2_extended import latex2sympy  # noqa: PLC0415

    with boundary(FailureCause.REWARD):  # the grammar raises plain exceptions for text that it does not know
        parsed: Any = latex2sympy(text)
        return parsed.doit()
    return None


def _agree(one: Any, other: Any) -> bool | None:
    from math_verify.grader import sympy_expr_eq  # noqa: PLC0415

    with boundary(FailureCause.REWARD):
        by_algebra = bool(sympy_expr_eq(one, other, float_rounding=30, numeric_precision=30, strict=True))
        return by_algebra if by_algebra is _same_numbers(one, other) else None
    return None


def _same_numbers(one: Any, other: Any) -> bool | None:
    symbols = sorted(one.free_symbols | other.free_symbols, key=str)
    verdicts = []
    for k in range(4 if symbols else 1):
        point = {symbol: (7 + 3 * at + 5 * k) / 8 for at, symbol in enumerate(symbols)}
        left, right = complex(one.evalf(30, subs=point)), complex(other.evalf(30, subs=point))
        verdicts.append(abs(left - right) <= 1e-12 * max(abs(left), abs(right)))
    return all(verdicts)
