"""Judges one text: the math reward or a user's function, plus the format rules. Runs inside a worker, and in the main
process for what is linear and calls nobody's code."""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tithe.errors import ConfigError
from tithe.rewards.functions import load_function
from tithe.rewards.math_reward import Verdict, judge
from tithe.rewards.spec import KEY, RewardResult, RewardSpec

if TYPE_CHECKING:  # numpy is not needed to judge
    from tithe.types import PromptItem


INFO_NAMES = ("finish", "token_ids")
"""What a function may ask for beside the item and the text: why the completion ended, and its token ids."""


class Grader:
    """Judges by one spec. Not thread-safe (it owns an event loop for async functions).

    Construction imports the user's module and raises `ConfigError` when that fails. `grade` raises `ConfigError` when
    the function returns something that is no reward, and whatever else the function raises.
    """

    def __init__(self, spec: RewardSpec) -> None:
        self._spec = spec
        self._rules = [(re.compile(rule.pattern), rule.weight) for rule in spec.format_rules]
        self._runner: asyncio.Runner | None = None
        self._function: Callable[..., Any] | None = None
        if spec.function != "math":
            self._function = load_function(spec.function, KEY)
            self._accepted = _accepted_names(self._function, spec.function)

    def grade(self, item: PromptItem, text: str, info: Mapping[str, Any]) -> RewardResult:
        """Judge `text` as an answer to `item`. `info` reaches a user's function as far as that names it."""
        facts: dict[str, float] = {}
        if self._function is None:
            verdict = judge(item.answer, text)
            if verdict is Verdict.NO_GOLD:
                return RewardResult(None, reason="the question has no readable answer")
            parts = {"answer": self._worth(verdict)}
            facts = {"right": float(verdict is Verdict.RIGHT), "readable": float(verdict is not Verdict.UNREADABLE)}
        else:
            parts = self._by_function(self._function, item, text, info)
            if not parts:
                return RewardResult(None, reason=f"{self._spec.function} abstained")
        for number, (pattern, weight) in enumerate(self._rules, start=1):
            parts[f"format.{number}"] = weight if pattern.search(text) else 0.0
        return RewardResult(math.fsum(parts.values()), parts, facts)

    def _worth(self, verdict: Verdict) -> float:
        spec = self._spec
        return {Verdict.RIGHT: spec.right, Verdict.WRONG: spec.wrong}.get(verdict, spec.unreadable)

    def _by_function(
        self, function: Callable[..., Any], item: PromptItem, text: str, info: Mapping[str, Any]
    ) -> dict[str, float]:
        """Named parts; none for an abstention."""
        if self._accepted is not None:
            info = {name: value for name, value in info.items() if name in self._accepted}
        returned = function(item, text, **info)
        if inspect.isawaitable(returned):
            self._runner = self._runner or asyncio.Runner()
            returned = self._runner.run(_await(returned))
        if returned is None:
            return {}
        if isinstance(returned, Mapping) and returned:
            return {self._name(name): self._number(value, f"part {name!r}") for name, value in returned.items()}
        return {"reward": self._number(returned, "the result")}

    def _name(self, name: object) -> str:
        if not isinstance(name, str):
            raise self._breach(f"a part named {name!r}")
        return name

    def _number(self, value: object, what: str) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise self._breach(f"{value!r:.80} ({type(value).__name__}) as {what}")
        number = float(value)
        if not math.isfinite(number):
            raise self._breach(f"{number} as {what}")
        return number

    def _breach(self, returned: str) -> ConfigError:
        return ConfigError(
            f"reward function {self._spec.function} returned {returned}; it is called once per completion and returns "
            "one finite number (not a boolean), a mapping of part names to numbers, or None to abstain",
            KEY,
        )


async def _await(awaitable: Any) -> Any:
    return await awaitable


def _accepted_names(function: Callable[..., Any], reference: str) -> frozenset[str] | None:
    """Names of extra keyword arguments a function takes; None when it takes any."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in functions have none
        return frozenset()
    parameters = list(signature.parameters.values())
    try:
        signature.bind(None, "", **{p.name: None for p in parameters[2:] if p.name in INFO_NAMES})
    except TypeError as error:
        names = " and ".join(INFO_NAMES)
        raise ConfigError(
            f"reward function {reference} must be callable as f(item, text, **info), info being {names}: {error}", KEY
        ) from error
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(parameter.name for parameter in parameters[2:] if parameter.kind in kinds)
