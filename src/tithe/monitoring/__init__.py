"""Monitoring: listeners over metric rows, and what is shown of a run.

`ProgressView` and `Alarms` are metric sinks; `summary_table` is the table before → after for the terminal;
`build_report` writes one self-contained page from a run directory, finished or not. Nothing here acts on a run.
"""

from tithe.monitoring.alarms import Alarm, AlarmKind, AlarmRules, Alarms
from tithe.monitoring.progress import ProgressView
from tithe.monitoring.report import build_report
from tithe.monitoring.summary import summary_table

__all__ = ["Alarm", "AlarmKind", "AlarmRules", "Alarms", "ProgressView", "build_report", "summary_table"]
