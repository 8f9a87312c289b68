"""Kimi-K2: `<|tool_calls_section_begin|>`, then per call `<|tool_call_begin|>functions.NAME:INDEX`
`<|tool_call_argument_begin|>{…}<|tool_call_end|>`, then `<|tool_calls_section_end|>`.

The JSON value decides where arguments end. The name is what stands between `functions.` and the last `:INDEX`. A
section or call that is never closed is malformed, unless its JSON is whole and nothing follows it.
"""

from __future__ import annotations

import re
from typing import Final

from tithe.rewards.tool_calls.calls import (
    Findings,
    JsonFault,
    ParsedReply,
    as_arguments,
    fenced_blocks,
    outside,
    read_json,
)

_SECTION: Final = "<|tool_calls_section_begin|>"
_SECTION_END: Final = "<|tool_calls_section_end|>"
_CALL: Final = "<|tool_call_begin|>"
_ARGUMENTS: Final = "<|tool_call_argument_begin|>"
_CALL_END: Final = "<|tool_call_end|>"
_ID: Final = re.compile(r"\s*+(?:functions\.)?([\w.\-]+?)(?::(\d+))?\s*+\Z")
_SPACE: Final = re.compile(r"\s*+")


def parse(text: str) -> ParsedReply:
    """Calls of a reply in this format. Never raises."""
    found = Findings(text)
    opens = [m.start() for m in re.finditer(re.escape(_SECTION), text)]
    closes = [m.start() for m in re.finditer(re.escape(_SECTION_END), text)]
    at = 0
    for start in outside(opens, fenced_blocks(text, opens, closes)):
        if start >= at:
            at = _section(found, text, start)
            found.cover(start, at)
    if not opens and (stray := text.find(_CALL)) >= 0:
        found.bad(stray, len(text), "a call outside a section")
    return found.finish()


def _section(found: Findings, text: str, start: int) -> int:
    """Read a section that begins at `start`; returns where to go on."""
    at, before = start + len(_SECTION), len(found.calls) + len(found.malformed)
    while not found.is_full:
        at = _after_space(text, at)
        closes = text.startswith(_SECTION_END, at)
        if closes or at >= len(text):
            if len(found.calls) + len(found.malformed) == before:
                found.bad(start, at, "a section without a call")
            return at + len(_SECTION_END) if closes else at
        if text.startswith(_CALL, at):
            at = _one(found, text, at)
        else:
            end = _resume(text, at)
            found.bad(at, end, "text between calls")
            at = end
    found.bad(at, len(text), "too many calls")
    return len(text)


def _one(found: Findings, text: str, start: int) -> int:
    begin = start + len(_CALL)
    mark = text.find(_ARGUMENTS, begin, begin + 400)
    try:
        if mark < 0:
            raise JsonFault("a call without arguments", begin)
        name = _ID.match(text[begin:mark])
        if name is None:
            raise JsonFault("a call without a name", begin)
        value, end = read_json(text, mark + len(_ARGUMENTS))
        after = _after_space(text, end)
        if text.startswith(_CALL_END, after):
            after += len(_CALL_END)
        elif after < len(text):
            raise JsonFault("text after the arguments", after)
        arguments = as_arguments(value, mark)
    except JsonFault as fault:
        end = _resume(text, begin)
        found.bad(start, end, str(fault), fault.position)
        return end
    found.call(name[1], arguments, start, after)
    return after


def _resume(text: str, at: int) -> int:
    """Where to go on after a fault: behind the call's end, or at the next mark."""
    close = text.find(_CALL_END, at)
    nearest = [p for mark in (_CALL, _SECTION_END) if (p := text.find(mark, at + 1)) >= 0]
    if close >= 0 and all(close < other for other in nearest):
        return close + len(_CALL_END)
    return min(nearest, default=len(text))


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at
