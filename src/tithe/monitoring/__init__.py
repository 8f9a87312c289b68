"""Monitoring: listeners over metric rows, and what is shown of a run.

`ProgressView` and `Alarms` are metric sinks; `summary_table` is the table before → after for the terminal;
`build_report` writes one self-contained page from a run directory, finished or not; `rank_peaks` are the memory peaks
that its run.json names by rank. Nothing here acts on a run.
"""

from tithe.monitoring._run_data import rank_peaks
from tithe.monitoring.alarms import Alarm, AlarmKind, AlarmRules, Alarms
from tithe.monitoring.progress import ProgressView
from tithe.monitoring.report import build_report
from tithe.monitoring.summary import summary_table

__all__ = ["Alarm", "AlarmKind", "AlarmRules", "Alarms", "ProgressView", "build_report", "rank_peaks", "summary_table"]
