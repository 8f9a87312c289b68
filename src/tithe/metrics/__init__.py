"""Metrics: where a run's numbers go and how they are summed up.

`JsonlSink` is the record, `TensorBoardSink` an optional copy, `FanOut` gives rows to all of them and keeps their
failures out of the loop. `METRICS` is the table of names with labels and units. `bootstrap_ci` gives 95 % intervals
over questions, `RunningStats` and `WindowRate` sum up streams. Numpy only.
"""

from tithe.metrics.intervals import Interval, bootstrap_ci
from tithe.metrics.jsonl import JsonlSink, MetricLog, MetricRow, finite_number, is_step, iter_numbers, read_rows
from tithe.metrics.names import FAILURE_PREFIX, METRICS, MetricInfo, RowKind, row_kind
from tithe.metrics.sinks import FanOut, TensorBoardSink
from tithe.metrics.stats import RunningStats, WindowRate

__all__ = [
    "FAILURE_PREFIX",
    "METRICS",
    "FanOut",
    "Interval",
    "JsonlSink",
    "MetricInfo",
    "MetricLog",
    "MetricRow",
    "RowKind",
    "RunningStats",
    "TensorBoardSink",
    "WindowRate",
    "bootstrap_ci",
    "finite_number",
    "is_step",
    "iter_numbers",
    "read_rows",
    "row_kind",
]
