"""Preference pairs: rows with a prompt and two replies, the first of which is preferred."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tithe.envs.rows import Columns, read_question
from tithe.errors import DataError
from tithe.rewards.verifying import read_rows
from tithe.types import PromptItem

CHOSEN: Final = "chosen"
REJECTED: Final = "rejected"
_SHOWN: Final = 5


@dataclass(frozen=True)
class Pair:
    """A question and two replies to it.

    >>> Pair(PromptItem("", messages=({"role": "user", "content": "3+4="},)), "7", "8").rejected
    '8'
    """

    item: PromptItem
    chosen: str
    rejected: str


def read_pairs(path: Path, prompt_column: str = "prompt", instruction: str = "") -> list[Pair]:
    """Read JSON lines with `prompt_column` (text or chat messages, as a task's), `chosen` and `rejected` (texts);
    `instruction` is added to every question as `task.instruction` is.

    Raises `DataError` that names line and key of the first five rows that are no pairs; none is left out in silence.
    """
    columns = Columns(prompt_column, CHOSEN, needs_answer=False, instruction=instruction)
    pairs: list[Pair] = []
    broken: list[str] = []
    for number, row in read_rows(path):
        found = _pair(row, columns)
        if isinstance(found, Pair):
            pairs.append(found)
        else:
            broken.append(f"{path}:{number}: {found}")
    if broken:
        more = f"\n  … and {len(broken) - _SHOWN} more" if len(broken) > _SHOWN else ""
        shown = "\n  ".join(broken[:_SHOWN])
        raise DataError(f"{len(broken)} of {len(broken) + len(pairs)} rows are no pairs:\n  {shown}{more}")
    return pairs


def _pair(row: Mapping[str, Any], columns: Columns) -> Pair | str:
    """The row as a pair, or why it is none."""
    for key in (CHOSEN, REJECTED):
        if key not in row:
            return f"has no {key!r}; a row needs {columns.prompt!r}, {CHOSEN!r} and {REJECTED!r}"
        if not isinstance(row[key], str):
            return f"{key!r} is {row[key]!r:.60}; a reply as text is needed"
        if any("\ud800" <= character <= "\udfff" for character in row[key]):
            return f"{key!r} holds half of a surrogate pair, which is no character"
    if row[CHOSEN] == row[REJECTED]:
        return f"{CHOSEN!r} and {REJECTED!r} are equal, so nothing is preferred"
    item = read_question({key: row[key] for key in row if key not in (CHOSEN, REJECTED)}, columns)
    return item if isinstance(item, str) else Pair(item, row[CHOSEN], row[REJECTED])
