"""The answer of `tithe simulate`: one record with units in its names, and a table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tithe.errors import UserError
from tithe.simulator.outcome import Outcome
from tithe.simulator.scenario import Scenario
from tithe.simulator.sweep import Place, Sweep, on_copies, run_sweep, throughput
from tithe.simulator.world import simulate
from tithe.staleness import Bounds

SCHEMA = 1
"""Of the JSON form; a change of meaning raises it."""

ALWAYS = (
    (
        "the rules of staleness, the lane's order (jobs first in, first out; one tick between two jobs) and continuous "
        "batching are those of the code; the random draws of rollouts are the same in every setting"
    ),
    "KV memory is not a limit of its own: give the sequences that fit as in-flight sequences",
    "evaluations are left out; rates leave out the first M + 1 batches, while the pipeline fills",
)


@dataclass(frozen=True)
class Answer:
    """A setting, the synchronous run beside it, and the sweep if one was asked for."""

    outcome: Outcome
    sync: Outcome
    sweep: Sweep | None
    source: str
    assumptions: tuple[str, ...]

    @property
    def speed_over_sync(self) -> float:
        """Throughput over that of the synchronous run on the same machines."""
        return throughput(self.outcome) / throughput(self.sync)

    def record(self) -> dict[str, Any]:
        """As JSON: docs/simulator.md."""
        found: dict[str, Any] = {
            "schema": SCHEMA,
            "source": self.source,
            "setting": self.outcome.record(),
            "synchronous": self.sync.record(),
            "speed_over_sync_ratio": self.speed_over_sync,
            "assumptions": [*self.assumptions, *ALWAYS],
        }
        if self.sweep is not None:
            found["sweep"] = [_brief(outcome, self.sync) for outcome in self.sweep.outcomes]
            found["skipped_settings"] = self.sweep.skipped
            found["best"] = {**_brief(self.sweep.best, self.sync), "reason": self.sweep.reason}
        return found

    def text(self) -> str:
        """For people."""
        lines = [f"costs and rollouts: {self.source}", "", *_details(self.outcome), ""]
        shown = [self.outcome] if self.sweep is None else list(self.sweep.outcomes)
        is_there = any(outcome.scenario == self.sync.scenario for outcome in shown)
        outcomes = shown if is_there else [self.sync, *shown]
        lines += _table([_cells(_brief(outcome, self.sync)) for outcome in outcomes])
        if self.sweep is not None:
            best = _brief(self.sweep.best, self.sync)
            keys = (
                f"rl.max_policy_update_lag={best['max_policy_update_lag_batches']}",
                f"rl.sync_every={best['sync_every_batches']}",
                f"engine.max_running={self.sweep.best.scenario.max_running}",
            )
            lines += ["", f"best: {' '.join(keys)} on {best['layout']}: {self.sweep.reason}"]
            if self.sweep.skipped:
                lines.append(f"{self.sweep.skipped} combinations left out: sync_every must be at most max(1, lag)")
        lines += ["", "assumed:", *(f"  - {text}" for text in (*self.assumptions, *ALWAYS))]
        return "\n".join(lines)


def answer(
    scenario: Scenario,
    axes: Mapping[str, Sequence[str]],
    *,
    source: str,
    assumptions: Sequence[str] = (),
    place: Place = on_copies,
) -> Answer:
    """Simulate a setting, its synchronous twin, and what the axes ask for. `UserError` when nothing takes any time."""
    outcome = simulate(scenario)
    twin = synchronous(scenario)
    sync = outcome if scenario == twin else simulate(twin)
    if min(outcome.steady_s, sync.steady_s) <= 0:
        raise UserError(
            "no cost and no wait is above 0, so nothing takes any time: give --costs, tick_fixed_s=0.02 say"
        )
    sweep = run_sweep(scenario, axes, place) if axes else None
    return Answer(outcome, sync, sweep, source, tuple(assumptions))


def synchronous(scenario: Scenario) -> Scenario:
    """The same run with every bound at 0."""
    rules = Bounds(scenario.bounds.batch_rollouts, scenario.bounds.group_size, 0, 0, 1)
    return replace(scenario, bounds=rules, buffer=2**31, on_publish="finish")


def _brief(outcome: Outcome, sync: Outcome) -> dict[str, Any]:
    record = outcome.record()
    keys = (
        "mode",
        "layout",
        "max_policy_update_lag_batches",
        "sync_every_batches",
        "in_flight_sequences",
        "step_s",
        "trained_rollouts_per_s",
        "trained_tok_per_s",
        "idle_frac",
        "age_mean_batches",
        "groups_dropped_stale",
    )
    return {
        **{key: record[key] for key in keys},
        "rollouts_per_s_per_unit": throughput(outcome),
        "speed_over_sync_ratio": throughput(outcome) / throughput(sync),
    }


_HEAD = ("mode", "layout", "lag", "sync", "in flight", "step s", "rollouts/s", "× sync", "idle", "age", "dropped")


def _cells(brief: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        str(brief["mode"]),
        str(brief["layout"]),
        str(brief["max_policy_update_lag_batches"]),
        str(brief["sync_every_batches"]),
        str(brief["in_flight_sequences"]),
        f"{brief['step_s']:.3g}",
        f"{brief['trained_rollouts_per_s']:.3g}",
        f"{brief['speed_over_sync_ratio']:.2f}",
        f"{brief['idle_frac']:.0%}",
        f"{brief['age_mean_batches']:.2f}",
        str(brief["groups_dropped_stale"]),
    )


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in (_HEAD, *rows)) for i in range(len(_HEAD))]
    lines: list[str] = []
    for row in (_HEAD, *rows):
        cells = [cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines


def _details(outcome: Outcome) -> list[str]:
    record = outcome.record()
    lines = [
        f"{record['mode']} on {record['layout']}: {record['batches']} batches of {record['batch_rollouts']} rollouts",
        (
            f"  a step takes {record['step_s']:.3g} s: waiting {record['trainer_wait_s_per_step']:.3g}, training "
            f"{record['train_s_per_step']:.3g}, publishing {record['publish_s_per_step']:.3g}"
        ),
    ]
    for lane, shares in record["utilisation"].items():
        parts = [f"{name.removesuffix('_frac')} {share:.0%}" for name, share in shares.items() if share >= 0.0005]
        lines.append(f"  {lane}: {', '.join(parts)}")
    held = [f"{name} {seconds:.3g} s" for name, seconds in record["admission_held_back_s"].items() if seconds]
    lines.append(f"  admission held back by: {', '.join(held) or 'nothing'}")
    ages = [f"{age}: {share:.0%}" for age, share in record["age_histogram_frac"].items()]
    lines.append(f"  ages in batches: {', '.join(ages)}; dropped groups: {record['groups_dropped_stale']}")
    if record["reward_worker_busy_frac"] is not None:
        lines.append(f"  reward workers: {record['reward_worker_busy_frac']:.0%} busy")
    lines.append(f"  bound by: {record['bottleneck']}")
    if outcome.crashes:
        lines.append(f"  crashes: {outcome.crashes}, groups trained again: {record['groups_replayed']}")
    return lines
