"""What is paid for, as data that can be sent to another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tithe.errors import Failure

if TYPE_CHECKING:  # workers do without the configuration's schema
    from tithe.config.sampling import RewardSettings
    from tithe.types import Rollout

KEY = "reward.function"

FACT = "fact."
"""Prefix under which `RewardResult.facts` are kept beside the paid parts of a rollout."""


@dataclass(frozen=True)
class FormatRule:
    """A regular expression, searched in the text, and what one match or more is worth."""

    pattern: str
    weight: float


@dataclass(frozen=True)
class RewardSpec:
    r"""Which function judges, and what its verdicts are worth.

    >>> RewardSpec(format_rules=(FormatRule(r"\\boxed", 0.1),)).is_plain_math
    False
    """

    function: str = "math"
    right: float = 1.0
    wrong: float = 0.0
    unreadable: float = -0.5
    format_rules: tuple[FormatRule, ...] = ()

    @property
    def is_plain_math(self) -> bool:
        """Whether judging is linear in the text and calls nobody's code, so that it may run in this process."""
        return self.function == "math" and not self.format_rules

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` reads them back."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RewardSpec:
        """The inverse of `to_json`."""
        scalars: dict[str, Any] = {name: value for name, value in values.items() if name != "format_rules"}
        return cls(**scalars, format_rules=tuple(FormatRule(**rule) for rule in values["format_rules"]))


@dataclass(frozen=True)
class RewardResult:
    """One judgement. `value` is the sum of `parts`, or None for an abstention, which is never paid and never counted in
    a baseline: `reason` says why, and `failure` is set when the judge failed rather than declined. `facts` are recorded
    beside the parts and not paid: `right` and `readable` (0 or 1) under the math reward.

    >>> RewardResult(1.1, {"answer": 1.0, "format.1": 0.1}, {"right": 1.0, "readable": 1.0}).record()
    {'answer': 1.0, 'format.1': 0.1, 'fact.right': 1.0, 'fact.readable': 1.0}
    """

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    failure: Failure | None = None

    def record(self) -> dict[str, float]:
        """Parts and facts in one mapping, as a rollout keeps them."""
        return {**self.parts, **{FACT + name: value for name, value in self.facts.items()}}


def build_reward(
    settings: RewardSettings, shaping: Literal["function_validation", "none"] = "function_validation"
) -> RewardSpec:
    """The spec of a configuration's `reward` section under `rl.reward_shaping`; without shaping an unreadable answer is
    worth what a wrong one is, and format rules add nothing. The function itself is loaded by the workers, not here."""
    shaped = shaping == "function_validation"
    rules = tuple(FormatRule(rule.pattern, rule.weight) for rule in settings.format_rules)
    return RewardSpec(
        function=settings.function,
        right=settings.right,
        wrong=settings.wrong,
        unreadable=settings.unreadable if shaped else settings.wrong,
        format_rules=rules if shaped else (),
    )


def is_readable(rollout: Rollout) -> bool:
    """Whether a rollout's answer could be read. A function that states no such fact reads everything it scores."""
    return rollout.reward is not None and rollout.reward_parts.get(FACT + "readable", 1.0) > 0


def score_of(rollout: Rollout) -> float:
    """What a rollout counts in an evaluation: 1 or 0 where right and wrong are known, else its reward. A failed or
    abstained one counts 0."""
    return rollout.reward_parts.get(FACT + "right", rollout.reward or 0.0)
