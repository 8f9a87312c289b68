"""The code reward: ``reward.function: code``. Takes the program out of a reply and runs it against the tests of the
answer column in the sandbox.

Policies (P): the last fenced code block counts, and only what stands after the last ``</think>``; a block that is never
closed was cut off and is no program. A reply without any fence is a program as a whole when Python can parse it. The
answer column holds the tests as `sandbox.parse_tests` reads them. A column `limits` may change single ones of `LIMITS`.
Every test must hold for 1; a program that fails one, breaks a limit or is none gets 0; where the sandbox fails, or the
tests cannot be read or run, the reward abstains.
"""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from tithe.errors import DataError
from tithe.rewards.spec import prepared
from tithe.sandbox import Limits, Sandbox, Verdict, parse_tests

if TYPE_CHECKING:
    from tithe.types import PromptItem

LIMITS: Final = Limits(wall_s=2.0, cpu_s=2.0, total_s=3.5)
"""Less altogether than the default of `reward.timeout_s`, after which the worker is killed and the reward abstains."""

MAX_PROGRAM_CHARS: Final = 200_000

_FENCE: Final = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([A-Za-z0-9_+-]*)[^\n]*$", re.MULTILINE)
_PYTHON: Final = frozenset({"", "python", "python3", "py"})


@lru_cache
def _sandbox() -> Sandbox:
    """One for each worker process; it ends with the process."""
    return Sandbox(slots=1)


@prepared(_sandbox)
def score(item: PromptItem, text: str) -> dict[str, Any]:
    """1 when the program in `text` passes every test of the row, else 0, with the reason; a reason alone abstains."""
    try:
        tests = parse_tests(item.answer)
        limits = replace(LIMITS, **item.extra.get("limits", {}))
    except (DataError, TypeError) as error:
        return {"reason": str(error)}
    program = find_program(text)
    if program is None:
        return {"tests": 0.0, "reason": "the reply holds no complete program"}
    return reward_of(_sandbox().run_tests(program, tests, limits))


def reward_of(verdict: Verdict) -> dict[str, Any]:
    """A verdict as a reward function returns it."""
    reason = f"{verdict.outcome}: {verdict.detail}" if verdict.detail else str(verdict.outcome)
    if verdict.reward is None:
        return {"reason": reason}
    return {"tests": verdict.reward, "reason": f"{verdict.passed}/{verdict.total} {reason}"}


def find_program(text: str) -> str | None:
    """The program of a reply, or None. Linear in the length of the text; never raises."""
    text = text.rpartition("</think>")[2]
    program: str | None = None
    opened: tuple[str, str, int] | None = None
    for match in _FENCE.finditer(text):
        mark, language = match[1], match[2].lower()
        if opened is None:
            opened = mark, language, match.end() + 1
        elif mark[0] == opened[0][0] and len(mark) >= len(opened[0]) and not language:
            if opened[1] in _PYTHON:
                program = text[opened[2] : match.start()]
            opened = None
    if opened is not None:
        return None
    if program is None and "```" not in text and _parses(text):
        program = text
    return program if program and program.strip() and len(program) <= MAX_PROGRAM_CHARS else None


def _parses(text: str) -> bool:
    try:
        return bool(ast.parse(text).body) if len(text) <= MAX_PROGRAM_CHARS else False
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
