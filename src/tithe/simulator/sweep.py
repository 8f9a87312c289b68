"""Many settings, one workload: which is best."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from tithe.errors import UserError
from tithe.simulator.outcome import Outcome
from tithe.simulator.scenario import Layout, Scenario
from tithe.simulator.world import simulate
from tithe.staleness import Bounds

AXES = ("lag", "sync_every", "in_flight", "split")
SHARED = "shared"
"""The value of the axis `split` that stands for one shared base."""
CLOSE = 0.03
"""Throughputs that differ by less than this share count as equal: then the fresher samples win."""
MAX_SETTINGS = 200


@dataclass(frozen=True)
class Sweep:
    """`outcomes` of every legal setting, in the order of the axes; `skipped` says how many were not legal."""

    outcomes: tuple[Outcome, ...]
    best: Outcome
    reason: str
    skipped: int


def parse_axis(text: str) -> tuple[str, list[str]]:
    """``lag=0,1,2`` → axis and values. Raises `UserError`.

    >>> parse_axis("lag=0,1")
    ('lag', ['0', '1'])
    """
    name, _, values = text.partition("=")
    parts = [part.strip() for part in values.split(",") if part.strip()]
    good = all((part == SHARED or is_split(part)) if name == "split" else part.isdecimal() for part in parts)
    if name not in AXES or not parts or not good:
        raise UserError(
            f"--sweep {text!r}: give one of {', '.join(AXES)} and its values, such as lag=0,1,2 or "
            "split=shared,6:2,4:4 (rollout : train copies, or GPUs with --hardware)"
        )
    return name, parts


def is_split(text: str) -> bool:
    """Whether a text is ``R:T``, two whole numbers from 1."""
    parts = text.split(":")
    return len(parts) == 2 and all(part.isdecimal() and int(part) > 0 for part in parts)


Place = Callable[[Scenario, tuple[int, int] | None], Scenario]
"""A scenario on rollout : train copies (or GPUs), or on one shared base."""


def on_copies(scenario: Scenario, split: tuple[int, int] | None) -> Scenario:
    """Copies of the base that cost alike."""
    return replace(scenario, layout=Layout() if split is None else Layout("separate", *split))


def parse_split(text: str) -> tuple[int, int]:
    """``3:1`` → (3, 1). Raises `UserError`."""
    if not is_split(text):
        raise UserError(f"--split = {text!r}: give rollout : train, such as 3:1")
    rollout, train = (int(part) for part in text.split(":"))
    return rollout, train


def settings_of(
    scenario: Scenario, axes: Mapping[str, Sequence[str]], place: Place = on_copies
) -> tuple[list[Scenario], int]:
    """Every legal combination, and how many were not. Raises `UserError` for too many, or none."""
    names = [name for name in AXES if axes.get(name)]
    combinations = list(product(*(axes[name] for name in names)))
    if len(combinations) > MAX_SETTINGS:
        raise UserError(f"--sweep asks for {len(combinations)} settings; give at most {MAX_SETTINGS}")
    made = [_changed(scenario, dict(zip(names, values, strict=True)), place) for values in combinations]
    legal = [one for one in made if one is not None]
    if not legal:
        raise UserError("--sweep has no legal setting: sync_every must be at most max(1, lag)")
    return legal, len(made) - len(legal)


def _changed(scenario: Scenario, values: Mapping[str, str], place: Place) -> Scenario | None:
    """The scenario with these values; None when `sync_every` and the lag do not go together."""
    before = scenario.bounds
    lag = int(values["lag"]) if "lag" in values else before.max_lag
    age = lag if "lag" in values else before.max_age
    sync_every = int(values.get("sync_every", before.sync_every))
    if "sync_every" not in values and "lag" in values:
        sync_every = min(sync_every, max(1, lag))
    if not 1 <= sync_every <= min(max(1, lag), age + 1):
        return None
    bounds = Bounds(before.batch_rollouts, before.group_size, lag, age, sync_every)
    follows = scenario.buffer >= before.max_outstanding  # the usual buffer grows with the age
    split = values.get("split")
    placed = scenario if split is None else place(scenario, None if split == SHARED else parse_split(split))
    return replace(
        placed,
        bounds=bounds,
        buffer=2**31 if follows else scenario.buffer,
        max_running=max(1, int(values.get("in_flight", scenario.max_running))),
    )


def run_sweep(scenario: Scenario, axes: Mapping[str, Sequence[str]], place: Place = on_copies) -> Sweep:
    """Simulate every legal setting and choose."""
    settings, skipped = settings_of(scenario, axes, place)
    outcomes = tuple(simulate(one) for one in settings)
    best, reason = choose(outcomes)
    return Sweep(outcomes, best, reason, skipped)


def throughput(outcome: Outcome) -> float:
    """Trained rollouts per second and GPU, or copy of the base where GPUs are not known."""
    return outcome.rollouts_per_s / outcome.scenario.layout.units


def choose(outcomes: Sequence[Outcome]) -> tuple[Outcome, str]:
    """The best setting and why: of those within 3 % of the highest throughput, the one with the smallest age bound;
    then the one whose samples are freshest, then the one with fewest sequences in flight."""
    most = max(throughput(outcome) for outcome in outcomes)
    close = [outcome for outcome in outcomes if throughput(outcome) >= (1 - CLOSE) * most]
    best = min(close, key=_preference)
    unit = "GPU" if best.scenario.layout.gpus else "copy of the base"
    reason = f"the highest throughput, {most:.3g} trained rollouts per second and {unit}"
    if throughput(best) < most:
        share = throughput(best) / most
        reason = f"{share:.1%} of {reason}, with fresher samples ({best.age_mean:.2f} batches old on average)"
    return best, reason


def _preference(outcome: Outcome) -> tuple[int, float, int, float]:
    scenario = outcome.scenario
    return scenario.bounds.max_age, round(outcome.age_mean, 1), scenario.max_running, -throughput(outcome)
