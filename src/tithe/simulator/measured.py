"""What a run directory tells: lengths and waiting from the pool, costs from the metrics.

    lengths, prompts     of every trained group, as they are
    tick                 the engine's seconds of each batch (`decode_s` + `prefill_s`) fitted on the ticks and rows that
                         the batch must have taken: seconds = a · ticks + b · rows
    outside              of each group: admission to end, less the ticks until its last token
    training             `train_s` over rows;  publishing, checkpoints: means, because time adds up

A synchronous run tells all of it: its sampler works alone, and every batch begins at one instant, so that its ticks can
be counted again. Of an asynchronous run waiting cannot be told from queueing for the lane; what is assumed is in
`Measurement.notes`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import simpy

from tithe.config import RunConfig
from tithe.errors import ResumeError
from tithe.metrics import MetricRow, finite_number, read_rows
from tithe.pool import PoolReader
from tithe.simulator.costs import LaneCosts, PublishCosts
from tithe.simulator.engine import Engine, Request
from tithe.simulator.scenario import Measured

FIRST_BATCH = 2
"""The batch before it pays for warming up: its groups count, its times do not."""

_SQL = """
SELECT g.group_id, g.batch_serial, g.admitted_at_s, g.finished_at_s, g.pass_rate,
       LENGTH(g.prompt_tokens) / 4 AS prompt, r.sample, r.n_tokens, r.cause
FROM rollout_group g JOIN rollout r USING (group_id)
WHERE g.state = 'trained' ORDER BY g.batch_serial, g.group_id, r.sample
"""


@dataclass(frozen=True)
class Measurement:
    """What was read off a run, and what had to be assumed."""

    groups: tuple[Measured, ...]
    costs: LaneCosts
    lease_s: float
    between_s: float
    checkpoint_s: float
    failure_rate: float
    batches: int
    notes: tuple[str, ...]
    pass_rates: tuple[float, ...] = ()
    """Of the trained groups that were measured."""


@dataclass(frozen=True)
class TrainedGroup:
    """A trained group of the pool; `seconds` from its admission to its end."""

    serial: int
    seconds: float
    prompt: int
    lengths: tuple[int, ...]
    pass_rate: float | None = None


Batches = Mapping[int, Sequence[TrainedGroup]]
"""Trained groups by the serial of their batch."""


@dataclass(frozen=True)
class _Replay:
    """The ticks of one batch that an idle engine was given at once. `until` has, for each group, the ticks and rows up
    to its last token."""

    ticks: int
    rows: int
    until: tuple[tuple[int, int], ...]


def measure_run(run_dir: Path, cfg: RunConfig) -> Measurement:
    """Read a run's pool and metrics. Raises `ResumeError` when it has not trained enough batches."""
    rows, failure_rate = _read_pool(run_dir / "pool.sqlite")
    return measure(rows, _read_metrics(run_dir / "metrics.jsonl"), cfg, failure_rate=failure_rate)


def measure(
    rows: Sequence[TrainedGroup],
    metrics: Mapping[int, Mapping[str, float]],
    cfg: RunConfig,
    *,
    failure_rate: float = 0.0,
) -> Measurement:
    """From trained groups, and the metrics by serial, of a run under `cfg`. Raises `ResumeError` as `measure_run`."""
    serials = sorted({row.serial for row in rows if row.serial >= FIRST_BATCH and row.serial in metrics})
    if len(serials) < 2:
        raise ResumeError(f"the run has trained {len(serials)} batches after its first; a simulation needs 2 or more")
    first = [row for row in rows if row.serial < FIRST_BATCH]
    batches = {serial: [row for row in rows if row.serial == serial] for serial in serials}
    kept = {serial: metrics[serial] for serial in serials}
    notes: list[str] = []
    is_sync = cfg.rl.max_policy_update_lag == cfg.rl.max_sample_age == 0
    between_s = _between(metrics, serials)
    if is_sync:
        alone = _synchronous(first, batches, kept, cfg, between_s, notes)
    else:
        alone = _asynchronous(first, batches, kept, notes)
    trained_rows = sum(row.prompt + sum(row.lengths) for batch in batches.values() for row in batch)
    costs = LaneCosts(
        tick_fixed_s=alone.tick_s,
        prefill_s_per_token=alone.row_s,
        decode_s_per_sequence=alone.row_s,
        train_s_per_token=sum(alone.train_s.values()) / trained_rows,
        publish=PublishCosts(engine_s=fmean(row["publish_s"] for row in kept.values())),
    )
    saved = [row["checkpoint_s"] for row in metrics.values() if row["checkpoint_s"] > 0]
    checkpoint_s = fmean(saved) if saved else 0.0
    rates = tuple(row.pass_rate for row in rows if row.pass_rate is not None)
    return Measurement(
        alone.groups, costs, alone.lease_s, between_s, checkpoint_s, failure_rate, len(serials), tuple(notes), rates
    )


