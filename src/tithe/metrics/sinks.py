"""Sinks beside the JSONL file: TensorBoard, and the fan-out that keeps every sink's failure out of the loop."""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tithe.metrics.names import row_kind
from tithe.types import MetricSink

_log = logging.getLogger(__name__)

TENSORBOARD_MISSING = (
    "TensorBoard output is off: the package tensorboardX is not installed. "
    "Install it with `pip install tensorboardX`, or set monitor.tensorboard=false. metrics.jsonl holds every value."
)


class TensorBoardSink:
    """Writes scalars named ``<kind>/<name>`` for TensorBoard. Without tensorboardX it says so once and stays silent.

    `first_step` is the last step that a resumed run keeps: TensorBoard hides what an earlier process wrote after it.
    """

    def __init__(
        self, directory: Path, *, first_step: int | None = None, note: Callable[[str], None] = _log.warning
    ) -> None:
        self._writer: Any = None
        try:
            module = importlib.import_module("tensorboardX")
        except ImportError:
            note(TENSORBOARD_MISSING)
            return
        # TensorBoard hides the step given here as well, whose row stays
        purged = None if first_step is None else first_step + 1
        self._writer = module.SummaryWriter(logdir=str(directory), purge_step=purged, flush_secs=20)

    @property
    def active(self) -> bool:
        """Whether anything is written."""
        return self._writer is not None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add one point per value. TensorBoard shows NaN as NaN."""
        if self._writer is None:
            return
        kind = row_kind(values)
        for name, value in values.items():
            self._writer.add_scalar(f"{kind}/{name}", float(value), step)

    def close(self) -> None:
        """Flush and release. A second call does nothing."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class FanOut:
    """Gives every row to all sinks. A failing sink is counted in `failures` and reported once; the others and the
    loop go on. Safe to call from several threads: rows reach all sinks in one order.

    >>> FanOut([]).write(1, {"loss": 0.5})
    """

    def __init__(self, sinks: Sequence[MetricSink], *, report: Callable[[str], None] = _log.warning) -> None:
        self.failures: dict[str, int] = {}
        self._sinks = tuple(sinks)
        self._report = report
        self._lock = threading.Lock()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record a row everywhere; never raises."""
        with self._lock:
            for sink in self._sinks:
                try:
                    sink.write(step, values)
                except Exception as error:  # noqa: BLE001 - a metric sink must never end a run
                    self._count(sink, error)

    def close(self) -> None:
        """Close every sink; never raises."""
        with self._lock:
            for sink in self._sinks:
                try:
                    sink.close()
                except Exception as error:  # noqa: BLE001 - a metric sink must never end a run
                    self._count(sink, error)

    def _count(self, sink: MetricSink, error: Exception) -> None:
        name = type(sink).__name__
        self.failures[name] = self.failures.get(name, 0) + 1
        if self.failures[name] == 1:
            self._report(
                f"{name} failed and is skipped for this row ({type(error).__name__}: {error}). The run goes on."
            )
