"""The verdict on one text: find its answer, read both, compare."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from tithe.rewards.exact import MAX_CHARS, Number, is_number, parse, same_answer
from tithe.rewards.exact import Named as NamedNumber
from tithe.rewards.extraction import Answer, AnswerForm, find_answer, number_in
from tithe.rewards.math_reward import Verdict, gold_answer
from tithe.rewards.symbolic.clean import is_damaged
from tithe.rewards.symbolic.compare import same
from tithe.rewards.symbolic.forms import read
from tithe.rewards.symbolic.numeric import is_defined
from tithe.rewards.symbolic.second import same_by_grammar
from tithe.rewards.symbolic.tree import Expression, Named, Relation, Value, Words

_INTEGER: Final = re.compile(r"-?[0-9]{1,18}")
_NO_GOLD: Final = "the question has no readable answer"


@dataclass(frozen=True)
class Judgement:
    """A verdict and, in a few words, why."""

    verdict: Verdict
    reason: str


def verify(gold: str | None, text: str) -> Judgement:
    r"""Whether the answer found in `text` is `gold`. Never raises, unless the packages are missing (`ConfigError`); may
    take long on hostile input, so it runs where it can be killed.

    >>> verify(r"\frac{\sqrt{3}}{3}", r"It is \boxed{1/\sqrt{3}}.").verdict
    <Verdict.RIGHT: 'right'>
    """
    return verify_plain(gold, text) or _verify(gold_answer(gold or ""), text)


def verify_plain(gold: str | None, text: str) -> Judgement | None:
    """The verdict where it takes no algebra: unreadable gold or text, and numbers on both sides. None for the rest.
    Linear in the length of the text and free of optional packages, so any thread may call it."""
    wanted = gold_answer(gold or "")
    if not wanted:
        return Judgement(Verdict.NO_GOLD, _NO_GOLD)
    if is_damaged(gold or ""):
        return Judgement(Verdict.NO_GOLD, "the question's answer holds a control character: a backslash was lost")
    found = find_answer(text, formulas=True)
    if found is None:
        return Judgement(Verdict.UNREADABLE, "no answer is found")
    if is_damaged(found.text):
        return Judgement(Verdict.UNREADABLE, "the answer holds a control character")
    given = found.text if len(found.text) <= MAX_CHARS else ""
    if _INTEGER.fullmatch(wanted) and _INTEGER.fullmatch(given):
        return _right(int(wanted) == int(given), "as numbers")
    if len(wanted) <= MAX_CHARS and given and _is_plain(wanted) and _is_plain(given):
        return _right(same_answer(wanted, given), "as numbers")
    return None


def _is_plain(text: str) -> bool:
    if "!" in text:  # a factorial, which exact comparison takes for the end of a sentence
        return False
    value = parse(text)
    return isinstance(value.value if isinstance(value, NamedNumber) else value, Number)


def _verify(wanted: str, text: str) -> Judgement:
    found = find_answer(text, formulas=True)
    assert found is not None, "verify_plain has judged this text"
    gold = read(wanted)
    answer = _given(found, gold)
    if isinstance(answer, Words) and found.form is AnswerForm.PHRASE and is_number(wanted):
        number = number_in(found.text)
        if number is None:
            return Judgement(Verdict.UNREADABLE, "the answer is words where a number is wanted")
        return _right(same_answer(wanted, number), "as numbers")
    equal = same(gold, answer)
    how = "as formulas"
    if isinstance(gold, Words) or isinstance(answer, Words):
        how = "as words"
        if not equal and (second := same_by_grammar(wanted, found.text)) is not None:
            equal, how = second.verdict, "as sums, products, integrals or limits"
    if equal is None and _is_worthless(gold, answer):
        return Judgement(Verdict.WRONG, "the answer has no value that can be computed")
    if equal is None:
        return Judgement(Verdict.UNDECIDED, f"the graders do not agree on these {how}")
    return _right(equal, how)


def _is_worthless(gold: Value, answer: Value) -> bool:
    """Whether the gold has a value and the answer has none: `0/0` must not escape the verdict by an abstention."""
    if not (isinstance(gold, Expression) and isinstance(answer, Expression)):
        return False
    return is_defined(gold.node) and not is_defined(answer.node)


def _given(found: Answer, gold: Value) -> Value:
    """The answer's value. Outside a box, `left = right` states its right side where gold is no equation."""
    answer = read(found.text)
    if found.form is AnswerForm.BOX or isinstance(gold, Relation | Named | Words):
        return answer
    if isinstance(answer, Relation) and set(answer.ops) == {"="}:
        return Expression(answer.sides[-1])
    return answer


def _right(is_right: bool, how: str) -> Judgement:
    return Judgement(Verdict.RIGHT if is_right else Verdict.WRONG, f"{'equal' if is_right else 'unequal'} {how}")
