"""`--calibrate RUN_DIR`: what a finished run tells a plan.

Lengths, prompts and reward times do not depend on the machine and always count. Rates do: they replace efficiency
factors only when the plan is for the kind of machine that the run was made on. Files are read as data, never run.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

from tithe.errors import ConfigError
from tithe.planner.factors import Factors, factor_names
from tithe.planner.hardware import CPU_NAME
from tithe.planner.request import PlanRequest
from tithe.planner.roofline import publish_s, train_s_per_token
from tithe.planner.step import plan_step


@dataclass(frozen=True)
class RunFigures:
    """Medians over a run's batches, means over its rollouts; None for what it did not record."""

    rollouts: int
    mean_new_tokens: float
    mean_prompt_tokens: float
    log_length_sigma: float
    train_s_per_token: float | None
    tok_per_s: float | None
    """Tokens drawn in a second of the engine's own work, prompts included, where the run counted it; else in a second
    of sampling, which on a shared lane holds the training beside it."""
    publish_s: float | None
    reward_s_per_rollout: float | None
    is_cpu: bool


def read_run(directory: str) -> RunFigures:
    """The figures of a run directory. `ConfigError` names what is missing."""
    run = Path(directory)
    rows = _metric_rows(run / "metrics.jsonl")
    lengths, prompts = _lengths(run / "pool.sqlite")
    if not lengths:
        raise ConfigError(f"--calibrate {run}: its pool holds no finished rollout", key="calibrate")
    mean_new, mean_prompt = fmean(lengths), fmean(prompts)
    logs = [math.log(max(1, n)) for n in lengths]
    tokens = mean_new + mean_prompt
    per_batch = _column(rows, "groups")
    batch = len(lengths) / max(1.0, len(per_batch))
    train, reward = _column(rows, "train_s"), _column(rows, "reward_s")
    return RunFigures(
        rollouts=len(lengths),
        mean_new_tokens=mean_new,
        mean_prompt_tokens=mean_prompt,
        log_length_sigma=pstdev(logs),
        train_s_per_token=median(train) / (batch * tokens) if train else None,
        tok_per_s=_engine_rate(rows) or _median(rows, "tok_per_s"),
        publish_s=_median(rows, "publish_s"),
        reward_s_per_rollout=median(reward) / batch if reward else None,
        is_cpu=_is_cpu(run / "run.json"),
    )


def calibrated(request: PlanRequest, factors: Factors, run: RunFigures) -> tuple[PlanRequest, Factors, dict[str, str]]:
    """Request and factors with a run's figures, and what was taken from it, by name."""
    source = f"a run of {run.rollouts:,} rollouts"
    new = min(max(1, round(run.mean_new_tokens)), request.context - 1)
    prompt = min(max(1, round(run.mean_prompt_tokens)), request.context - new)
    reward = run.reward_s_per_rollout if run.reward_s_per_rollout is not None else request.reward_s
    request = replace(request, new=new, prompt=prompt, reward_s=reward, length_sigma=run.log_length_sigma)
    taken: dict[str, str] = {"new_tokens": source, "prompt_tokens": source, "length_sigma": source}
    if run.is_cpu != (request.hardware.accelerator.name == CPU_NAME):
        return request, factors, taken
    values: dict[str, float] = {}
    if run.train_s_per_token:
        ratio = train_s_per_token(request, factors, request.hardware) / run.train_s_per_token
        for name in ("train_flops_moe" if request.spec.is_moe else "train_flops_dense", "train_flops_attention"):
            values[name] = getattr(factors, name) * ratio
        values["train_micro_s"] = factors.train_micro_s / ratio
    if run.publish_s:
        moving = publish_s(request, factors, request.hardware) - factors.publish_fixed_s
        values["publish_fixed_s"] = max(0.0, run.publish_s - moving)
    if run.tok_per_s:
        values |= _faster(factors, run.tok_per_s / plan_step(request, factors).decode_tok_per_s)
    return request, factors.updated(values), taken | dict.fromkeys(values, source)


def _faster(factors: Factors, ratio: float) -> dict[str, float]:
    """Every factor of sampling, so that it goes `ratio` times as fast."""
    shares = ("hbm_dense", "hbm_experts", "hbm_cache", "decode_flops", "prefill_flops_dense", "prefill_flops_moe")
    seconds = tuple(name for name in factor_names() if name.startswith("decode_") and name.endswith("_s"))
    values = {name: getattr(factors, name) * ratio for name in shares}
    return values | {name: getattr(factors, name) / ratio for name in seconds}


def _metric_rows(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--calibrate: cannot read {path}: {reason}", key="calibrate") from error
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"--calibrate: {path}:{number} is not JSON ({error})", key="calibrate") from error
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _lengths(path: Path) -> tuple[list[int], list[int]]:
    """Tokens of the completions and of their prompts, of every rollout that was not a failure."""
    query = (
        "SELECT r.n_tokens, LENGTH(g.prompt_tokens) / 4 FROM rollout r JOIN rollout_group g USING (group_id)"
        " WHERE r.cause IS NULL AND r.n_tokens > 0"
    )
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            rows = db.execute(query).fetchall()
    except sqlite3.Error as error:
        raise ConfigError(f"--calibrate: cannot read {path}: {error}", key="calibrate") from error
    return [int(n) for n, _ in rows], [int(n or 0) for _, n in rows]


def _column(rows: Iterable[dict[str, Any]], name: str) -> list[float]:
    found: list[Any] = [row.get(name) for row in rows]
    return [float(value) for value in found if type(value) in (int, float) and 0 < value < math.inf]


def _median(rows: Iterable[dict[str, Any]], name: str) -> float | None:
    values = _column(rows, name)
    return median(values) if values else None


def _engine_rate(rows: Iterable[dict[str, Any]]) -> float | None:
    """Tokens per second of the engine's own work; None where no row has all three counts, or nothing was drawn."""
    rates: list[float] = []
    for row in rows:
        drawn, decode, prefill = (_column([row], name) for name in ("generated_tok", "decode_s", "prefill_s"))
        if drawn and decode and "prefill_s" in row:  # a batch may find every prompt read already: 0 s
            rates.append(drawn[0] / (decode[0] + sum(prefill)))
    return median(rates) if rates else None


def _is_cpu(path: Path) -> bool:
    """Runs on accelerators name theirs."""
    try:
        machine = json.loads(path.read_text()).get("machine", {})
    except (OSError, ValueError, AttributeError):
        return True
    return not (isinstance(machine, dict) and machine.get("accelerator"))
