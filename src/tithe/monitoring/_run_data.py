"""Reads a run directory, finished or not, into plain values. What is missing or broken becomes a remark, no error."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tithe.metrics import MetricRow, RowKind, finite_number, is_step, iter_numbers, read_rows
from tithe.monitoring._chart import Series

_LARGEST = 1e150  # a diverged run's numbers must not overflow when a chart adds them up


@dataclass(frozen=True)
class RunData:
    """What the report is made from. `remarks` says what is missing or could not be read."""

    directory: Path
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rows: list[MetricRow] = field(default_factory=list[MetricRow])
    evals: list[Mapping[str, float]] = field(default_factory=list[Mapping[str, float]])
    parity: Mapping[str, Any] | None = None
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    config_text: str = ""
    disk_bytes: Mapping[str, int] = field(default_factory=dict[str, int])
    remarks: list[str] = field(default_factory=list[str])

    @property
    def name(self) -> str:
        """The run's name, or its directory's."""
        return str(self.info.get("name") or self.setting("run.name") or self.directory.name)

    @property
    def steps(self) -> int:
        """Batches trained so far; a skipped one is tried again under its number."""
        trained = (row for row in self.rows if row.get("kind") == RowKind.TRAIN and not row.get("skipped"))
        return max((row["step"] for row in trained), default=0)

    @property
    def pays_scores(self) -> bool:
        """Whether held-out scores are rewards, because one of them lay outside 0 to 1."""
        return any(row.get("eval_is_reward") for row in self.evals)

    @property
    def before(self) -> Mapping[str, float] | None:
        """The first evaluation."""
        return self.evals[0] if self.evals else None

    @property
    def after(self) -> Mapping[str, float] | None:
        """The last evaluation, when there is more than one."""
        return self.evals[-1] if len(self.evals) > 1 else None

    def setting(self, key: str) -> Any:
        """A value of the resolved configuration by its dotted key, or None."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def series(self, name: str, label: str = "") -> Series:
        """One metric over batches; a step told twice keeps its last value."""
        points: dict[int, float | None] = {}
        for row in self.rows:
            if name in row:
                value = finite_number(row[name])
                points[row["step"]] = None if value is None else min(_LARGEST, max(-_LARGEST, value))
        steps = sorted(points)
        return Series(label or name, steps, [points[step] for step in steps])

    def eval_series(self, name: str, label: str) -> Series:
        """One score over the evaluations, with its interval."""
        steps, ys, lo, hi = (
            [values.get(key) for values in self.evals] for key in ("step", name, f"{name}_lo", f"{name}_hi")
        )
        return Series(label, [float(step or 0) for step in steps], ys, lo, hi, markers=True)

    def total(self, name: str) -> float:
        """The sum of one metric over all rows."""
        return sum(finite_number(row.get(name)) or 0.0 for row in self.rows)


def load_run(directory: Path) -> RunData:
    """Read everything but the pool. Raises nothing for missing or broken files."""
    remarks: list[str] = []
    rows: list[MetricRow] = []
    metrics = directory / "metrics.jsonl"
    if metrics.is_file():
        log = read_rows(metrics)
        rows = log.rows
        if log.broken_lines:
            remarks.append(f"metrics.jsonl has {log.broken_lines} broken lines; they are left out.")
    else:
        remarks.append("metrics.jsonl is missing: no batch has been trained yet.")
    config_text, config = _load_config(directory / "config.yaml", remarks)
    return RunData(
        directory=directory,
        info=_load_json(directory / "run.json", "identity, times and memory are unknown", remarks) or {},
        rows=rows,
        evals=_load_evals(directory / "eval", rows, remarks),
        parity=_load_json(directory / "parity.json", "parity has not been certified", remarks),
        config=config,
        config_text=config_text,
        disk_bytes=_disk_use(directory),
        remarks=remarks,
    )


def _load_json(path: Path, meaning: str, remarks: list[str]) -> Mapping[str, Any] | None:
    if not path.is_file():
        remarks.append(f"{path.name} is missing: {meaning}.")
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        remarks.append(f"{path.name} cannot be read ({error}): {meaning}.")
        return None
    if not isinstance(value, dict):
        remarks.append(f"{path.name} is not a JSON object: {meaning}.")
        return None
    return value


def _load_config(path: Path, remarks: list[str]) -> tuple[str, Mapping[str, Any]]:
    if not path.is_file():
        remarks.append("config.yaml is missing: the resolved configuration is unknown.")
        return "", {}
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = None
    if not isinstance(value, dict):
        remarks.append("config.yaml is not a YAML mapping; it is shown as text.")
        return text, {}
    return text, value


def _load_evals(directory: Path, rows: list[MetricRow], remarks: list[str]) -> list[Mapping[str, float]]:
    """Evaluations by step: the files, and for steps without a file the rows of metrics.jsonl. A file of a step beyond
    all rows is of batches that a resume has taken back.
    """
    found: dict[int, dict[str, float]] = {}
    last = max((row["step"] for row in rows), default=None)
    for row in rows:
        if row.get("kind") == RowKind.EVAL:
            found[row["step"]] = {"step": row["step"], **dict(iter_numbers(row))}
    for path in sorted(directory.glob("*.json")):
        values = _load_json(path, "this evaluation is left out", remarks)
        step = values.get("step") if values else None
        if values and is_step(step) and (last is None or step <= last):
            found.setdefault(step, {}).update({"step": step, **dict(iter_numbers(values))})
    if not found:
        remarks.append("No evaluation has been made yet.")
    return [found[step] for step in sorted(found)]


_RANK_PEAK = re.compile(r"rank_(\d+)_peak_rss_bytes")


def rank_peaks(memory: Mapping[str, Any]) -> dict[int, float]:
    """Rank → the largest memory that its process had, in bytes, as run.json tells them; empty for a run of one rank.

    >>> rank_peaks({"peak_pss_bytes": 5, "rank_1_peak_rss_bytes": 3, "rank_0_peak_rss_bytes": 4})
    {0: 4.0, 1: 3.0}
    """
    found: dict[int, float] = {}
    for name, value in memory.items():
        match, peak = _RANK_PEAK.fullmatch(str(name)), finite_number(value)
        if match is not None and peak is not None:
            found[int(match[1])] = peak
    return dict(sorted(found.items()))


_DISK_GROUPS = ("pool.sqlite", "checkpoints", "adapters", "adapter", "tb", "metrics.jsonl", "eval")


def _disk_use(directory: Path) -> dict[str, int]:
    """Bytes per part of the run directory; the pool counts with its write-ahead log."""
    sizes: dict[str, int] = {}
    for path in directory.rglob("*"):
        try:
            if path.is_symlink() or not path.is_file():
                continue
            size = path.stat().st_size
        except OSError:
            continue  # a live run deletes files while we look
        part = path.relative_to(directory).parts[0]
        if part.startswith("pool.sqlite"):
            part = "pool.sqlite"
        if part == "report.html":
            continue  # the page does not count itself, so that making it twice gives the same page
        part = part if part in _DISK_GROUPS else "other files"
        sizes[part] = sizes.get(part, 0) + size
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))
