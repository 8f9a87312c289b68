"""Keeps held-out questions held out: no question, and no reordering of one, is on both sides."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tithe.errors import ConfigError
from tithe.types import PromptItem


@dataclass(frozen=True)
class Split:
    """Both sides, and what was left out to keep them apart: `duplicates` repeat a held-out question, `leaked` training
    rows ask one, `twins` are reorderings of one."""

    train: tuple[PromptItem, ...]
    eval: tuple[PromptItem, ...]
    duplicates: int = 0
    leaked: int = 0
    twins: int = 0


def question_key(item: PromptItem) -> str:
    """What is asked, without differences of spacing and of Unicode composition."""
    texts = [item.text or "", *(f"{m['role']}: {m.get('content', '')}" for m in item.messages)]
    return " ".join(unicodedata.normalize("NFC", "\n".join(texts)).split())


def twin_key(item: PromptItem) -> str:
    """The same for all reorderings of one question's words and numbers: ``3 + 4`` and ``4 + 3`` are twins."""
    return " ".join(sorted(re.findall(r"\w+|[^\w\s]", question_key(item))))


def hold_out(items: Sequence[PromptItem], eval_size: int, seed: int) -> Split:
    """Set at least `eval_size` distinct questions aside, whole families of twins at a time, chosen by `seed` alone (the
    order of rows does not matter). Raises `ConfigError` when nothing would be left to train on."""
    families: defaultdict[str, list[PromptItem]] = defaultdict(list)
    for item in items:
        families[twin_key(item)].append(item)
    held: list[PromptItem] = []
    chosen: set[str] = set()
    n_rows = 0
    for key in sorted(families, key=lambda key: _shuffle_key(seed, key)):
        if len(held) >= eval_size:
            break
        chosen.add(key)
        n_rows += len(families[key])
        held += distinct(families[key])
    train = [item for key, family in families.items() if key not in chosen for item in family]
    if len(held) < eval_size or not train:
        n_distinct = len({question_key(item) for item in items})
        raise ConfigError(
            f"task.eval_size: {n_distinct} distinct questions cannot give {eval_size} held-out ones and leave some to "
            "train on; lower task.eval_size, give a built-in task larger operands (task.source: sums:99), or name "
            "task.eval_source",
            "task.eval_size",
        )
    return Split(shuffled(train, seed), shuffled(held, seed), duplicates=n_rows - len(held))


def keep_apart(train: Sequence[PromptItem], held: Sequence[PromptItem], eval_size: int, seed: int) -> Split:
    """Use a separate held-out source: at most `eval_size` of its distinct questions. Training rows that ask one of
    them, or a reordering, are removed. Raises `ConfigError` when no training row is left."""
    questions = distinct(held)
    chosen = shuffled(questions, seed)[:eval_size]
    asked = {question_key(item) for item in chosen}
    families = {twin_key(item) for item in chosen}
    fresh = [item for item in train if question_key(item) not in asked]
    apart = [item for item in fresh if twin_key(item) not in families]
    if not apart:
        raise ConfigError(
            f"task.eval_source: all {len(train)} training rows ask held-out questions; name another source",
            "task.eval_source",
        )
    return Split(
        shuffled(apart, seed),
        chosen,
        duplicates=len(held) - len(questions),
        leaked=len(train) - len(fresh),
        twins=len(fresh) - len(apart),
    )


def distinct(items: Sequence[PromptItem]) -> list[PromptItem]:
    """The first row of each question."""
    return list({question_key(item): item for item in reversed(items)}.values())[::-1]


def contradictions(items: Sequence[PromptItem]) -> list[str]:
    """Questions that come with more than one answer."""
    answers: defaultdict[str, set[str]] = defaultdict(set)
    for item in items:
        answers[question_key(item)].add((item.answer or "").strip())
    return [question for question, given in answers.items() if len(given) > 1]


def shuffled(items: Sequence[PromptItem], seed: int) -> tuple[PromptItem, ...]:
    """In an order that depends on the seed and the ids alone."""
    return tuple(sorted(items, key=lambda item: _shuffle_key(seed, item.id)))


def _shuffle_key(seed: int, text: str) -> bytes:
    return hashlib.sha256(f"{seed}:{text}".encode()).digest()
