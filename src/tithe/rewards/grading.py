"""Judges one text: a built-in function or a user's, further parts, format rules. Runs inside a worker; what is linear
and calls nobody's code also runs in the main process (`grade_at_once`)."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import math
import numbers
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tithe.errors import ConfigError
from tithe.rewards.composition import Contribution, compose
from tithe.rewards.functions import load_function
from tithe.rewards.math_reward import Verdict, judge
from tithe.rewards.spec import (
    BUILT_IN,
    KEY,
    MATH,
    SYMBOLIC_MATH,
    ModelScore,
    PartSpec,
    RewardResult,
    RewardSpec,
    is_model,
)
from tithe.rewards.symbolic import Judgement, preload, verify, verify_plain

if TYPE_CHECKING:  # numpy is not needed to judge
    from tithe.types import PromptItem


INFO_NAMES = ("finish", "token_ids")
"""What a function may ask for beside the item and the text: why the completion ended, and its token ids."""

REASON: Final = "reason"
"""Name under which a function may return a few words beside its parts."""

VERSIONS: Final = {MATH: "4", SYMBOLIC_MATH: "3"}
"""Raised whenever a verdict of a built-in function can change; kept with every rollout that it judged."""

_REASONS: Final = {
    Verdict.RIGHT: "equal to the answer",
    Verdict.WRONG: "unequal to the answer",
    Verdict.UNREADABLE: "no answer is found",
    Verdict.NO_GOLD: "the question has no readable answer",
}


SCORES: Final = "model_scores"
"""Key of `info` under which the reward models' `[value, grader]` travel to a worker, by function. No user's function
sees it."""

_OWN_PART: Final = "model"
"""The part of a reward model that is the reward's main function."""


class Grader:
    """Judges by one spec. Not thread-safe (it owns an event loop for async functions).

    Construction imports the users' modules, calls what their functions have as `prepare`, and raises `ConfigError` when
    that fails. `grade` raises `ConfigError` when
    a function returns something that is no reward, and whatever else a function raises.
    """

    def __init__(self, spec: RewardSpec) -> None:
        self._spec = spec
        self._rules = [(re.compile(rule.pattern), rule.weight) for rule in spec.format_rules]
        self._runner = _Runner()
        is_own = spec.function in BUILT_IN or is_model(spec.function)
        self._main = None if is_own else _Function(spec.function, spec.weights, self._runner)
        parts = [part for part in spec.parts if not is_model(part.function)]
        self._parts = {part.name: _Function(part.function, {}, self._runner) for part in parts}
        self.version = _version(spec) if self._main is None else self._main.version
        if spec.function == SYMBOLIC_MATH:
            preload()

    def grade(self, item: PromptItem, text: str, info: Mapping[str, Any]) -> RewardResult:
        """Judge `text` as an answer to `item`. `info` reaches a user's function as far as that names it; what the
        reward models said is in it under `SCORES`."""
        scores = {function: ModelScore(*said) for function, said in info.get(SCORES, {}).items()}
        info = {name: value for name, value in info.items() if name != SCORES}
        grader = _graders(self.version, scores)
        facts: dict[str, float] = {}
        reason = ""
        if self._main is None:
            judged = _judge(self._spec, item, text, scores)
            if isinstance(judged, RewardResult):
                return judged
            main, facts, reason = judged
        else:
            parts, reason = self._main(item, text, info)
            if not parts:
                return RewardResult(None, reason=reason or f"{self._spec.function} abstained", grader=grader)
            main = Contribution("rule", parts, math.fsum(parts.values()) > 0)
        contributions = {"": main}
        for part in self._spec.parts:
            if is_model(part.function):
                contributions[part.name] = _guidance(part, scores)
                continue
            given, why = self._parts[part.name](item, text, info)
            if not given:
                return RewardResult(None, reason=why or f"{part.function} abstained", grader=grader)
            value = math.fsum(given.values())
            contributions[part.name] = Contribution(part.kind, {part.name: part.weight * value}, value > 0)
        for number, (pattern, weight) in enumerate(self._rules, start=1):
            found = {f"format.{number}": weight if pattern.search(text) else 0.0}
            contributions[f"format.{number}"] = Contribution("shaping", found)
        return compose(self._spec, contributions, facts=facts, reason=reason, grader=grader)


def grade_at_once(
    spec: RewardSpec, item: PromptItem, text: str, scores: Mapping[str, ModelScore] | None = None
) -> RewardResult | None:
    """The result where it is linear in the text and calls nobody's code; None for all else. From any thread. `scores`
    is what the spec's reward models said, by function."""
    if not spec.is_simple:
        return None
    scores = scores or {}
    if spec.function == SYMBOLIC_MATH:
        judgement = verify_plain(item.answer, text)
        if judgement is None:
            return None
        judged = _verdict(spec, judgement)
    else:
        judged = _judge(spec, item, text, scores)
    if isinstance(judged, RewardResult):
        return judged
    main, facts, reason = judged
    contributions = {"": main, **{part.name: _guidance(part, scores) for part in spec.parts}}
    return compose(spec, contributions, facts=facts, reason=reason, grader=_graders(_version(spec), scores))


