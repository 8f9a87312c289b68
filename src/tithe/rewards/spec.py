"""What is paid for, as data that can be sent to another process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tithe.errors import Failure
from tithe.rewards.diversity import unpenalised

if TYPE_CHECKING:  # workers do without the configuration's schema
    from tithe.config.sampling import RewardSettings
    from tithe.types import PromptItem, Rollout

KEY = "reward.function"

FACT = "fact."
"""Prefix under which `RewardResult.facts` are kept beside the paid parts of a rollout."""


@dataclass(frozen=True)
class FormatRule:
    """A regular expression, searched in the text, and what one match or more is worth."""

    pattern: str
    weight: float


MATH, SYMBOLIC_MATH = "math", "symbolic_math"

BUILT_IN = (MATH, SYMBOLIC_MATH)
"""Functions that compare with the answer column and give verdicts, which `right`, `wrong` and `unreadable` pay."""


MODEL = "model:"
"""Begins the name of a reward model; its directory follows."""


def is_model(function: str) -> bool:
    """Whether a function of a spec is a reward model, which is asked in the main process and not by workers."""
    return function.startswith(MODEL)


@dataclass(frozen=True)
class ModelScore:
    """What a reward model said of one completion; `grader` names it with a version.

    >>> ModelScore(0.25, "model@1a2b3c4d").value
    0.25
    """

    value: float
    grader: str


@dataclass(frozen=True)
class RewardModel:
    """A reward model as the rewards know it. `ask` never blocks; its future fails with `RolloutFailure`, or holds a
    number that may be NaN."""

    ask: Callable[[PromptItem, str], Future[float]]
    grader: str


@dataclass(frozen=True)
class PartSpec:
    """One more function beside the main one. `kind`: a `rule` is a hard constraint, met when it gives more than 0;
    `shaping` is paid always; `model` is guidance, paid only where the main function and every rule are met."""

    name: str
    function: str
    kind: Literal["rule", "shaping", "model"] = "shaping"
    weight: float = 1.0


@dataclass(frozen=True)
class RewardSpec:
    r"""Which functions judge, and what their verdicts are worth.

    `bounds` maps the sum of all parts from this range to [-1, 1]; `clip` cuts what comes out.

    >>> RewardSpec(format_rules=(FormatRule(r"\\boxed", 0.1),)).is_simple
    False
    """

    function: str = MATH
    right: float = 1.0
    wrong: float = 0.0
    unreadable: float = -0.5
    format_rules: tuple[FormatRule, ...] = ()
    parts: tuple[PartSpec, ...] = ()
    weights: Mapping[str, float] = field(default_factory=dict)
    bounds: tuple[float, float] | None = None
    clip: tuple[float, float] | None = None

    @property
    def is_simple(self) -> bool:
        """Whether judging calls nobody's code and searches nobody's pattern: what of it is linear in the text may run
        in this process."""
        parts_are_models = all(is_model(part.function) for part in self.parts)
        return (self.function in BUILT_IN or is_model(self.function)) and not self.format_rules and parts_are_models

    @property
    def models(self) -> tuple[str, ...]:
        """The reward models it names, each once."""
        functions = (self.function, *(part.function for part in self.parts))
        return tuple(dict.fromkeys(function for function in functions if is_model(function)))

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` reads them back."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RewardSpec:
        """The inverse of `to_json`."""
        read = dict(values)
        read["format_rules"] = tuple(FormatRule(**rule) for rule in values["format_rules"])
        read["parts"] = tuple(PartSpec(**part) for part in values["parts"])
        for name in ("bounds", "clip"):
            read[name] = None if values[name] is None else tuple(values[name])
        return cls(**read)


@dataclass(frozen=True)
class RewardResult:
    """One judgement. `value` is the sum of `parts`, or None for an abstention, which is never paid and never counted in
    a baseline: `reason` says why, and `failure` is set when the judge failed rather than declined. `facts` are recorded
    beside the parts and not paid: `right` and `readable` (0 or 1) under the built-in functions, `raw` (the sum of the
    parts) where that was mapped or cut, `unpaid.NAME` for guidance withheld. `grader` names who judged, with a version.

    >>> RewardResult(1.1, {"answer": 1.0, "format.1": 0.1}, {"right": 1.0, "readable": 1.0}).record()
    {'answer': 1.0, 'format.1': 0.1, 'fact.right': 1.0, 'fact.readable': 1.0}
    """

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    failure: Failure | None = None
    grader: str = ""
    seconds: float = 0.0
    """How long judging took, counted from its start."""

    def timed(self, seconds: float) -> RewardResult:
        """The same with how long it took; a copy field by field, which costs a third of `dataclasses.replace`."""
        return RewardResult(self.value, self.parts, self.facts, self.reason, self.failure, self.grader, seconds)

    def record(self) -> dict[str, float]:
        """Parts and facts in one mapping, as a rollout keeps them."""
        return {**self.parts, **{FACT + name: value for name, value in self.facts.items()}}


_Function = TypeVar("_Function", bound=Callable[..., Any])


def weighted(**weights: float) -> Callable[[_Function], _Function]:
    """Say what the named parts of a reward function are worth: its reward is the sum of weight times part, and 1 is the
    weight of a part that is not named. `reward.weights` of a run takes precedence.

    >>> weighted(brevity=0.1)(lambda item, text: {"right": 1.0, "brevity": 0.5}).weights
    {'brevity': 0.1}
    """

    def mark(function: _Function) -> _Function:
        function.__dict__["weights"] = dict(weights)
        return function

    return mark


def prepared(prepare: Callable[[], object]) -> Callable[[_Function], _Function]:
    """Have `prepare` called once in each worker before a reward function's first text, outside `reward.timeout_s`. What
    it raises refuses the run.

    >>> prepared(dict)(lambda item, text: 1.0).prepare()
    {}
    """

    def mark(function: _Function) -> _Function:
        function.__dict__["prepare"] = prepare
        return function

    return mark


def build_reward(
    settings: RewardSettings, shaping: Literal["function_validation", "none"] = "function_validation"
) -> RewardSpec:
    """The spec of a configuration's `reward` section under `rl.reward_shaping`; without shaping an unreadable answer is
    worth what a wrong one is, and format rules and shaping parts add nothing. The functions
    themselves are loaded by the workers, not here."""
    shaped = shaping == "function_validation"
    rules = tuple(FormatRule(rule.pattern, rule.weight) for rule in settings.format_rules)
    parts = tuple(PartSpec(part.name, part.function, part.kind, part.weight) for part in settings.parts)
    return RewardSpec(
        function=settings.function,
        right=settings.right,
        wrong=settings.wrong,
        unreadable=settings.unreadable if shaped else settings.wrong,
        format_rules=rules if shaped else (),
        parts=tuple(part for part in parts if shaped or part.kind != "shaping"),
        weights=dict(settings.weights or {}),
        bounds=settings.normalise if isinstance(settings.normalise, tuple) else None,
        clip=settings.clip,
    )


def is_readable(rollout: Rollout) -> bool:
    """Whether a rollout's answer could be read. A function that states no such fact reads everything it scores."""
    return rollout.reward is not None and rollout.reward_parts.get(FACT + "readable", 1.0) > 0


def score_of(rollout: Rollout) -> float:
    """What a rollout counts in an evaluation and in a pass rate: 1 or 0 where right and wrong are known, else its
    reward without the charge for likeness. A failed or abstained one counts 0."""
    return rollout.reward_parts.get(FACT + "right", unpenalised(rollout) or 0.0)
