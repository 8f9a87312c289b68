r"""Reads the forms that answers take: lists, sets, points, intervals, unions, relations, names, matrices, units, bases.

Nothing raises: what is none of these becomes `Words`, which equal nothing but the same words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Final

from tithe.rewards.symbolic.clean import clean
from tithe.rewards.symbolic.expressions import read_expression
from tithe.rewards.symbolic.regions import REALS, between, complement, intersection, ordered, union, without
from tithe.rewards.symbolic.tokens import Token, tokenize
from tithe.rewards.symbolic.tree import (
    Based,
    Expression,
    Matrix,
    Named,
    Node,
    Region,
    Relation,
    Series,
    Span,
    Unreadable,
    Value,
    Words,
    number,
    rational,
)
from tithe.rewards.symbolic.units import split_unit

MAX_CHARS: Final = 2000
_MAX_DEPTH: Final = 5
_MAX_ITEMS: Final = 100

_OPENING: Final = frozenset(("(", "[", "{", r"\{", r"\lfloor", r"\lceil", r"\langle"))
_CLOSING: Final = frozenset((")", "]", "}", r"\}", r"\rfloor", r"\rceil", r"\rangle"))
_RELATIONS: Final = {"=": "=", "<": "<", ">": ">", r"\le": "<=", r"\ge": ">=", r"\ne": "!=", r"\in": "in"}
_UNREAD: Final = frozenset(
    (r"\ldots", r"\forall", r"\exists", r"\implies", r"\Rightarrow", r"\iff", r"\Leftrightarrow", r"\to",
     r"\rightarrow",
     r"\pmod", r"\bmod", r"\mod", r"\text", r"\cases", r"\quad", r"\not", r"\notin", r"\subset", r"\subseteq", r"\sim",
     r"\cong", r"\parallel", r"\perp", r"\angle", r"\triangle", r"\neg", r"\int", r"\sum", r"\prod",
     r"\lim", r"\partial")
)  # fmt: skip
_BASED: Final = re.compile(r"\(?(?:\\text ?\{)?([0-9A-Fa-f]{1,200})\}?\)?_ ?\{? ?(?:\\text ?\{)?(\d{1,2})\}? ?\}?")
_GROUPED: Final = re.compile(r"([-+]?)(\d{1,3}(?:,\d{3})+)(?!\d)(?![^,]*,)")
_SCIENTIFIC: Final = re.compile(r"[-+]?\d{1,40}(?:\.\d{1,40})?[eE][-+]?\d{1,3}")
_MATRIX: Final = re.compile(r"\\begin\{([pbB]?matrix|array)\}(?:\{[^{}]*\})?")


@lru_cache(maxsize=8192)
def read(text: str) -> Value:
    """The value that an answer writes."""
    if len(text) > MAX_CHARS:
        return Words(text.strip())
    cleaned = clean(text)
    based = _BASED.fullmatch(cleaned)
    if based is not None and 2 <= int(based[2]) <= 36 and all(int(d, 36) < int(based[2]) for d in based[1]):
        return Based(int(based[1], int(based[2])), based[1].lstrip("0").upper())
    if re.fullmatch(r"[A-Za-z]{2,}(?: [A-Za-z]+)*", cleaned) and cleaned not in ("pi", "inf", "infinity"):
        return words(cleaned)
    if _SCIENTIFIC.fullmatch(cleaned):
        return Expression(number(Fraction(cleaned)))
    grouped = _GROUPED.match(cleaned)
    if grouped is not None:
        cleaned = grouped[0].replace(",", "") + cleaned[grouped.end() :]
    body, unit = split_unit(cleaned)
    tokens = tokenize(body)
    if tokens is None or not tokens:
        return words(cleaned)
    try:
        value = _value(tokens, 0)
    except Unreadable:
        return words(cleaned)
    return _with_unit(value, unit) if unit else value


def words(text: str) -> Words:
    """A text as it is compared: without dressing, spaces and, where it is a word, case."""
    text = re.sub(r"\\text ?\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\s+", "", text).rstrip(".,;:")
    if re.fullmatch(r"\(([A-Za-z])\)", text):
        text = text[1]
    return Words(text.casefold() if len(text) > 1 and text.isalpha() else text)


def _with_unit(value: Value, unit: str) -> Value:
    if isinstance(value, Expression):
        return Expression(value.node, unit)
    if isinstance(value, Named):
        return Named(value.name, _with_unit(value.value, unit))
    if isinstance(value, Series) and not value.bracket:
        return Series(tuple(_with_unit(item, unit) for item in value.items))
    return value


def _value(tokens: Sequence[Token], depth: int) -> Value:
    if depth > _MAX_DEPTH or not tokens:
        raise Unreadable("empty, or nested too deeply")
    if any(token.kind == "words" or token.text in _UNREAD for token in tokens):
        raise Unreadable("words")
    parts, marks = _split(tokens)
    if len(parts) > 1:
        return _several(parts, marks, depth)
    sides, ops = _sides(tokens)
    if ops:
        return _relation(sides, ops, depth)
    if (region := _region(tokens)) is not None:
        return region
    if (inner := _bracketed(tokens, depth)) is not None:
        return inner
    if tokens[0].kind == "begin":
        return _matrix(tokens)
    return _expression(tokens)


def _expression(tokens: Sequence[Token]) -> Value:
    node = read_expression(tokens)
    if not node.has("pm", "mp"):
        return Expression(node)
    return Series((Expression(_choose(node, 1)), Expression(_choose(node, -1))))


def _choose(node: Node, sign: int) -> Node:
    """The expression with its upper signs (1) or its lower ones (-1)."""
    args = tuple(_choose(arg, sign) for arg in node.args)
    if node.op in ("pm", "mp"):
        return args[0] if (node.op == "pm") == (sign > 0) else Node("neg", args)
    return replace(node, args=args)


def _split(tokens: Sequence[Token]) -> tuple[list[list[Token]], set[str]]:
    """Parts between commas, semicolons, "or" and "and" outside brackets, and which of these there were."""
    parts: list[list[Token]] = [[]]
    marks: set[str] = set()
    level = 0
    for token in tokens:
        level += _step(token)
        if level < 0:
            raise Unreadable("brackets do not close")
        is_mark = (token.kind == "symbol" and token.text in (",", ";")) or token.kind == "join"
        if level == 0 and is_mark:
            marks.add(token.text)
            if parts[-1]:
                parts.append([])
        else:
            parts[-1].append(token)
    if level:
        raise Unreadable("brackets do not close")
    return [part for part in parts if part], marks


def _step(token: Token) -> int:
    if token.kind == "begin":
        return 1 if token.text.startswith(r"\begin") else -1
    if token.kind not in ("symbol", "command"):
        return 0
    return (token.text in _OPENING) - (token.text in _CLOSING)


def _several(parts: Sequence[Sequence[Token]], marks: set[str], depth: int) -> Value:
    """A bare list; conditions on one variable become one region."""
    if len(parts) > _MAX_ITEMS:
        raise Unreadable("too many items")
    values = [_value(part, depth + 1) for part in parts]
    first = values[0]
    regions = [value for value in values if isinstance(value, Region)]
    if len(regions) == len(values) and len({region.variable for region in regions}) == 1:
        is_excluding = all(_excludes(part) for part in parts)
        if marks == {"or"}:
            return Region(union(regions), regions[0].variable)
        if "or" not in marks and ("and" in marks or is_excluding):
            return Region(intersection(regions), regions[0].variable)
    if isinstance(first, Region) and _excludes(parts[0]) and all(isinstance(v, Expression) for v in values[1:]):
        points = tuple(value.node for value in values[1:] if isinstance(value, Expression))
        return Region(without(first.spans, points), first.variable)
    if isinstance(first, Named) and all(isinstance(value, Expression) for value in values[1:]):
        return Named(first.name, Series((first.value, *values[1:])))
    if all(isinstance(value, Named) for value in values):
        named = [value for value in values if isinstance(value, Named)]
        if len({value.name for value in named}) == 1:
            return Named(named[0].name, _flat(Series(tuple(value.value for value in named))))
    return _flat(Series(tuple(values)))


def _flat(series: Series) -> Series:
    """Bare lists inside a bare list (from a plus-minus) belong to it."""
    items: list[Value] = []
    for item in series.items:
        items += item.items if isinstance(item, Series) and not item.bracket else (item,)
    return Series(tuple(items))


def _excludes(tokens: Sequence[Token]) -> bool:
    return any(token.text == r"\ne" for token in tokens)


def _sides(tokens: Sequence[Token]) -> tuple[list[list[Token]], list[str]]:
    sides: list[list[Token]] = [[]]
    ops: list[str] = []
    level = 0
    for token in tokens:
        level += _step(token)
        if level == 0 and token.kind in ("symbol", "command") and token.text in _RELATIONS:
            ops.append(_RELATIONS[token.text])
            sides.append([])
        else:
            sides[-1].append(token)
    return sides, ops


def _relation(sides: list[list[Token]], ops: list[str], depth: int) -> Value:
    if not all(sides) or len(ops) > 6:
        raise Unreadable("a side of a relation is missing")
    if ops == ["="] and (names := _names(sides[0])):
        return _point(names, sides[1], depth)
    name = _name(sides[0])
    if ops == ["in"] and name:
        value = _value(sides[1], depth + 1)
        region = None if isinstance(value, Series) else as_region(value)
        if region is not None:
            return Region(region.spans, name)
        return Named(name, value)
    if "in" in ops:
        raise Unreadable("membership of something else")
    if set(ops) == {"="} and name:
        if len(sides) == 2:
            return Named(name, _value(sides[1], depth + 1))
        values = [_value(side, depth + 1) for side in sides[1:]]
        if all(isinstance(value, Expression) for value in values):
            nodes = tuple(value.node for value in values if isinstance(value, Expression))
            return Named(name, _chain(Relation(nodes, ("=",) * (len(nodes) - 1))))
        raise Unreadable("a chain of equations")
    nodes = tuple(read_expression(side) for side in sides)
    relation = Relation(nodes, tuple(ops))
    if any(node.has("pm", "mp") for node in nodes):
        raise Unreadable("a sign of two values in a relation")
    return between(relation) or _chain(relation)


def _names(tokens: Sequence[Token]) -> list[str]:
    """The names in `(x, y)`, or none."""
    if len(tokens) < 5 or tokens[0].text != "(" or tokens[-1].text != ")":
        return []
    parts, marks = _split(tokens[1:-1])
    names = [_name(part) for part in parts]
    return names if marks == {","} and all(names) else []


def _point(names: Sequence[str], tokens: Sequence[Token], depth: int) -> Value:
    """`(x, y) = (1, 2)` names each coordinate."""
    value = _value(tokens, depth + 1)
    items: tuple[Value, ...] = ()
    if isinstance(value, Span) and value.is_pair:
        items = (Expression(value.low), Expression(value.high))
    elif isinstance(value, Series) and value.bracket == "(":
        items = value.items
    if len(items) != len(names):
        raise Unreadable("a point with other coordinates")
    return Series(tuple(map(Named, names, items)))


def _chain(relation: Relation) -> Value:
    """`2 + 3 = 5` is the number 5; other relations stay."""
    if set(relation.ops) == {"="}:
        values = {rational(side) for side in relation.sides}
        if len(values) == 1 and None not in values:
            return Expression(relation.sides[-1])
    return relation


def _name(tokens: Sequence[Token]) -> str:
    """`x`, `x_1`, `f(x)`, `f^{-1}(x)` or a word as the left side of an equation; "" for anything else."""
    text = "".join(token.text for token in tokens)
    if tokens[0].kind != "letter" or text in ("e", "i", r"\pi"):
        return ""
    if re.fullmatch(r"\\?[A-Za-z]+'*(?:_\{?\w+\}?)?(?:\^\{?-1\}?)?(?:\([a-z](?:,[a-z])*\))?", text) is None:
        return ""
    letters = [token for token in tokens if token.kind == "letter"]
    return text if len(letters) == 1 or "(" in text or "_" in text else ""


def _bracketed(tokens: Sequence[Token], depth: int) -> Value | None:
    first, last = tokens[0].text, tokens[-1].text
    if len(tokens) < 2 or first not in ("(", "[", "]", r"\{", r"\langle") or not _encloses(tokens):
        return None
    if first == r"\{" and len(tokens) == 2:
        return Series((), "{")
    parts, marks = _split(tokens[1:-1])
    if first == r"\{" and last == r"\}":
        if any(token.text in ("|", ":") for token in tokens) and (built := _built_set(tokens[1:-1], depth)) is not None:
            return built
        return _flatten_set(tuple(_value(part, depth + 1) for part in parts))
    if len(parts) == 1:
        return _value(tokens[1:-1], depth + 1) if (first, last) == ("(", ")") else None
    if marks - {",", ";"} or first == r"\{":
        raise Unreadable("a list in brackets of another kind")
    if len(parts) == 2 and first in ("(", "[", "]") and last in (")", "]", "["):
        values = [_value(part, depth + 1) for part in parts]
        if all(isinstance(value, Expression) for value in values):
            low, high = (value.node for value in values if isinstance(value, Expression))
            return Span(low, high, first == "[", last == "]", (first, last) == ("(", ")"))
    if (first, last) not in (("(", ")"), ("[", "]"), (r"\langle", r"\rangle")):
        raise Unreadable("brackets of two kinds")
    items = tuple(_value(part, depth + 1) for part in parts)
    return Series(items, "[" if first == "[" else "(")


def _flatten_set(items: tuple[Value, ...]) -> Series:
    return replace(_flat(Series(items)), bracket="{")


def _built_set(tokens: Sequence[Token], depth: int) -> Value | None:
    r"""`\{x \mid x > 2\}`; None when it is no such set."""
    at = next((i for i, token in enumerate(tokens) if token.text in ("|", ":")), 0)
    name = _name([token for token in tokens[:at] if token.kind == "letter"][:1]) if at else ""
    if not name:
        return None
    value = _value(tokens[at + 1 :], depth + 1)
    if isinstance(value, Region) and value.variable == name:
        return Region(value.spans, name)
    raise Unreadable("a set of another kind")


def _encloses(tokens: Sequence[Token]) -> bool:
    """Whether the first bracket closes with the last token."""
    if tokens[0].text == "]":
        return tokens[-1].text in ("[", "]", ")")
    level = 0
    for at, token in enumerate(tokens):
        is_reversed_end = at == len(tokens) - 1 and token.text == "["
        level += -1 if is_reversed_end else _step(token)
        if level == 0:
            return at == len(tokens) - 1
    return False


def _region(tokens: Sequence[Token]) -> Value | None:
    r"""Unions, intersections, differences of intervals and `\mathbb{R}`; None when there is none of these."""
    if len(tokens) == 1 and tokens[0].text == r"\emptyset":
        return Series((), "{")
    if len(tokens) == 1 and tokens[0].kind == "set" and tokens[0].text == "R":
        return Region(REALS)
    for operator, combine in ((r"\cup", union), (r"\setminus", None), (r"\cap", intersection)):
        parts = _split_by(tokens, operator)
        if len(parts) == 1:
            continue
        if not all(parts) or len(parts) > _MAX_ITEMS:
            raise Unreadable("a set is missing")
        values = [_value(part, 1) for part in parts]
        if combine is union and all(isinstance(value, Series) and value.bracket == "{" for value in values):
            return Series(tuple(item for value in values if isinstance(value, Series) for item in value.items), "{")
        regions = [as_region(value) for value in values]
        if any(region is None for region in regions):
            raise Unreadable("a set of another kind")
        known = [region for region in regions if region is not None]
        if combine is not None:
            return Region(combine(known))
        spans = known[0].spans
        for other in known[1:]:
            spans = intersection([Region(spans), Region(complement(other.spans))])
        return Region(spans)
    return None


def _split_by(tokens: Sequence[Token], operator: str) -> list[list[Token]]:
    parts: list[list[Token]] = [[]]
    level = 0
    for token in tokens:
        level += _step(token)
        if level == 0 and token.text == operator:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def as_region(value: Value) -> Region | None:
    """A value as a set of real numbers: an interval, a region, or a finite set of constants."""
    if isinstance(value, Region):
        return value
    if isinstance(value, Span):
        return Region((value,)) if ordered((value,)) is not None else None
    if isinstance(value, Series) and value.bracket == "{":
        nodes = [item.node for item in value.items if isinstance(item, Expression) and not item.node.symbols()]
        if len(nodes) == len(value.items):
            return Region(union([Region((Span(node, node, True, True),)) for node in nodes]))
    return None


def _matrix(tokens: Sequence[Token]) -> Value:
    if tokens[-1].kind != "begin" or _MATRIX.fullmatch(tokens[0].text) is None:
        raise Unreadable("an environment of another kind")
    rows: list[list[list[Token]]] = [[[]]]
    for token in tokens[1:-1]:
        if token.kind == "begin":
            raise Unreadable("a matrix in a matrix")
        if token.text == "\\\\":
            rows.append([[]])
        elif token.text == "&":
            rows[-1].append([])
        else:
            rows[-1][-1].append(token)
    if rows[-1] == [[]]:
        rows.pop()
    if not rows or len({len(row) for row in rows}) != 1 or len(rows) * len(rows[0]) > _MAX_ITEMS:
        raise Unreadable("rows differ in length")
    return Matrix(tuple(tuple(read_expression(cell) for cell in row) for row in rows))
