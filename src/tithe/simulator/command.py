"""The command `tithe simulate`: from texts to an answer. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tithe.config import RunConfig, load_config, load_run
from tithe.errors import UserError
from tithe.pool import Curriculum
from tithe.simulator.answer import Answer, answer
from tithe.simulator.costs import LaneCosts, PublishCosts
from tithe.simulator.draws import Clipped, Distribution, Empirical, parse_distribution
from tithe.simulator.measured import measure_run
from tithe.simulator.planned import Plan, plan_of
from tithe.simulator.scenario import Scenario, Workload
from tithe.simulator.settings import scenario_of, scenario_of_run
from tithe.simulator.sweep import Place, on_copies, parse_axis, parse_split

DISTRIBUTIONS = {
    "prompt_tokens": "--prompt-tokens",
    "new_tokens": "--new-tokens",
    "turns": "--turns",
    "tool_s": "--tool-s",
    "tool_tokens": "--tool-tokens",
    "reward_s": "--reward-s",
    "pass_rate": "--pass-rate",
}
"""Field of `Workload` → its option."""

MAX_STEPS = 100_000


@dataclass(frozen=True)
class Options:
    """What the command line gives besides the target. None or empty: not given."""

    steps: int = 60
    seed: int = 0
    split: str | None = None
    costs: str | None = None
    hardware: str | None = None
    model: str | None = None
    base: str = "published"
    distributions: Mapping[str, str | None] | None = None
    prompts: int = 0
    sweep: Sequence[str] = ()
    failure_rate: float | None = None
    crash_hours: float | None = None
    restart_s: float = 60.0


@dataclass(frozen=True)
class _Start:
    """A scenario on one shared base, where its figures come from, and how it is put on GPUs."""

    scenario: Scenario
    source: str
    notes: tuple[str, ...]
    place: Place = on_copies


def simulate_target(target: str, overrides: Sequence[str], options: Options) -> Answer:
    """Simulate a run directory or a run file. Raises `UserError` that names the option or key."""
    _check(options)
    split = None if options.split is None else parse_split(options.split)
    axes = dict(parse_axis(text) for text in options.sweep)
    is_run = Path(target).is_dir()
    cfg = (load_run if is_run else load_config)(target, overrides)
    start = _of_run(Path(target), cfg, options) if is_run else _of_file(cfg, options)
    failures = start.scenario.failures
    if options.failure_rate is not None:
        failures = replace(failures, rollout_rate=options.failure_rate)
    if options.crash_hours is not None:
        failures = replace(failures, crash_mean_s=3600 * options.crash_hours, restart_s=options.restart_s)
    scenario = start.place(replace(start.scenario, failures=failures), split)
    notes = [*start.notes, *_records(cfg, scenario), *_too_few(options.steps, scenario, axes)]
    return answer(scenario, axes, source=start.source, assumptions=notes, place=start.place)


def _too_few(steps: int, scenario: Scenario, axes: Mapping[str, Sequence[str]]) -> list[str]:
    oldest = max(scenario.bounds.max_age, *(int(lag) for lag in axes.get("lag", ())), 0)
    enough = 4 * (oldest + 1)
    return [f"{steps} batches are few for an age of {oldest}: rates need --steps {enough}"] if steps < enough else []


def _records(cfg: RunConfig, scenario: Scenario) -> list[str]:
    """What is said where the schedule follows prompts' pass rates."""
    if scenario.follows_pass_rates:
        return ["a prompt keeps its pass rate through the run: learning is not simulated"]
    if cfg.schedule.adaptive_samples is None and not Curriculum.of(cfg.schedule).is_on:
        return []
    left_out = "schedule.adaptive_samples, rest_batches and prompt_weights follow pass rates and are left out"
    return [f"{left_out}: give --prompts and --pass-rate to simulate them"]


def _check(options: Options) -> None:
    if not 1 <= options.steps <= MAX_STEPS:
        raise UserError(f"--steps = {options.steps}: give a whole number from 1 to {MAX_STEPS}")
    if options.failure_rate is not None and not 0 <= options.failure_rate <= 1:
        raise UserError(f"--failure-rate = {options.failure_rate:g}: give a share from 0 to 1")
    if options.prompts < 0:
        raise UserError(f"--prompts = {options.prompts}: give how many the task has, 0 for ever new ones")
    if options.crash_hours is not None and not options.crash_hours > 0:
        raise UserError(f"--crash-hours = {options.crash_hours:g}: give the mean hours between crashes, more than 0")
    if options.costs is not None and options.hardware is not None:
        raise UserError("--costs and --hardware both say what work costs: give one of them")
    if options.model is not None and options.hardware is None:
        raise UserError("--model is planned on hardware: add --hardware, such as --hardware 8xB200")
    if not 0 <= options.restart_s < math.inf:
        raise UserError(f"--restart-s = {options.restart_s:g}: give seconds, 0 or more")


def _given(options: Options) -> dict[str, Distribution]:
    texts = options.distributions or {}
    found = {name: parse_distribution(text, DISTRIBUTIONS[name]) for name, text in texts.items() if text is not None}
    rate = found.get("pass_rate")
    if rate is not None:
        if not options.prompts:
            raise UserError("--pass-rate belongs to prompts that come back: say with --prompts how many there are")
        found["pass_rate"] = Clipped(rate, 1.0)
    return found


