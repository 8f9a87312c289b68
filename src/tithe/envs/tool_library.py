"""The tools that a configuration can name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

from tithe.envs.calculator import calculator
from tithe.envs.search import search_tool
from tithe.envs.tools import Tool, ToolAnswer, tool_from_function
from tithe.errors import ConfigError
from tithe.rewards import load_function
from tithe.sandbox import Limits, Outcome, Sandbox

KEY = "task.tools"

PYTHON_TIMEOUT_S: Final = 300.0
"""Longest a program of the tool `python` waits for its turn and runs; the sandbox stops each after `Limits.wall_s`."""


def build_tools(names: Sequence[str], closers: list[Callable[[], None]]) -> tuple[Tool, ...]:
    """Tools by name: `calculator`, `python` (in the sandbox), `search:FOLDER`, or `module:function`. What must be
    closed is added to `closers`. Raises `ConfigError`, or `SandboxUnavailableError` for `python` where there is no
    sandbox."""
    tools = tuple(_build(name, closers) for name in names)
    twice = next((tool.name for tool in tools if [t.name for t in tools].count(tool.name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{KEY}: two tools are called {twice!r}", KEY)
    return tools


def _build(name: str, closers: list[Callable[[], None]]) -> Tool:
    if name == "calculator":
        return tool_from_function(calculator, KEY)
    if name == "python":
        sandbox = Sandbox()
        closers.append(sandbox.close)
        return python_tool(sandbox)
    if name.startswith("search:"):
        return search_tool(Path(name.removeprefix("search:")), KEY)
    return tool_from_function(load_function(name, KEY), KEY)


def python_tool(sandbox: Sandbox, limits: Limits | None = None) -> Tool:
    """A code interpreter: each call is a fresh program in the sandbox, and its answer is what it prints."""

    def python(code: Annotated[str, "a complete program; what it prints is returned"]) -> str | ToolAnswer:
        """Run a Python program."""
        verdict, printed = sandbox.run_script(code, limits=limits)
        if verdict.outcome is Outcome.HARNESS:
            raise RuntimeError(verdict.detail)
        if verdict.outcome is not Outcome.PASSED:
            last = printed.strip().splitlines()[-1:]
            text = f"{printed}\n{verdict.outcome}" if verdict.outcome is not Outcome.ERROR else (last or ["error"])[0]
            return ToolAnswer(text, is_error=True)
        return printed.rstrip("\n") or "(nothing was printed)"

    # The sandbox's own limits count from a program's start; this one also counts the wait for a slot.
    return replace(tool_from_function(python, KEY), timeout_s=PYTHON_TIMEOUT_S)
