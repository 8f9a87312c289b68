"""From what the functions returned to one reward: weights, hard constraints, bounds, clipping."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tithe.errors import ConfigError
from tithe.rewards.spec import RewardResult, RewardSpec


@dataclass(frozen=True)
class Contribution:
    """What one function gives, in its own named parts, and whether its rule is met."""

    kind: Literal["rule", "shaping", "model"]
    parts: Mapping[str, float]
    is_met: bool = True


def compose(
    spec: RewardSpec,
    contributions: Mapping[str, Contribution],
    *,
    facts: Mapping[str, float] | None = None,
    reason: str = "",
    grader: str = "",
) -> RewardResult:
    """The sum of what is paid. Guidance (`model`) is paid only when every rule is met, so that no model's liking lifts
    a wrong answer over a right one; it is recorded all the same. Raises `ConfigError` for two parts of one name.

    >>> spec = RewardSpec(bounds=(0.0, 2.0))
    >>> rule = Contribution("rule", {"answer": 0.0}, is_met=False)
    >>> result = compose(spec, {"math": rule, "judge": Contribution("model", {"judge": 0.9})})
    >>> result.value, dict(result.facts)
    (-1.0, {'unpaid.judge': 0.9, 'raw': 0.0})
    """
    paid: dict[str, float] = {}
    known = dict(facts or {})
    is_met = all(contribution.is_met for contribution in contributions.values() if contribution.kind == "rule")
    _require_names(contributions)
    for contribution in contributions.values():
        if contribution.kind == "model" and not is_met:
            known |= {f"unpaid.{name}": value for name, value in contribution.parts.items()}
        else:
            paid |= contribution.parts
    value = raw = math.fsum(paid.values())
    if spec.bounds is not None:
        low, high = spec.bounds
        value = 2.0 * (min(max(value, low), high) - low) / (high - low) - 1.0
    if spec.clip is not None:
        value = min(max(value, spec.clip[0]), spec.clip[1])
    if spec.bounds is not None or spec.clip is not None:
        known["raw"] = raw
    return RewardResult(value, paid, known, reason, grader=grader)


def _require_names(contributions: Mapping[str, Contribution]) -> None:
    """Each part has a name of its own, or one of two would be lost."""
    counts = Counter(name for contribution in contributions.values() for name in contribution.parts)
    twice = next((name for name, count in counts.items() if count > 1), None)
    if twice is not None:
        raise ConfigError(
            f"two parts of the reward are called {twice!r}: give the one of reward.parts another name", "reward.parts"
        )
