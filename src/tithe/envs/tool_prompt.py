"""How a model is told of its tools, for chat templates that say nothing of them: a text at the end of the system
message, in the words of the call format it is to use."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from tithe.envs.tools import Tool
from tithe.errors import ConfigError
from tithe.types import PromptItem

_EXAMPLES: Final = {
    "hermes": '<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>',
    "llama3": '{{"name": "{name}", "parameters": {arguments}}}',
    "pythonic": "[{name}({keywords})]",
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    ),
}
CLOSING: Final = {"hermes": "</tool_call>", "kimi_k2": "<|tool_calls_section_end|>"}
"""Text after which a call is complete, and a reply ends to wait for the answer."""


def describe_tools(tools: Sequence[Tool], call_format: str) -> str:
    """What the system message says of the tools."""
    listed = "\n".join(json.dumps(tool.definition()["function"], ensure_ascii=False) for tool in tools)
    return f"You can call functions:\n{listed}\nTo call one, write:\n{example_call(tools[0], call_format)}"


def example_call(tool: Tool, call_format: str) -> str:
    """A call of a tool as a reply would write it, its arguments as the schema describes them."""
    properties = dict(tool.parameters.get("properties", {}))
    arguments = {name: schema.get("description", "…") for name, schema in properties.items()}
    keywords = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())
    shown = json.dumps(arguments, ensure_ascii=False)
    return _EXAMPLES[call_format].format(name=tool.name, arguments=shown, keywords=keywords)


def with_tools(
    items: Iterable[PromptItem], tools: Sequence[Tool], call_format: str, system_prompt: str | None
) -> tuple[PromptItem, ...]:
    """The prompts with the tools in their system messages; one without such a message gets `system_prompt` first.
    Raises `ConfigError` for a prompt that is plain text, which has no system message."""
    described = describe_tools(tools, call_format)
    return tuple(_told(item, described, system_prompt) for item in items)


def _told(item: PromptItem, described: str, system_prompt: str | None) -> PromptItem:
    if not item.messages:
        raise ConfigError("task.tools needs chat prompts; this task's are plain texts", "task.tools")
    first, *rest = item.messages
    if first["role"] in ("system", "developer"):
        return replace(item, messages=({**first, "content": f"{first['content']}\n\n{described}"}, *rest))
    text = described if system_prompt is None else f"{system_prompt}\n\n{described}"
    return replace(item, messages=({"role": "system", "content": text}, *item.messages))