def _guidance(part: PartSpec, scores: Mapping[str, ModelScore]) -> Contribution:
    """What a reward model adds as a part."""
    value = scores[part.function].value
    return Contribution(part.kind, {part.name: part.weight * value}, value > 0)


def _graders(version: str, scores: Mapping[str, ModelScore]) -> str:
    """Everybody who judged, each with a version."""
    return ", ".join(dict.fromkeys(name for name in (version, *(score.grader for score in scores.values())) if name))


def _judge(
    spec: RewardSpec, item: PromptItem, text: str, scores: Mapping[str, ModelScore]
) -> RewardResult | tuple[Contribution, dict[str, float], str]:
    """The verdict of a built-in function, or what a reward model said."""
    if is_model(spec.function):
        return Contribution("model", {_OWN_PART: scores[spec.function].value}), {}, ""
    if spec.function == SYMBOLIC_MATH:
        return _verdict(spec, verify(item.answer, text))
    verdict = judge(item.answer, text)
    return _verdict(spec, Judgement(verdict, _REASONS[verdict]))


def _verdict(spec: RewardSpec, judgement: Judgement) -> RewardResult | tuple[Contribution, dict[str, float], str]:
    """What a verdict is worth; an abstention is a result of its own."""
    verdict = judgement.verdict
    if verdict in (Verdict.NO_GOLD, Verdict.UNDECIDED):
        return RewardResult(None, reason=judgement.reason, grader=_version(spec))
    is_right = verdict is Verdict.RIGHT
    worth = spec.right if is_right else spec.wrong if verdict is Verdict.WRONG else spec.unreadable
    facts = {"right": float(is_right), "readable": float(verdict is not Verdict.UNREADABLE)}
    return Contribution("rule", {"answer": worth}, is_right), facts, judgement.reason


def _version(spec: RewardSpec) -> str:
    """Of a built-in function; a reward model brings its own."""
    return "" if is_model(spec.function) else f"{spec.function}@{VERSIONS[spec.function]}"


class _Runner:
    """One event loop for all async functions of a worker, made when the first needs it."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def __call__(self, awaitable: Any) -> Any:
        self._runner = self._runner or asyncio.Runner()
        return self._runner.run(_await(awaitable))


class _Function:
    """A user's function, checked: it returns a number, named parts, or None."""

    def __init__(self, reference: str, weights: Mapping[str, float], runner: _Runner) -> None:
        self._reference = reference
        self._runner = runner
        self._function = load_function(reference, KEY)
        if callable(prepare := getattr(self._function, "prepare", None)):
            prepare()
        self._accepted = _accepted_names(self._function, reference)
        self._weights: Mapping[str, float] = weights or getattr(self._function, "weights", {})
        self.version = f"{reference}@{_digest(self._function)}"

    def __call__(self, item: PromptItem, text: str, info: Mapping[str, Any]) -> tuple[dict[str, float], str]:
        """Named parts times their weights, none for an abstention; and the reason, if it states one."""
        if self._accepted is not None:
            info = {name: value for name, value in info.items() if name in self._accepted}
        returned = self._function(item, text, **info)
        if inspect.isawaitable(returned):
            returned = self._runner(returned)
        reason = ""
        if isinstance(returned, Mapping) and isinstance(returned.get(REASON), str):
            reason = returned[REASON]
            returned = {name: value for name, value in returned.items() if name != REASON} or None
        if returned is None:
            return {}, reason
        if isinstance(returned, Mapping) and returned:
            parts = {self._name(name): self._number(value, f"part {name!r}") for name, value in returned.items()}
            unknown = [name for name in self._weights if name not in parts]
            if unknown:
                raise ConfigError(
                    f"reward.weights names the part {unknown[0]!r}, which {self._reference} does not return; it "
                    f"returns {', '.join(parts)}",
                    "reward.weights",
                )
            weighed = {name: self._weights.get(name, 1.0) * value for name, value in parts.items()}
            return {
                name: self._number(value, f"part {name!r} times its weight") for name, value in weighed.items()
            }, reason
        return {"reward": self._number(returned, "the result")}, reason

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
            f"reward function {self._reference} returned {returned}; it is called once per completion and returns "
            f"one finite number (not a boolean), a mapping of part names to numbers (and {REASON!r} to a text), or "
            "None to abstain",
            KEY,
        )


def _digest(function: Callable[..., Any]) -> str:
    """Eight digits of the SHA-256 of the file that defines a function: its version."""
    try:
        path = inspect.getsourcefile(inspect.unwrap(function))
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:8] if path else "unknown"
    except (TypeError, OSError):  # a built-in, or an object with a __call__
        return "unknown"


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
