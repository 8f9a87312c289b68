"""Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them, prose between them.

The JSON value decides where a call ends, so a closing tag inside a string is text. The last call may lack its closing
tag when nothing follows it. What stands in a fenced code block is a quotation and no call (P).
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

_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"
_CLOSED: Final = re.compile(r"\s*+(?:</tool_call>|\Z)")


def parse(text: str) -> ParsedReply:
    """Calls of a reply in this format. Never raises."""
    found = Findings(text)
    opens = [m.start() for m in re.finditer(_OPEN, text)]
    closes = [m.start() for m in re.finditer(_CLOSE, text)]
    blocks = fenced_blocks(text, opens, closes)
    at = 0
    for start in sorted([*outside(opens, blocks), *outside(closes, blocks)]):
        if start < at:
            continue
        if found.is_full:
            found.bad(start, len(text), "too many calls")
            break
        if text.startswith(_CLOSE, start):
            found.bad(start, start + len(_CLOSE), "a closing tag without a call")
            continue
        at = _one(found, text, start)
    return found.finish()


def _one(found: Findings, text: str, start: int) -> int:
    """Read the call whose tag begins at `start`; returns where to go on."""
    begin = start + len(_OPEN)
    try:
        value, end = read_json(text, begin)
        closed = _CLOSED.match(text, end)
        if closed is None:
            raise JsonFault("more than one JSON value in a call", end)
        if not isinstance(value, dict):
            raise JsonFault("a call is a JSON object", begin)
        arguments = as_arguments(value.get("arguments", value.get("parameters", {})), begin)
    except JsonFault as fault:
        close, again = text.find(_CLOSE, begin), text.find(_OPEN, begin)
        nearest = [offset for offset in (close + len(_CLOSE) if close >= 0 else -1, again) if offset >= 0]
        end = min(nearest, default=len(text))
        found.bad(start, end, str(fault), fault.position)
        return end
    found.call(value.get("name"), arguments, start, closed.end())
    return closed.end()