def _between(metrics: Mapping[int, Mapping[str, float]], serials: Sequence[int]) -> float:
    """Mean seconds of the train loop that are in no `step_s`, checkpoints and evaluations aside: metric rows."""
    gaps = [
        metrics[s]["t_s"] - metrics[s - 1]["t_s"] - metrics[s]["step_s"] - metrics[s]["checkpoint_s"]
        for s in serials
        if s - 1 in metrics and "t_s" in metrics[s] and "t_s" in metrics[s - 1] and "eval" not in metrics[s - 1]
    ]
    return max(0.0, fmean(gaps)) if gaps else 0.0


@dataclass(frozen=True)
class _Alone:
    """What each side takes when the other leaves the lane to it."""

    tick_s: float
    row_s: float
    train_s: Mapping[int, float]
    groups: tuple[Measured, ...]
    lease_s: float = 0.0


def _synchronous(
    first: Sequence[TrainedGroup],
    batches: Batches,
    metrics: Mapping[int, Mapping[str, float]],
    cfg: RunConfig,
    between_s: float,
    notes: list[str],
) -> _Alone:
    replays = {serial: _replay(batch, cfg) for serial, batch in batches.items()}
    tick_s, row_s = _fit_ticks(replays, batches, metrics, notes)
    pairs = [*zip(first, _replay(first, cfg).until, strict=True)]
    pairs += [pair for serial, batch in batches.items() for pair in zip(batch, replays[serial].until, strict=True)]
    groups = [
        Measured(row.prompt, row.lengths, max(0.0, row.seconds - ticks * tick_s - n_rows * row_s))
        for row, (ticks, n_rows) in pairs
    ]
    # groups begin with the publication, and the wait for them only after what comes between; a row tells the checkpoint
    # that was written before its batch
    waited = [
        metrics[serial]["wait_s"] + metrics[serial]["checkpoint_s"] + between_s - max(row.seconds for row in batch)
        for serial, batch in batches.items()
    ]
    trained = {serial: row["train_s"] for serial, row in metrics.items()}
    return _Alone(tick_s, row_s, trained, tuple(groups), max(0.0, fmean(waited)))


def _asynchronous(
    first: Sequence[TrainedGroup], batches: Batches, metrics: Mapping[int, Mapping[str, float]], notes: list[str]
) -> _Alone:
    notes.append(
        "the run is asynchronous: waiting for rewards and tools is taken as 0 unless it is given, and a tick costs by "
        "its rows alone; a synchronous run (rl.max_policy_update_lag=0) tells both"
    )
    rows = [*first, *(row for batch in batches.values() for row in batch)]
    groups = [Measured(row.prompt, row.lengths) for row in rows]
    return _Alone(0.0, _row_seconds(metrics, notes), _training_alone(metrics), tuple(groups))


# ------------------------------------------------------------------ reading


def _read_pool(path: Path) -> tuple[list[TrainedGroup], float]:
    with PoolReader(path) as reader:
        found = reader.query(_SQL)
    by_group: defaultdict[int, list[dict[str, object]]] = defaultdict(list)
    for row in found:
        by_group[int(row["group_id"])].append(row)
    prompts = [int(row["prompt"]) for row in found if row["prompt"]]
    if not prompts:
        raise ResumeError(f"{path} holds no trained group whose prompt is still there; nothing can be measured")
    usual = round(median(prompts))  # arrays of old groups are deleted
    rows = [
        TrainedGroup(
            serial=int(str(first["batch_serial"])),
            seconds=float(str(first["finished_at_s"])) - float(str(first["admitted_at_s"])),
            prompt=int(str(first["prompt"] or usual)),
            lengths=tuple(int(str(r["n_tokens"])) for r in members if int(str(r["n_tokens"])) > 0) or (1,),
            pass_rate=None if first["pass_rate"] is None else float(str(first["pass_rate"])),
        )
        for members in by_group.values()
        for first in members[:1]
    ]
    return rows, sum(row["cause"] is not None for row in found) / len(found)


def _read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """The numbers of each trained batch, those of its rollout row among them."""
    if not path.is_file():
        raise ResumeError(f"{path} is missing: the run has not trained a batch")
    merged: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for row in read_rows(path).rows:
        if row.get("kind") in ("train", "rollout"):
            merged[row["step"]] |= _numbers(row)
        elif row.get("kind") == "eval":
            merged[row["step"]]["eval"] = 1.0
    needed = {"train_s", "wait_s", "publish_s", "step_s"}
    return {step: {"checkpoint_s": 0.0, **row} for step, row in merged.items() if needed <= row.keys()}


def _numbers(row: MetricRow) -> dict[str, float]:
    found = {name: finite_number(value) for name, value in row.items()}
    return {name: value for name, value in found.items() if value is not None}


