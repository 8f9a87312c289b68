"""What a reply asks for: calls, and places where a call was meant but cannot be read."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

MAX_ARGUMENT_CHARS: Final = 200_000
MAX_DEPTH: Final = 60
"""Deepest nesting of arguments; deeper ones are malformed, long before Python's own recursion limit."""
MAX_CALLS: Final = 128
"""Calls, read or not, after which the rest of a reply is one malformed call."""

_FENCE: Final = re.compile(r"^[ \t]*(`{3,}|~{3,})[^\n]*$", re.MULTILINE)


@dataclass(frozen=True)
class ToolCall:
    """One call. `start` and `end` are offsets in the text that was parsed.

    >>> ToolCall("add", {"a": 2, "b": 3}, 0, 40).arguments["b"]
    3
    """

    name: str
    arguments: Mapping[str, Any]
    start: int = 0
    end: int = 0


@dataclass(frozen=True)
class Malformed:
    """A call that cannot be read: where in the text, and why."""

    position: int
    reason: str


@dataclass(frozen=True)
class ParsedReply:
    """Calls in their order, what could not be read, and the prose around both (without what the format adds).

    >>> ParsedReply((ToolCall("f", {}),), (), "I will call f.").is_well_formed
    True
    """

    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[Malformed, ...] = ()
    prose: str = ""

    @property
    def is_well_formed(self) -> bool:
        """Whether every call that was begun can be read."""
        return not self.malformed


@dataclass
class Findings:
    """What a parser collects while it goes through a text."""

    text: str
    calls: list[ToolCall] = field(default_factory=list)
    malformed: list[Malformed] = field(default_factory=list)
    _spans: list[tuple[int, int]] = field(default_factory=list)

    def call(self, name: object, arguments: object, start: int, end: int) -> None:
        """Keep a call, or say why it is none."""
        if not isinstance(name, str) or not name.strip():
            self.bad(start, end, "the call has no name")
        elif not isinstance(arguments, Mapping):
            self.bad(start, end, f"the arguments of {name:.60} are no JSON object")
        else:
            self.calls.append(ToolCall(name.strip(), dict(arguments), start, end))
            self._spans.append((start, end))

    def bad(self, start: int, end: int, reason: str, position: int | None = None) -> None:
        """Keep a call that cannot be read; `position` is the offset of the fault where it is known."""
        self.malformed.append(Malformed(start if position is None else position, reason))
        self._spans.append((start, end))

    @property
    def is_full(self) -> bool:
        """Whether nothing more is read."""
        return len(self.calls) + len(self.malformed) >= MAX_CALLS

    def cover(self, start: int, end: int) -> None:
        """A span that is no prose."""
        self._spans.append((start, end))

    def finish(self) -> ParsedReply:
        """Everything, with the prose between the spans."""
        prose, at = [], 0
        for start, end in sorted(self._spans):
            prose.append(self.text[at : max(at, start)])
            at = max(at, end)
        prose.append(self.text[at:])
        return ParsedReply(tuple(self.calls), tuple(self.malformed), "".join(prose).strip())


def fenced_blocks(text: str, opens: Sequence[int], closes: Sequence[int]) -> list[tuple[int, int]]:
    """Spans of fenced code blocks; one that is never closed reaches to the end. A fence between an opening mark and its
    closing one (sorted offsets) is part of a call."""
    spans: list[tuple[int, int]] = []
    opened: tuple[int, str] | None = None
    for match in _FENCE.finditer(text):
        mark = match[1]
        if opened is None:
            begun, ended = bisect_left(opens, match.start()), bisect_left(closes, match.start())
            if (opens[begun - 1] if begun else -1) <= (closes[ended - 1] if ended else -1):
                opened = match.start(), mark
        elif mark[0] == opened[1][0] and len(mark) >= len(opened[1]) and match[0].strip() == mark:
            spans.append((opened[0], match.end()))
            opened = None
    return spans if opened is None else [*spans, (opened[0], len(text))]


def outside(positions: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[int]:
    """Sorted positions that lie in none of the sorted spans."""
    kept, block = [], 0
    for position in positions:
        while block < len(spans) and spans[block][1] <= position:
            block += 1
        if block == len(spans) or position < spans[block][0]:
            kept.append(position)
    return kept


class JsonFault(ValueError):
    """Text that is not the JSON that was expected; `position` is the offset in the whole text."""

    def __init__(self, reason: str, position: int) -> None:
        super().__init__(reason)
        self.position = position


def read_json(text: str, start: int) -> tuple[Any, int]:
    """One strict JSON value that begins at `start`, and the offset after it. Repeated keys, NaN and infinities, control
    characters in strings and nesting over `MAX_DEPTH` are faults. Raises `JsonFault`; nothing else."""
    while start < len(text) and text[start] in " \t\r\n":
        start += 1
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise JsonFault(error.msg, error.pos) from error
    except RecursionError as error:
        raise JsonFault("nested too deeply", start) from error
    except ValueError as error:  # a repeated key, NaN, or a number with too many digits
        raise JsonFault(str(error), start) from error
    if end - start > MAX_ARGUMENT_CHARS or _depth(value) > MAX_DEPTH:
        raise JsonFault("too long or nested too deeply", start)
    return value, end


def as_arguments(value: object, start: int) -> object:
    """Arguments as an object; a string that holds one JSON object is read (the form that OpenAI's interface sends).
    Raises `JsonFault`."""
    if not isinstance(value, str):
        return {} if value is None else value
    if not value.strip():
        return {}
    try:
        inner, end = read_json(value, 0)
    except JsonFault as fault:
        raise JsonFault(f"in the arguments: {fault}", start) from fault
    if value[end:].strip():
        raise JsonFault("more than one object in the arguments", start)
    return inner


def _depth(value: object) -> int:
    """Levels of nesting, without recursion."""
    deepest, open_values = 0, [(value, 1)]
    while open_values:
        item, level = open_values.pop()
        deepest = max(deepest, level)
        if level > MAX_DEPTH:
            return level
        inner = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        open_values += [(part, level + 1) for part in inner]
    return deepest


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is repeated")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _finite(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise ValueError("a number is out of range")
    return number


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_finite)
