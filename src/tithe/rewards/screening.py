"""Screens a task's questions before a run pays for them: unreadable answers, repetitions, contradictions, leakage."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from tithe.rewards.math_reward import Verdict, gold_answer
from tithe.rewards.pool import RewardPool
from tithe.rewards.spec import SYMBOLIC_MATH, RewardSpec
from tithe.rewards.symbolic import verify_plain
from tithe.rewards.symbolic.clean import is_damaged
from tithe.types import PromptItem

SHARED_WORDS: Final = 13
"""A training question that has this many words in a row in common with a held-out one may leak it: the length that
GPT-3's data were cleaned by (arXiv 2005.14165, appendix C)."""

_SHOWN: Final = 5


@dataclass(frozen=True)
class Finding:
    """One kind of fault and the questions that have it, as ``id: what``."""

    kind: str
    examples: tuple[str, ...]


VerifyFn = Callable[[str, str], Verdict]
"""(gold, text) → verdict: how two answers of one question are compared."""


def screen(
    train: Sequence[PromptItem], held: Sequence[PromptItem], compare: VerifyFn | None = None
) -> tuple[Finding, ...]:
    """All kinds of faults, also those that no question has.

    unreadable     the answer is missing, empty, cut off or damaged: every rollout of it would be an abstention
    not itself     the answer, given as an answer, is not right: the grader cannot read it
    repeated       a training question that was asked before
    contradictory  a question with answers that are not equal
    leaked         a held-out question is in the training data, up to case, punctuation and spacing
    near           a training question shares `SHARED_WORDS` words in a row with a held-out one
    """
    with ExitStack() as stack:
        return _screen(train, held, compare or _Symbolic(stack))


class _Symbolic:
    """Compares by the symbolic grader: an answer that needs algebra in a worker, which can be killed."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._pool: RewardPool | None = None

    def __call__(self, gold: str, text: str) -> Verdict:
        plain = verify_plain(gold, text)
        if plain is not None:
            return plain.verdict
        if self._pool is None:
            self._pool = self._stack.enter_context(RewardPool(RewardSpec(function=SYMBOLIC_MATH)))
        result = self._pool.submit(PromptItem("", answer=gold), text).result()
        if result.value is None:
            return Verdict.UNDECIDED
        return Verdict.RIGHT if result.facts["right"] else Verdict.WRONG


def _screen(train: Sequence[PromptItem], held: Sequence[PromptItem], compare: VerifyFn) -> tuple[Finding, ...]:
    both = [*train, *held]
    unreadable = [item for item in both if not _is_readable(item.answer)]
    unreadable_ids = {id(item) for item in unreadable}
    readable = [item for item in both if id(item) not in unreadable_ids]
    odd = [item for item in readable if compare(str(item.answer), _boxed(item.answer)) is not Verdict.RIGHT]
    repeated = [item for items in _by_question(train).values() for item in items[1:]]
    contradictory = [
        item for items in _by_question(readable).values() if (item := _contradiction(items, compare)) is not None
    ]
    asked = {_words_of(item) for item in held}
    leaked = [item for item in train if _words_of(item) in asked]
    shingles = {shingle for item in held for shingle in _shingles(item)}
    leaked_ids = {id(item) for item in leaked}
    near = [item for item in train if id(item) not in leaked_ids and not shingles.isdisjoint(_shingles(item))]
    found: Mapping[str, Iterable[PromptItem]] = {
        "unreadable": unreadable,
        "not itself": odd,
        "repeated": repeated,
        "contradictory": contradictory,
        "leaked": leaked,
        "near": near,
    }
    return tuple(Finding(kind, tuple(_told(item) for item in items)) for kind, items in found.items())


def report(findings: Sequence[Finding], broken: Sequence[str], n_train: int, n_held: int) -> dict[str, object]:
    """The answer of `tithe verify RUN.yaml`; `broken` are rows that could not be read at all."""
    findings = (Finding("broken", tuple(broken)), *findings)
    lines = [f"{n_train} training rows, {n_held} held-out questions"]
    for finding in findings:
        lines.append(f"{finding.kind:<14} {len(finding.examples)}")
        lines += [f"    {example}" for example in finding.examples[:_SHOWN]]
    return {
        "train": n_train,
        "eval": n_held,
        **{finding.kind.replace(" ", "_"): len(finding.examples) for finding in findings},
        "examples": {finding.kind.replace(" ", "_"): list(finding.examples[:_SHOWN]) for finding in findings},
        "text": "\n".join(lines),
    }


def _is_readable(gold: str | None) -> bool:
    return bool(gold_answer(gold or "")) and not is_damaged(gold or "")


def _boxed(gold: str | None) -> str:
    return rf"\boxed{{{gold_answer(gold or '')}}}"


def _question(item: PromptItem) -> str:
    return "\n".join([item.text or "", *(message.get("content", "") for message in item.messages)])


def _words_of(item: PromptItem) -> tuple[str, ...]:
    """Words, numbers and mathematical signs of a question, without case and punctuation."""
    text = unicodedata.normalize("NFKC", _question(item)).casefold()
    return tuple(re.findall(r"\w+|[-+*/^=<>%]", text))


def _shingles(item: PromptItem) -> set[tuple[str, ...]]:
    words = _words_of(item)
    return {words[at : at + SHARED_WORDS] for at in range(len(words) - SHARED_WORDS + 1)}


def _by_question(items: Iterable[PromptItem]) -> dict[tuple[str, ...], list[PromptItem]]:
    found: defaultdict[tuple[str, ...], list[PromptItem]] = defaultdict(list)
    for item in items:
        found[_words_of(item)].append(item)
    return found


def _contradiction(items: Sequence[PromptItem], compare: VerifyFn) -> PromptItem | None:
    """The first row whose answer is not that of the first row."""
    first, *rest = items
    for item in rest:
        if item.answer != first.answer and compare(str(first.answer), _boxed(item.answer)) is not Verdict.RIGHT:
            return item
    return None


def _told(item: PromptItem) -> str:
    question = " ".join(_question(item).split())
    return f"{item.id}: {question:.80} → {item.answer!r:.60}"
