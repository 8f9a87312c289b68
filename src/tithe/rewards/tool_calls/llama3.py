"""Llama 3: the whole reply is one JSON object `{"name": …, "parameters": {…}}`, or several joined by `;`, after an
optional `<|python_tag|>`. A reply that begins with anything else calls nothing (P)."""

from __future__ import annotations

from typing import Final

from tithe.rewards.tool_calls.calls import Findings, JsonFault, ParsedReply, as_arguments, read_json

_TAG: Final = "<|python_tag|>"
_ENDS: Final = ("<|eom_id|>", "<|eot_id|>")


def parse(text: str) -> ParsedReply:
    """Calls of a reply in this format. Linear in the length of the text; never raises."""
    found = Findings(text)
    stop = len(text.rstrip())
    for end_token in _ENDS:
        if text[:stop].endswith(end_token):
            stop -= len(end_token)
    at = _skip(text, 0)
    tagged = text.startswith(_TAG, at)
    if tagged:
        at = _skip(text, at + len(_TAG))
    if at >= stop or text[at] != "{":
        if tagged:
            found.bad(0, len(text), "no JSON object after the tag", at)
        return found.finish()
    while at < stop:
        start = at
        try:
            value, at = read_json(text, start)
            if not isinstance(value, dict) or "name" not in value:
                raise JsonFault("a call is a JSON object with a name", start)
            arguments = as_arguments(value.get("parameters", value.get("arguments", {})), start)
        except JsonFault as fault:
            found.bad(start, len(text), str(fault), fault.position)
            break
        found.call(value["name"], arguments, start, at)
        at = _skip(text, at)
        if at < stop:
            if text[at] != ";":
                found.bad(at, len(text), "text after a call", at)
                break
            at = _skip(text, at + 1)
    return found.finish()


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at
