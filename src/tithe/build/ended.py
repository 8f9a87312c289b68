"""What `tithe resume` answers for a run that has nothing left to do."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tithe.build.full_hooks import FINAL_MODEL
from tithe.build.loops import METRICS_FILE
from tithe.config import RunConfig
from tithe.metrics import read_rows
from tithe.monitoring import build_report, summary_table
from tithe.orchestration import StopReason
from tithe.types import PromptItem

FINAL_ADAPTER = "adapter"
"""Folder of the trained adapter in a run directory."""


def ended(run_dir: Path, cfg: RunConfig, before: RunConfig) -> dict[str, object] | None:
    """The result of a finished run and how to extend it; None for a run that `cfg` (its own configuration `before`,
    with what the resume changes) has go on. Trains, publishes and evaluates nothing.

    A run ended by `run.max_steps` goes on with more of them, one ended by `run.patience` with another patience; one
    ended by a signal, a failure or `run.max_minutes`, which counts anew in every process, always does.
    """
    record = _record(run_dir)
    final = final_policy(run_dir, cfg)
    if record.get("status") != "finished" or not final.is_dir():
        return None
    steps, reason = int(record["steps"]), str(record["reason"])
    if reason == StopReason.MAX_STEPS and cfg.run.max_steps <= steps:
        more = f"run.max_steps={2 * steps}"
    elif reason == StopReason.PATIENCE and cfg.run.patience == before.run.patience:
        more = "run.patience=null"
    else:
        return None
    page = run_dir / "report.html"
    if cfg.monitor.report and not page.is_file():  # the run was killed after its last record
        build_report(run_dir)
    extend = f"tithe resume {shlex.quote(str(run_dir))} {more}"
    result: dict[str, object] = {
        "run_dir": str(run_dir),
        "steps": steps,
        "reason": reason,
        "report": str(page) if page.is_file() else None,
        "finished": True,
        "extend": extend,
    }
    certificate = run_dir / "parity.json"
    if certificate.is_file():
        result["max_abs_dlogp"] = json.loads(certificate.read_text(encoding="utf-8"))["max_abs_dlogp"]
    first, last = evaluations(run_dir)
    lines = [summary_table(first, last)] if first is not None else []
    lines.append(f"the run is finished ({reason} after batch {steps}); nothing was changed. Trained policy: {final}")
    lines.append(f"to go on: {extend}")
    return {**result, "text": "\n".join(lines)}


def final_policy(run_dir: Path, cfg: RunConfig) -> Path:
    """Where a run leaves the policy it trained: a PEFT folder, or a whole model's directory."""
    return run_dir / (FINAL_MODEL if cfg.model.train == "full" else FINAL_ADAPTER)


def question_texts(items: Iterable[PromptItem]) -> dict[str, str]:
    """Prompt id → what a report shows of it: the text, or the last message of a chat."""
    return {item.id: item.text or str(item.messages[-1]["content"]) for item in items}


def evaluations(run_dir: Path) -> tuple[Mapping[str, float] | None, Mapping[str, float] | None]:
    """The rows of a run's first and last evaluation; None for the ones that were not made."""
    rows = [dict(row) for row in read_rows(run_dir / METRICS_FILE).rows if "eval_sampled" in row]
    if not rows:
        return None, None
    return rows[0], rows[-1] if len(rows) > 1 else None


def _record(run_dir: Path) -> dict[str, Any]:
    """run.json; empty when there is none yet or it is no longer readable."""
    try:
        record = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
