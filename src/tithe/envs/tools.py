"""Tools that a policy may call: a type-hinted Python function, described to the model by a JSON schema made from its
hints.

Covered: arguments are checked against the schema before the function sees them; a tool that raises or takes too long
gives the model an error text, and the episode goes on. Not covered: a function of yours runs in a thread of this
process with your rights, and a thread that does not end cannot be killed.
"""

from __future__ import annotations

import asyncio
import contextvars
import enum
import inspect
import threading
import types
import typing
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tithe.errors import ConfigError, Failure, FailureCause, RolloutFailure, UserError, boundary
from tithe.rewards.tool_calls.json_schema import problems

TIMEOUT_S: Final = 10.0
MAX_OUTPUT_CHARS: Final = 4000
"""Longest text a tool gives the model; the middle of a longer one is left out."""

_SIMPLE: Final[dict[Any, dict[str, Any]]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    list: {"type": "array"},
    dict: {"type": "object"},
    type(None): {"type": "null"},
    Any: {},
}


@dataclass(frozen=True)
class Tool:
    """What can be called: `parameters` is the JSON schema of the arguments, `function` takes them by name."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    function: Callable[..., Any]
    timeout_s: float = TIMEOUT_S

    def definition(self) -> dict[str, Any]:
        """As OpenAI's interface and chat templates take it."""
        shown = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": shown}

    async def call(self, arguments: Mapping[str, Any]) -> ToolAnswer:
        """The tool's answer as text; an error's text when the arguments are wrong or the function fails."""
        wrong = problems(dict(arguments), self.parameters)
        if wrong:
            return ToolAnswer(f"error: {'; '.join(wrong[:3])}", is_error=True)
        result: Any = None
        with boundary(FailureCause.ENVIRONMENT) as slot:
            async with asyncio.timeout(self.timeout_s):
                result = await self._run(arguments)
        if slot.failure is not None:
            return ToolAnswer(_complaint(slot.failure, self.timeout_s), is_error=True)
        if isinstance(result, ToolAnswer):
            return ToolAnswer(shortened(result.text), result.is_error)
        return ToolAnswer(shortened(result if isinstance(result, str) else repr(result)))

    async def _run(self, arguments: Mapping[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self.function):
            return await self.function(**arguments)
        result = await _in_own_thread(self.function, arguments)
        return await result if isinstance(result, Awaitable) else result


async def _in_own_thread(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """What a function returns or raises, from a thread of this call alone: a call that never ends takes no thread from
    others, and a daemon does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if answer.done():  # nobody waits any more
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)

    def run() -> None:
        result: Any = None
        problem: Exception | None = None
        try:
            with boundary(FailureCause.ENVIRONMENT) as slot:
                result = context.run(function, **arguments)
            if slot.failure is not None:
                problem = RolloutFailure(slot.failure.cause, slot.failure.message)
        except UserError as error:
            problem = error
        except SystemExit as error:
            problem = RolloutFailure(FailureCause.ENVIRONMENT, f"the tool called exit({error.code!r})")
        try:
            loop.call_soon_threadsafe(settle, result, problem)
        except RuntimeError:  # the loop is closed, and nobody waits
            return

    context = contextvars.copy_context()
    threading.Thread(target=run, name="tool", daemon=True).start()
    return await answer


@dataclass(frozen=True)
class ToolAnswer:
    """What the model is told. `is_error`: nothing useful was computed.

    >>> ToolAnswer("42").is_error
    False
    """

    text: str
    is_error: bool = False


def shortened(text: str) -> str:
    """At most `MAX_OUTPUT_CHARS`, from both ends."""
    if len(text) <= MAX_OUTPUT_CHARS:
        return text
    half = MAX_OUTPUT_CHARS // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


def _complaint(failure: Failure, timeout_s: float) -> str:
    if failure.cause is FailureCause.TIMEOUT:
        return f"error: no answer within {timeout_s:g} s"
    return shortened(f"error: {failure.message}")


def tool_from_function(function: Callable[..., Any], key: str = "task.tools") -> Tool:
    """A tool from a function's name, docstring and type hints. Every parameter needs a hint; those without a default
    are required. Raises `ConfigError` for `key` that says which hint is missing or cannot be described.

    >>> def add(a: int, b: int = 0) -> int:
    ...     "Add two numbers."
    ...     return a + b
    >>> tool_from_function(add).parameters["required"]
    ['a']
    """
    name = getattr(function, "__name__", type(function).__name__)
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        signature = inspect.signature(function)
    except (NameError, TypeError, ValueError) as error:
        raise ConfigError(f"{key}: the hints of {name} cannot be read: {error}", key) from error
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"{key}: parameter {parameter} of {name} has no name that a call could give", key)
        if parameter.name not in hints:
            raise ConfigError(f"{key}: parameter {parameter.name!r} of {name} needs a type hint", key)
        try:
            properties[parameter.name] = _schema(hints[parameter.name])
        except TypeError as error:
            raise ConfigError(f"{key}: parameter {parameter.name!r} of {name}: {error}", key) from error
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        elif isinstance(parameter.default, str | int | float | bool):
            properties[parameter.name]["default"] = parameter.default
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    description = (inspect.getdoc(function) or "").partition("\n\n")[0].replace("\n", " ")
    return Tool(name, description, schema, function)


def _schema(hint: Any) -> dict[str, Any]:
    """The JSON schema of one type hint. Raises `TypeError` for a type that JSON does not have."""
    if hint in _SIMPLE:
        return dict(_SIMPLE[hint])
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(argument) for argument in arguments]}
    if origin is typing.Annotated:
        texts = [text for text in arguments[1:] if isinstance(text, str)]
        return {**_schema(arguments[0]), **({"description": texts[0]} if texts else {})}
    if origin is list:
        return {"type": "array", "items": _schema(arguments[0])}
    if origin is dict and arguments[0] is str:
        return {"type": "object", "additionalProperties": _schema(arguments[1])}
    if isinstance(hint, type) and issubclass(hint, enum.StrEnum):
        return {"enum": [member.value for member in hint]}
    raise TypeError(f"{hint} is no JSON type; use str, int, float, bool, list[…], dict[str, …], Literal or Optional")
