"""Reads the tool calls of a model's reply, in the formats that models are trained on. Never raises, evaluates nothing;
what cannot be read is a malformed call with its position. Free of torch and of every optional package.

    format     a call looks like
    ────────   ─────────────────────────────────────────────────────────────────────────────────────────────
    hermes     <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>           Hermes, Qwen 2.5 and 3
    llama3     {"name": "add", "parameters": {"a": 1}}                                 Llama 3.1, 3.3
    kimi_k2    <|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>   Kimi-K2
    pythonic   [add(a=1), mul(a=2, b=3)]                                               Llama 3.2, 4
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tithe.errors import ConfigError
from tithe.rewards.tool_calls import hermes, kimi_k2, llama3, pythonic
from tithe.rewards.tool_calls.calls import Malformed, ParsedReply, ToolCall

FORMATS: Final[dict[str, Callable[[str], ParsedReply]]] = {
    "hermes": hermes.parse,
    "llama3": llama3.parse,
    "kimi_k2": kimi_k2.parse,
    "pythonic": pythonic.parse,
}
"""Name → parser."""

__all__ = ["FORMATS", "Malformed", "ParsedReply", "ToolCall", "detect_format", "parse_tool_calls"]


def parse_tool_calls(text: str, call_format: str = "hermes") -> ParsedReply:
    """The calls of a reply. `call_format` is a key of `FORMATS`, or `auto` for the format whose marks the text bears.
    Raises `ConfigError` for another name; never because of the text.

    >>> parse_tool_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>').calls[0].arguments
    {'a': 1}
    """
    name = detect_format(text) if call_format == "auto" else call_format
    if name not in FORMATS:
        raise ConfigError(f"tool-call format {name!r} is unknown; choose one of {', '.join(FORMATS)}, auto")
    return FORMATS[name](text)


def detect_format(text: str) -> str:
    """The format whose marks a text bears; hermes when there are none, which then finds no call.

    >>> detect_format("[add(a=1)]")
    'pythonic'
    """
    start = text.lstrip()
    if "<|tool_calls_section_begin|>" in text:
        return "kimi_k2"
    if "<tool_call>" in text:
        return "hermes"
    if start.startswith(("{", "<|python_tag|>{")):
        return "llama3"
    return "pythonic" if start.startswith(("[", "<|python_start|>[")) else "hermes"
