r"""Compares two answers exactly. Numbers are fractions of integers, never floats. Nothing is evaluated as code. Time is
bounded, and nothing raises.

Policies (P): comparison of numbers is exact, so 0.1 and 0.10000001 differ. Groups of three digits after commas or
thin spaces are one number, anything else with commas is a list: `48,250` is a number, `56,78` is not. A bare list is
unordered; one in parentheses or square brackets is ordered, and equals a bare list only in the same order. A unit on
one side only is ignored (`15 cm` for 15, `60°` for 60, `50%` for 50); two different units are unequal; `50%` also
equals 1/2. A unit is `%`, `°`, a common abbreviation, or a word of three letters or more after a space, so `5x` is no
five. `x = 5` answers 5, but not `y = 5`. `2\frac{1}{2}` and `2 1/2` are mixed numbers. Words compare without case,
single letters with it. Everything else compares as a string without spaces and dressing.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Final

MAX_CHARS: Final = 2000
"""Longer answers compare as strings only."""

_MAX_DIGITS: Final = 400
_MAX_EXPONENT: Final = 400
_MAX_DEPTH: Final = 4


@dataclass(frozen=True)
class Number:
    """An exact value and the unit written after it ("" when none is)."""

    value: Fraction
    unit: str


@dataclass(frozen=True)
class Items:
    """A list; `bracket` is the opening bracket, or "" for a bare list."""

    items: tuple[Value, ...]
    bracket: str


@dataclass(frozen=True)
class Named:
    """`x = …`."""

    name: str
    value: Value


Value = Number | Items | Named | str

_CHARACTERS: Final = {
    **dict.fromkeys(map(ord, "\u2212\u2012\u2013\ufe63\uff0d"), "-"),
    **{0xFF10 + digit: str(digit) for digit in range(10)},
    **dict.fromkeys(map(ord, "\u00a0\u2009\u202f\u2007"), " "),
    ord("\uff0b"): "+",
    ord("\uff0c"): ",",
    ord("\u00ba"): "°",
}
_DRESSING: Final = re.compile(
    r"\\left(?![a-z])|\\right(?![a-z])|\\displaystyle(?![a-z])|\\!|\\\$|\\[()]|\\\[|\\\]|[$`\u20ac\u00a3\u00a5]"
)
JOINT: Final = re.compile(r"(?<=\d)(?:\\\$|\\[()\[\]]|[$`\u20ac\u00a3\u00a5])++(?=\d)")
"""Dressing between two digits: without it they would be one number."""
_EMPHASIS: Final = re.compile(r"(?<![\w)\]}*])(\*{1,3})(?=[^\s*])([^*]*+)(?<=\S)\1(?![\w*])")
_CLOSING_EMPHASIS: Final = re.compile(r"(?<=[^\s*])\*{2,3}(?=\s+[A-Za-z]|\s*\Z|[.,;:!?)])")
_SPACES: Final = re.compile(r"\\[,;: ]|\\q?quad(?![a-z])|~|\s")
_TEXT: Final = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it)|mbox|operatorname)\s?\{([^{}]*+)\}")
_SHORT_FRACTION: Final = re.compile(r"\\[dtc]?frac\s?(?:\{([^{}]*+)\}|(\d))\s?(?:\{([^{}]*+)\}|(\d))")
_DEGREES: Final = re.compile(r"\^\s?\{?\\circ\}?|\\degree(?![a-z])")
_LEAD_IN: Final = re.compile(r"(?:the )?(?:final )?answer(?: is|:)? ?:? ?(?=\S)", re.IGNORECASE)
_NAME: Final = re.compile(r"([A-Za-z](?:_\{?\w\}?)?) ?= ?([^=]++)")

_PLAIN: Final = r"(?:\d{1,3}(?:,\d{3})++(?!\d)|\d{1,3}(?: \d{3})++(?! ?\d)|\d++)?(?:\.\d*+)?(?:[eE][-+]?\d{1,4}+)?"
_SIGNED: Final = rf"[-+]?\s?{_PLAIN}"
_FRACTION: Final = re.compile(
    rf"(?P<sign>[-+]?)\s?(?:(?P<whole>\d++)(?: |(?=\\)))?"
    rf"(?:\\frac\{{ ?(?P<a>{_SIGNED}) ?\}}\{{ ?(?P<b>{_SIGNED}) ?\}}|(?P<c>{_PLAIN}) ?/ ?(?P<d>{_PLAIN}))(?P<unit>.*+)"
)
_DECIMAL: Final = re.compile(rf"(?P<value>{_SIGNED})(?P<unit>.*+)")
_ABBREVIATIONS: Final = "mm|cm|dm|km|mg|kg|ml|mL|cl|dl|in|ft|yd|mi|lb|oz|hr|Hz|kW|kJ|am|pm|AM|PM"
_UNIT: Final = re.compile(
    rf" ?(?:[%°]|(?:{_ABBREVIATIONS})(?![A-Za-z])|(?<= )[mgslLh](?![A-Za-z])|(?<= )[A-Za-z]{{3,20}}+)"
    r"(?:[ /·][A-Za-z]{1,20}+)?(?:\^?\{?[23]\}?)?"
)
NO_UNITS: Final = frozenset(
    ("and", "or", "to", "plus", "minus", "times", "over", "half", "sqrt", "sin", "cos", "tan", "log", "exp", "mod",
     "bmod", "pmod", "choose", "squared", "cubed", "factorial", "hundred", "thousand", "million", "billion", "trillion",
     "dozen", "not", "but", "nor", "either", "else", "than", "maybe", "perhaps", "possibly", "alternatively")
) | frozenset(
    f"{part}{plural}"
    for part in ("third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "hundredth", "thousandth")
    for plural in ("", "s")
)  # fmt: skip
"""Words behind a number that make it another number, or an answer of two minds."""
_BRACKETS: Final = {"(": ")", "[": "]", r"\{": r"\}"}
_SPLIT: Final = re.compile(r"\\[{}]|[()\[\]{},;]")


def same_answer(gold: str, answer: str) -> bool:
    r"""Whether two answers mean the same, by the policies above.

    >>> same_answer(r"\frac{7}{12}", "7/12"), same_answer("2,7", "27"), same_answer("9", "-9")
    (True, False, False)
    """
    if len(gold) > MAX_CHARS or len(answer) > MAX_CHARS:
        return gold.strip() == answer.strip()
    return _equal(parse(gold), parse(answer))


@lru_cache(maxsize=4096)
def parse(text: str) -> Value:
    """The value a text writes; a cleaned string when it is none of the kinds known here."""
    return _parse(_clean(text), 0)


def is_number(text: str) -> bool:
    """Whether a text is one number, with or without unit and name."""
    value = parse(text) if len(text) <= MAX_CHARS else text
    return isinstance(value.value if isinstance(value, Named) else value, Number)


def without_emphasis(text: str) -> str:
    """The text without Markdown's asterisks; those of a product or a power stay.

    >>> without_emphasis("**5** cm"), without_emphasis("2**3"), without_emphasis("3*4")
    ('5 cm', '2**3', '3*4')
    """
    if "*" not in text:
        return text.strip(" ")
    return _CLOSING_EMPHASIS.sub("", _EMPHASIS.sub(r"\2", text)).strip("* ")


def _clean(text: str) -> str:
    text = without_emphasis(text.translate(_CHARACTERS).replace("{,}", ",").replace(r"\%", "%"))
    text = _TEXT.sub(r" \1 ", JOINT.sub("|", text))
    text = _DEGREES.sub("°", _SPACES.sub(" ", _DRESSING.sub("", text)))
    text = _SHORT_FRACTION.sub(lambda m: rf"\frac{{{m[1] or m[2] or ''}}}{{{m[3] or m[4] or ''}}}", text)
    text = re.sub(r" {2,}", " ", text).strip(" ")
    text = _LEAD_IN.sub("", text, count=1) if _LEAD_IN.match(text) else text
    return re.sub(r" ([,.;!^°])", r"\1", text).rstrip(" .,;!\\")


def _parse(text: str, depth: int) -> Value:
    if (named := _NAME.fullmatch(text)) is not None and depth == 0:
        return Named(named[1], _parse(named[2].strip(), depth + 1))
    if (number := _number(text)) is not None:
        return number
    if depth < _MAX_DEPTH:
        if (items := _items(text, depth)) is not None:
            return items
        if text.startswith("{") and text.endswith("}") and _split(text[1:-1]) == [text[1:-1]]:
            return _parse(text[1:-1].strip(), depth + 1)
    return _as_string(text)


def _number(text: str) -> Number | None:
    if len(text) > _MAX_DIGITS or not any(character.isdigit() for character in text):
        return None
    for pattern, value_of in ((_FRACTION, _fraction_value), (_DECIMAL, _decimal_value)):
        match = pattern.fullmatch(text)
        if match is not None and (unit := _unit(match["unit"])) is not None:
            value = value_of(match)
            if value is not None:
                return Number(value, unit)
    return None


def _fraction_value(match: re.Match[str]) -> Fraction | None:
    numerator, denominator = (match["a"], match["b"]) if match["a"] is not None else (match["c"], match["d"])
    above, below = _plain_value(numerator), _plain_value(denominator)
    if above is None or below is None or below == 0:
        return None
    value = above / below
    if match["whole"]:
        if not 0 < value < 1 or above.denominator != 1 or below.denominator != 1:
            return None
        value += int(match["whole"])
    return -value if match["sign"] == "-" else value


def _decimal_value(match: re.Match[str]) -> Fraction | None:
    return _plain_value(match["value"])


def _plain_value(text: str) -> Fraction | None:
    """An exact fraction from a decimal number; None when there is no digit or the exponent is out of bounds."""
    text = text.replace(",", "").replace(" ", "")
    mantissa, _, exponent = text.lower().partition("e")
    if not any(character.isdigit() for character in mantissa) or not text.isascii():
        return None
    if exponent and abs(int(exponent)) > _MAX_EXPONENT:
        return None
    sign, digits = (mantissa[0], mantissa[1:]) if mantissa[0] in "+-" else ("", mantissa)
    whole, _, decimals = digits.partition(".")
    value = Fraction(int(whole + decimals), 10 ** len(decimals)) * Fraction(10) ** int(exponent or 0)
    return -value if sign == "-" else value


def _unit(text: str) -> str | None:
    """The unit in what follows a number: "" for nothing, None when it is something else."""
    if not text.strip():
        return ""
    if _UNIT.fullmatch(text) is None or NO_UNITS.intersection(re.findall(r"[a-z]+", text.lower())):
        return None
    unit = re.sub(r"[ {}^]", "", text).lower()
    return {"percent": "%", "degrees": "°", "degree": "°"}.get(unit, unit)


def _items(text: str, depth: int) -> Items | None:
    """A list, when the text has a separator outside all inner brackets."""
    for opening, closing in _BRACKETS.items():
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
            inner = text[len(opening) : len(text) - len(closing)]
            parts = _split(inner)
            if parts is not None and (len(parts) > 1 or opening == r"\{"):
                return Items(tuple(_parse(part.strip(), depth + 1) for part in parts), opening)
    parts = _split(text)
    if parts is None or len(parts) < 2:
        return None
    return Items(tuple(_parse(part.strip(), depth + 1) for part in parts), "")


def _split(text: str) -> list[str] | None:
    """Parts between commas or semicolons outside all brackets; None when the brackets do not close."""
    parts: list[str] = []
    level = start = 0
    for match in _SPLIT.finditer(text):
        mark = match[0][-1]
        if mark in "([{":
            level += 1
        elif mark in ")]}":
            level -= 1
            if level < 0:
                return None
        elif level == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    return [*parts, text[start:]] if level == 0 else None


def _as_string(text: str) -> str:
    letters = text.replace(" ", "")
    return letters.casefold() if len(letters) > 1 and letters.isalpha() else letters


def _equal(gold: Value, answer: Value) -> bool:
    if isinstance(gold, Named) or isinstance(answer, Named):
        names = {value.name for value in (gold, answer) if isinstance(value, Named)}
        inner_gold = gold.value if isinstance(gold, Named) else gold
        inner_answer = answer.value if isinstance(answer, Named) else answer
        return len(names) == 1 and _equal(inner_gold, inner_answer)
    if isinstance(gold, Number) and isinstance(answer, Number):
        return _equal_numbers(gold, answer)
    if isinstance(gold, Items) and isinstance(answer, Items):
        return _equal_items(gold, answer)
    return isinstance(gold, str) and gold == answer and gold != ""


def _equal_numbers(gold: Number, answer: Number) -> bool:
    if gold.value == answer.value:
        return gold.unit == answer.unit or "" in (gold.unit, answer.unit)
    if {gold.unit, answer.unit} == {"", "%"}:
        percent, plain = (gold, answer) if gold.unit else (answer, gold)
        return percent.value / 100 == plain.value
    return False


def _equal_items(gold: Items, answer: Items) -> bool:
    if len(gold.items) != len(answer.items):
        return False
    brackets = {gold.bracket, answer.bracket} - {""}
    if len(brackets) > 1:
        return False
    if brackets & {"(", "["}:
        return all(map(_equal, gold.items, answer.items))
    if Counter(gold.items) == Counter(answer.items):
        return True
    left = list(answer.items)
    for item in gold.items if len(left) <= 50 else ():
        match = next((i for i, other in enumerate(left) if _equal(item, other)), None)
        if match is None:
            return False
        del left[match]
    return not left