# ------------------------------------------------------------------ ticks


def _replay(batch: Sequence[TrainedGroup], cfg: RunConfig) -> _Replay:
    """What the engine did for a batch that was admitted at once."""
    env = simpy.Environment()
    asked: list[tuple[int, int]] = []

    class Asked(LaneCosts):
        """Keeps what each tick was made of."""

        def tick_s(self, *, prefill_tokens: int, sequences: int, context_tokens: int) -> float:  # noqa: ARG002
            asked.append((prefill_tokens, sequences))
            return 0.0

    engine = Engine(
        Asked(),
        max_running=cfg.engine.max_running,
        prefill_tokens=cfg.engine.prefill_tokens_per_tick,
        on_publish="finish",
    )
    requests = [
        [Request(g, s, 0, row.prompt, new, 0, env.event()) for s, new in enumerate(row.lengths)]
        for g, row in enumerate(batch)
    ]
    for group in requests:
        for request in group:
            engine.submit(request)
    until: dict[int, tuple[int, int]] = {}
    rows = 0
    while engine.has_work:
        count = engine.plan().count
        engine.apply(count)
        rows += asked[-1][0] + count * asked[-1][1]
        for g, group in enumerate(requests):
            if g not in until and all(request.done.triggered for request in group):
                until[g] = (engine.ticks, rows)
    return _Replay(engine.ticks, rows, tuple(until[g] for g in range(len(batch))))


def _fit_ticks(
    replays: Mapping[int, _Replay],
    batches: Batches,
    metrics: Mapping[int, Mapping[str, float]],
    notes: list[str],
) -> tuple[float, float]:
    """Seconds of a tick and of a row. Least squares without negative costs; batches far off the fit are left out."""
    points = [
        (float(replay.ticks), float(replay.rows), _engine_s(metrics[serial]))
        for serial, replay in replays.items()
        if _engine_s(metrics[serial]) > 0
    ]
    if not points:
        notes.append(
            "the metrics hold no engine times (decode_s): a tick is taken from the group that took least time for its "
            "tokens, so waiting may be counted as sampling"
        )
        fastest = min(
            row.seconds / ticks
            for serial, replay in replays.items()
            for row, (ticks, _) in zip(batches[serial], replay.until, strict=True)
        )
        return fastest, 0.0
    tick_s, row_s = _least_squares(points)
    residuals = [abs(y - tick_s * ticks - row_s * rows) for ticks, rows, y in points]
    bound = 4 * median(residuals)
    kept = [point for point, residual in zip(points, residuals, strict=True) if residual <= bound]
    return _least_squares(kept) if len(kept) >= 2 else (tick_s, row_s)


def _engine_s(row: Mapping[str, float]) -> float:
    return row.get("decode_s", 0.0) + row.get("prefill_s", 0.0)


def _least_squares(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """a, b ≥ 0 of y = a·ticks + b·rows."""
    tt = sum(t * t for t, _, _ in points)
    rr = sum(r * r for _, r, _ in points)
    tr = sum(t * r for t, r, _ in points)
    ty = sum(t * y for t, _, y in points)
    ry = sum(r * y for _, r, y in points)
    determinant = tt * rr - tr * tr
    if determinant > 1e-9 * tt * rr:
        a, b = (ty * rr - ry * tr) / determinant, (ry * tt - ty * tr) / determinant
        if a >= 0 and b >= 0:
            return a, b
        if b < 0:
            return ty / tt, 0.0
        return 0.0, ry / rr
    return ty / tt, 0.0


def _row_seconds(metrics: Mapping[int, Mapping[str, float]], notes: list[str]) -> float:
    rows = metrics.values()
    spent_s = sum(_engine_s(row) for row in rows)
    computed = sum(row.get("generated_tok", 0.0) + row.get("prefill_tok", 0.0) for row in rows)
    if spent_s > 0 and computed > 0:
        return spent_s / computed
    notes.append("the metrics hold no engine times (decode_s): a token costs what the sampler's speed says")
    speeds = [row["tok_per_s"] for row in rows if row.get("tok_per_s", 0.0) > 0]
    if not speeds:
        raise ResumeError("the run's metrics hold neither engine times nor a sampling speed")
    return 1.0 / median(speeds)


def _training_alone(metrics: Mapping[int, Mapping[str, float]]) -> dict[int, float]:
    """Training without the ticks between its micro-batches: at most what the lane's other work leaves of the time."""
    trained = sum(row["train_s"] for row in metrics.values())
    left = sum(row["step_s"] - row["publish_s"] - _engine_s(row) for row in metrics.values())
    share = min(1.0, left / trained) if trained > 0 and left > 0 else 1.0
    return {serial: share * row["train_s"] for serial, row in metrics.items()}
