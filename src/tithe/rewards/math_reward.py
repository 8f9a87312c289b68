"""The built-in math reward: is the answer in this text the gold answer?"""

from __future__ import annotations

import enum
from functools import lru_cache

from tithe.rewards.exact import is_number, same_answer
from tithe.rewards.extraction import AnswerForm, find_answer


class Verdict(enum.StrEnum):
    """What became of one answer. NO_GOLD and UNDECIDED are abstentions: the question itself has no readable answer, or
    the graders do not agree."""

    RIGHT = "right"
    WRONG = "wrong"
    UNREADABLE = "unreadable"
    NO_GOLD = "no_gold"
    UNDECIDED = "undecided"


def judge(gold: str | None, text: str) -> Verdict:
    r"""Compare the answer found in `text` with `gold`. Pure, never raises, linear in the length of the text.

    The gold answer is taken as it stands; only a solution that ends in ``#### answer`` or a box is searched, so that a
    list such as ``4, 7`` is never cut down to its last number. Where gold is a number, words are no readable answer.

    >>> judge("12", r"3 * 4 is \boxed{12}"), judge("12", "I cannot say."), judge("", "12")
    (<Verdict.RIGHT: 'right'>, <Verdict.UNREADABLE: 'unreadable'>, <Verdict.NO_GOLD: 'no_gold'>)
    """
    wanted = gold_answer(gold or "")
    if not wanted:
        return Verdict.NO_GOLD
    answer = find_answer(text)
    if answer is None:
        return Verdict.UNREADABLE
    if answer.form is AnswerForm.PHRASE and not any(map(str.isdigit, answer.text)) and is_number(wanted):
        return Verdict.UNREADABLE
    return Verdict.RIGHT if same_answer(wanted, answer.text) else Verdict.WRONG


@lru_cache(maxsize=4096)
def gold_answer(gold: str) -> str:
    r"""The answer a gold text states: after its last ``####``, in its last box, or the whole text; "" when unreadable.

    >>> gold_answer("... so 2-11 = -9 #### -9"), gold_answer("4, 7")
    ('-9', '4, 7')
    """
    if "####" in gold:
        gold = gold.rpartition("####")[2]
    if r"\boxed" in gold or r"\fbox" in gold:
        found = find_answer(gold)
        gold = found.text if found is not None and found.form is AnswerForm.BOX else ""
    return gold.strip()
