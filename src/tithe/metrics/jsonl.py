"""``metrics.jsonl``: one JSON object per line, the record everything else is drawn from."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from tithe.metrics.names import row_kind

MetricRow = dict[str, Any]


@dataclass(frozen=True)
class MetricLog:
    """What a metrics file holds. `broken_lines` counts lines that are not a JSON object with a whole-number step:
    the torn end of a killed run, or a disk that was full.

    >>> MetricLog(rows=[{"step": 1, "kind": "train", "t_s": 0.5, "loss": 0.1}]).broken_lines
    0
    """

    rows: list[MetricRow] = field(default_factory=list[MetricRow])
    broken_lines: int = 0


def _parse_line(line: bytes) -> MetricRow | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and is_step(row.get("step")) else None


def is_step(value: object) -> TypeGuard[int]:
    """Whether a value read from a file can be a step: a whole number from 0 to 2^53."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 2**53


def finite_number(value: object) -> float | None:
    """A value read from a file as a number; None for text, booleans, null, NaN, infinity and what a float cannot hold.

    >>> finite_number(3), finite_number(True), finite_number("3"), finite_number(10**400)
    (3.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def read_rows(path: Path) -> MetricLog:
    """Read a metrics file, also while it is being written. Raises `OSError` when it cannot be opened."""
    rows: list[MetricRow] = []
    broken = 0
    for line in path.read_bytes().split(b"\n"):
        if not line.strip():
            continue
        row = _parse_line(line)
        if row is None:
            broken += 1
        else:
            rows.append(row)
    return MetricLog(rows, broken)


class JsonlSink:
    """Appends rows ``{"step", "kind", "t_s", name: number…}``; each row is with the operating system when `write`
    returns, so a killed process loses none.

    `t_s` is the run's own time in seconds: it goes on from the last row after a resume, and the pause between does
    not count. NaN and infinity have no JSON form: they become null, and the row says how many in ``non_finite``.

    Opening cuts a torn last line off. Not for use by two processes at once. `write` raises `OSError` when the disk is
    full; put the sink behind a `FanOut`, which keeps that out of the loop.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self.non_finite = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_end(path)
        self._file = path.open("ab", buffering=0)
        self._at_line_start = True
        self._clock = clock
        self._start_s = clock() - _last_time_s(path)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one row. The kind of the row follows from its names (`names.row_kind`)."""
        row: MetricRow = {"step": step, "kind": str(row_kind(values)), "t_s": round(self._clock() - self._start_s, 3)}
        bad = 0
        for name, value in values.items():
            number = int(value) if isinstance(value, int) else float(value)
            finite = math.isfinite(number)
            bad += not finite
            row[name] = number if finite else None
        if bad:
            row["non_finite"] = bad
            self.non_finite += bad
        self._append(json.dumps(row, allow_nan=False).encode() + b"\n")

    def _append(self, line: bytes) -> None:
        if not self._at_line_start:
            line = b"\n" + line  # the row before was torn by an error: never continue its line
        self._at_line_start = False
        view = memoryview(line)
        while view:
            view = view[self._file.write(view) :]
        self._at_line_start = True

    def truncate_after(self, step: int) -> int:
        """Drop rows with a step above `step` (a resume will write them again); returns how many. Atomic: the file is
        rewritten beside itself and renamed. Blocks for one fsync.
        """
        log = read_rows(self.path)
        kept = [row for row in log.rows if row["step"] <= step]
        dropped = len(log.rows) - len(kept)
        if dropped or log.broken_lines:
            fresh = self.path.with_name(self.path.name + ".tmp")
            with fresh.open("wb") as file:
                file.writelines(json.dumps(row).encode() + b"\n" for row in kept)
                file.flush()
                os.fsync(file.fileno())
            self._file.close()
            fresh.replace(self.path)
            self._file = self.path.open("ab", buffering=0)
            self._at_line_start = True
        self._start_s = self._clock() - _last_time_s(self.path)
        return dropped

    def close(self) -> None:
        """Flush to the disk and release the file. A second call does nothing."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()


def _cut_torn_end(path: Path) -> None:
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)


def _last_time_s(path: Path) -> float:
    times = [finite_number(row.get("t_s")) for row in read_rows(path).rows]
    return max((time_s for time_s in times if time_s is not None), default=0.0)


def iter_numbers(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The finite numbers of a row read back, without its step, kind and time.

    >>> list(iter_numbers({"step": 3, "kind": "train", "t_s": 1.0, "loss": 0.5, "kl_mean": None}))
    [('loss', 0.5)]
    """
    for name, value in row.items():
        number = None if name in {"step", "t_s"} else finite_number(value)
        if number is not None:
            yield name, number
