r"""Compares two answers, each read into a form. True, False, or None where the graders do not agree.

Two graders look at every pair of expressions: numbers (`numeric`, at points) and algebra (`algebra`, by sympy). Written
rules for where they do not both speak:

    numbers        algebra        verdict    because
    ────────────   ────────────   ────────   ───────────────────────────────────────────────────────────────────────
    equal          equal          right
    unequal        unequal, —     wrong      one point where two expressions differ is a proof
    equal          —              right      agreement to 85 digits at every point, at two precisions
    —              equal          right      a proof; numbers had too few points
    —              unequal        wrong      a proof
    equal          unequal        abstain    one of the graders is wrong
    unequal        equal          abstain    one of the graders is wrong
    —              —              abstain

Rational numbers are compared exactly, and alone. Everything is symmetric in its arguments but one rule: a base that the
answer leaves out is the gold's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from tithe.rewards.symbolic.algebra import same_by_algebra
from tithe.rewards.symbolic.forms import as_region, words
from tithe.rewards.symbolic.numeric import proportional, same_value
from tithe.rewards.symbolic.regions import ordered
from tithe.rewards.symbolic.tree import (
    INFINITY,
    MINUS_INFINITY,
    Based,
    Expression,
    Matrix,
    Named,
    Node,
    Region,
    Relation,
    Series,
    Span,
    Value,
    Words,
    number,
    rational,
)

_FLIPPED: Final = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
_MAX_MATCHED: Final = 30


def same(gold: Value, answer: Value) -> bool | None:
    """Whether two values mean the same; None when that is not known."""
    for kind, compare in ((Words, _words), (Named, _named), (Based, _based)):
        if isinstance(gold, kind) or isinstance(answer, kind):
            return compare(gold, answer)
    if isinstance(gold, Expression) and isinstance(answer, Expression):
        return _expressions(gold, answer)
    if isinstance(gold, Relation) and isinstance(answer, Relation):
        return _relations(gold, answer)
    if isinstance(gold, Matrix) or isinstance(answer, Matrix):
        return _matrices(gold, answer)
    return _collections(gold, answer)


def _collections(gold: Value, answer: Value) -> bool | None:
    """Intervals, points, lists and sets."""
    if isinstance(gold, Span) and isinstance(answer, Span) and gold.is_pair and answer.is_pair:
        return _all((same_node(gold.low, answer.low), same_node(gold.high, answer.high)))
    if isinstance(gold, Region) or isinstance(answer, Region) or _is_interval(gold) or _is_interval(answer):
        return _regions(gold, answer)
    left, right = as_series(gold), as_series(answer)
    if left is not None and right is not None:
        return _series(left, right)
    return False


def _words(gold: Value, answer: Value) -> bool | None:
    """Letters that one side writes without a sign are a product where the other side is a formula."""
    if _as_words(gold) == _as_words(answer):
        return gold != Words("")
    text, other = (gold, answer) if isinstance(gold, Words) else (answer, gold)
    if isinstance(other, Expression) and isinstance(text, Words) and re.fullmatch("[a-zA-Z]{2,3}", text.text):
        letters = tuple(Node("sym", value=letter) for letter in text.text)
        product = Node("mul", letters) if len(letters) == 2 else Node("mul", (Node("mul", letters[:2]), letters[2]))
        return same_node(product, other.node)
    return False


def _as_words(value: Value) -> Value:
    """A single letter is a word too: the letter of a choice."""
    if isinstance(value, Expression) and value.node.op == "sym" and not value.unit:
        return words(str(value.node.value))
    return value


def same_node(one: Node, other: Node) -> bool | None:
    """Whether two expressions are equal, by both graders and the table above."""
    if one == other:
        return True
    if one.has("inf") or other.has("inf"):
        return _infinity(one) is not None and _infinity(one) == _infinity(other)
    exact = rational(one), rational(other)
    if exact[0] is not None and exact[1] is not None:
        return exact[0] == exact[1]
    by_numbers = same_value(one, other)
    if by_numbers is False and not one.symbols() and not other.symbols():
        return False  # steady at two precisions: algebra has nothing to add for constants
    by_algebra = same_by_algebra(one, other)
    if by_numbers is None or by_algebra is None:
        return by_algebra if by_numbers is None else by_numbers
    return by_numbers if by_numbers == by_algebra else None


def _infinity(node: Node) -> int | None:
    if node == INFINITY:
        return 1
    return -1 if node == MINUS_INFINITY else None


def _expressions(gold: Expression, answer: Expression) -> bool | None:
    units = {gold.unit, answer.unit}
    equal = same_node(gold.node, answer.node)
    if equal:
        return len(units) == 1 or "" in units
    if units == {"", "%"}:
        percent, plain = (gold, answer) if gold.unit else (answer, gold)
        shares = same_node(Node("div", (percent.node, number(100))), plain.node)
        return shares if equal is False or shares else None
    return equal


def _named(gold: Value, answer: Value) -> bool | None:
    names = [value.name for value in (gold, answer) if isinstance(value, Named)]
    inner_gold = gold.value if isinstance(gold, Named) else gold
    inner_answer = answer.value if isinstance(answer, Named) else answer
    if len(names) == 2 and names[0] != names[1]:
        relations = [_as_relation(value) for value in (gold, answer) if isinstance(value, Named)]
        if relations[0] is not None and relations[1] is not None and _relations(relations[0], relations[1]):
            return True  # y = 2x and x = y/2
        heads = [name.partition("(")[0] for name in names]
        if not (heads[0] in ("y", "f") and heads[1] in ("y", "f") and heads[0] != heads[1]):
            return False
    if len(names) == 1:
        other = answer if isinstance(gold, Named) else gold
        if isinstance(other, Relation):
            named = gold if isinstance(gold, Named) else answer
            assert isinstance(named, Named)
            relation = _as_relation(named)
            return False if relation is None else _relations(relation, other)
        if isinstance(other, Region) and other.variable and other.variable != names[0]:
            return False
    return same(inner_gold, inner_answer)


def _as_relation(named: Named) -> Relation | None:
    """`y = 2x` as an equation between y and x."""
    if not isinstance(named.value, Expression) or "(" in named.name:
        return None
    return Relation((Node("sym", value=named.name), named.value.node), ("=",))


def _based(gold: Value, answer: Value) -> bool:
    if isinstance(gold, Based) and isinstance(answer, Based):
        return gold.value == answer.value
    based, other = (gold, answer) if isinstance(gold, Based) else (answer, gold)
    assert isinstance(based, Based)
    if isinstance(other, Expression):
        value = rational(other.node)
        written = None if value is None or value.denominator != 1 else str(value.numerator)
        return written == (based.digits or "0")  # a base that one side leaves out
    return isinstance(other, Words) and other.text.upper() == based.digits


def _relations(gold: Relation, answer: Relation) -> bool | None:
    if len(gold.ops) != len(answer.ops):
        return False
    if len(gold.ops) == 1:
        return _single(gold, answer)
    flipped = Relation(answer.sides[::-1], tuple(_FLIPPED[op] for op in answer.ops[::-1]))
    verdicts = [_all(map(same_node, gold.sides, other.sides)) for other in (answer, flipped) if other.ops == gold.ops]
    return True if True in verdicts else None if None in verdicts else False


def _single(gold: Relation, answer: Relation) -> bool | None:
    """Equations are equal up to a factor, inequalities up to a positive one."""
    wanted, given = _difference(gold), _difference(answer)
    if wanted[1] != given[1]:
        return False
    return proportional(wanted[0], given[0], positive=wanted[1] not in ("=", "!="))


def _difference(relation: Relation) -> tuple[Node, str]:
    """Everything on one side, with an operator of =, !=, >, >=."""
    left, right, op = *relation.sides, relation.ops[0]
    if op in ("<", "<="):
        left, right, op = right, left, _FLIPPED[op]
    return Node("add", (left, Node("neg", (right,)))), op


def _matrices(gold: Value, answer: Value) -> bool | None:
    if isinstance(gold, Matrix) and isinstance(answer, Matrix):
        if (len(gold.rows), len(gold.rows[0])) != (len(answer.rows), len(answer.rows[0])):
            return False
        return _all(
            same_node(a, b)
            for left, right in zip(gold.rows, answer.rows, strict=True)
            for a, b in zip(left, right, strict=True)
        )
    matrix, other = (gold, answer) if isinstance(gold, Matrix) else (answer, gold)
    assert isinstance(matrix, Matrix)
    entries = [entry for row in matrix.rows for entry in row]
    series = as_series(other)
    if 1 not in (len(matrix.rows), len(matrix.rows[0])) or series is None or series.bracket == "{":
        return False
    if len(series.items) != len(entries):
        return False
    return _all(same(Expression(entry), item) for entry, item in zip(entries, series.items, strict=True))


def _is_interval(value: Value) -> bool:
    return isinstance(value, Span) and not value.is_pair and value.low_closed != value.high_closed


def _regions(gold: Value, answer: Value) -> bool | None:
    if isinstance(gold, Span) and isinstance(answer, Span):
        return _same_span(gold, answer)
    left, right = as_region(gold), as_region(answer)
    if left is None or right is None:
        return False
    if left.variable and right.variable and left.variable != right.variable:
        return False
    one, other = ordered(left.spans), ordered(right.spans)
    if one is None or other is None:
        same_ends = [_same_span(a, b) for a, b in zip(left.spans, right.spans, strict=False)]
        return len(left.spans) == len(right.spans) and _all(same_ends)
    return len(one) == len(other) and _all(map(_same_span, one, other))


def _same_span(one: Span, other: Span) -> bool | None:
    if (one.low_closed, one.high_closed) != (other.low_closed, other.high_closed):
        return False
    return _all((same_node(one.low, other.low), same_node(one.high, other.high)))


def as_series(value: Value) -> Series | None:
    """A value as a list: a pair in brackets is one, and a single expression is a list of one in a set."""
    if isinstance(value, Series):
        return value
    if isinstance(value, Span):
        if value.low_closed != value.high_closed:
            return None
        return Series((Expression(value.low), Expression(value.high)), "[" if value.low_closed else "(")
    return Series((value,), "") if isinstance(value, Expression | Named) else None


def _series(gold: Series, answer: Series) -> bool | None:
    brackets = {gold.bracket, answer.bracket} - {""}
    if len(brackets) > 1:
        return False
    if brackets == {"{"}:
        is_short = "" in (gold.bracket, answer.bracket) and len(gold.items) != len(answer.items)
        return False if is_short else _sets(gold.items, answer.items)
    if len(gold.items) != len(answer.items):
        return False
    if brackets or _tells_apart(gold) != _tells_apart(answer):
        return _all(map(_item, gold.items, answer.items))
    return _matched(gold.items, answer.items)


def _tells_apart(series: Series) -> bool:
    """Whether the items are values of different variables, so that a list without names has to keep their order."""
    names = {item.name.partition("_")[0] for item in series.items if isinstance(item, Named)}
    return len(names) > 1


def _item(gold: Value, answer: Value) -> bool | None:
    return same(gold, answer)


def _sets(gold: Sequence[Value], answer: Sequence[Value]) -> bool | None:
    """Every item of each side is in the other; repetitions do not count."""
    return _all([_contains(answer, item) for item in gold] + [_contains(gold, item) for item in answer])


def _contains(items: Sequence[Value], wanted: Value) -> bool | None:
    verdicts = [same(wanted, item) for item in items]
    return True if True in verdicts else None if None in verdicts else False


def _matched(gold: Sequence[Value], answer: Sequence[Value]) -> bool | None:
    """Whether each item of one list has its own partner in the other."""
    if len(gold) > _MAX_MATCHED:
        return _all(map(same, gold, answer))
    left = list(answer)
    for item in gold:
        verdicts = [same(item, other) for other in left]
        if True not in verdicts:
            return None if None in verdicts else False
        del left[verdicts.index(True)]
    return True


def _all(verdicts: object) -> bool | None:
    """False when one is, else None when one is, else True."""
    unknown = False
    for verdict in verdicts:  # type: ignore[attr-defined]
        if verdict is False:
            return False
        unknown = unknown or verdict is None
    return None if unknown else True