def _with(workload: Workload, given: Mapping[str, Distribution]) -> Workload:
    changes: dict[str, Any] = dict(given)
    return replace(workload, **changes)


def _of_run(run_dir: Path, cfg: RunConfig, options: Options) -> _Start:
    """Lengths, waiting and costs as measured; a length that is given replaces all measured ones."""
    measured, given = measure_run(run_dir, load_run(run_dir)), _given(options)
    if options.prompts and measured.pass_rates:
        given.setdefault("pass_rate", Empirical.of(measured.pass_rates))
    known = Workload(pass_rate=given.get("pass_rate"), prompts=options.prompts)
    scenario, notes = scenario_of_run(cfg, measured, steps=options.steps, seed=options.seed, records=known), list[str]()
    groups = measured.groups
    prompts, lengths = [group.prompt_tokens for group in groups], [n for group in groups for n in group.new_tokens]
    if given.keys() & {"prompt_tokens", "new_tokens"}:
        drawn = replace(known, prompt_tokens=_spread(prompts), new_tokens=_spread(lengths))
        scenario = replace(scenario, workload=drawn)
    elif given.keys() & {"tool_s", "reward_s"}:
        notes.append("measured waiting outside the engine is replaced by the given --tool-s and --reward-s")
        apart = tuple(replace(group, outside_s=0.0) for group in groups)
        scenario = replace(scenario, workload=replace(known, measured=apart))
    elif scenario.reward_workers is not None:
        notes.append("measured waiting includes the queue for reward workers as it was; nobody queues for it again")
        scenario = replace(scenario, reward_workers=None, reward_timeout_s=None)
    scenario = replace(scenario, workload=_with(scenario.workload, given))
    source, notes = f"{measured.batches} batches of {run_dir.name}", [*measured.notes, *notes]
    if options.hardware is not None:
        plan = plan_of(cfg, options.model, options.hardware, options.base, prompt=_mean(prompts), new=_mean(lengths))
        return _planned(plan, scenario, f"rollouts of {source}; costs", notes)
    if options.costs is not None:
        return _Start(replace(scenario, costs=parse_costs(options.costs)), f"rollouts of {source}", tuple(notes))
    return _Start(scenario, f"measured on {source}", tuple(notes))


def _planned(plan: Plan, scenario: Scenario, source: str, notes: Sequence[str]) -> _Start:
    """On a plan's GPUs: what disk and processor took in a run is not theirs."""
    scenario = replace(scenario, lease_s=0.0, checkpoint_s=0.0)
    more = "costs are the planner's, with its default efficiency factors: `tithe plan` lists them"
    return _Start(scenario, f"{source} {plan.name}".strip(), (*notes, more), plan.place)


def _mean(values: Sequence[int]) -> int:
    return max(1, round(sum(values) / len(values)))


def _spread(values: Sequence[int]) -> Distribution:
    return Empirical.of([float(value) for value in values])


def _of_file(cfg: RunConfig, options: Options) -> _Start:
    if options.costs is None and options.hardware is None:
        raise UserError(
            "a run file says nothing of speed: add --hardware 8xB200 (planned), or --costs tick_fixed_s=0.02,"
            "train_s_per_token=0.001, or simulate the directory of a run"
        )
    given = _given(options)
    notes = [] if "prompt_tokens" in given else ["--prompt-tokens is not given: prompts of 64 tokens"]
    if "new_tokens" not in given:
        raise UserError("how long are completions? Give --new-tokens, such as lognormal:400,0.8")
    workload = _with(Workload(prompts=options.prompts), given)
    prompt, new = round(workload.prompt_tokens.mean), round(workload.new_tokens.mean)
    costs = LaneCosts() if options.costs is None else parse_costs(options.costs)
    scenario = scenario_of(cfg, costs, workload, steps=options.steps, seed=options.seed)
    if options.hardware is None:
        return _Start(scenario, "costs as given", tuple(notes))
    plan = plan_of(cfg, options.model, options.hardware, options.base, prompt=max(1, prompt), new=max(1, new))
    return _planned(plan, scenario, "", notes)


def parse_costs(text: str) -> LaneCosts:
    """``tick_fixed_s=0.02,publish_s=1`` → costs. `publish_s` is spent on the engine's lane. Raises `UserError`.

    >>> parse_costs("tick_fixed_s=0.5").tick_fixed_s
    0.5
    """
    names = [field.name for field in fields(LaneCosts) if field.name != "publish"]
    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        try:
            seconds = float(number)
        except ValueError:
            seconds = -1.0
        if name not in (*names, "publish_s") or not 0 <= seconds < float("inf"):
            allowed = ", ".join([*names, "publish_s"])
            raise UserError(f"--costs {part.strip()!r}: give NAME=SECONDS, seconds at least 0, of {allowed}")
        values[name] = seconds
    publish = PublishCosts(engine_s=values.pop("publish_s", 0.0))
    return LaneCosts(**values, publish=publish)
