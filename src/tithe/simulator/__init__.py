"""What asynchrony would do to a run: the two loops, the pool, the engine and the lane as discrete events (SimPy).

Time is simulated; the rules of staleness are the real ones (`tithe.staleness`). Free of torch. What is modelled and
what is left out is in docs/simulator.md.
"""

from tithe.simulator.costs import LaneCosts, PublishCosts, WorkCosts
from tithe.simulator.draws import (
    Clipped,
    Distribution,
    Empirical,
    Exponential,
    Fixed,
    LogNormal,
    Uniform,
    histogram,
    parse_distribution,
    total_variation,
)
from tithe.simulator.outcome import Outcome
from tithe.simulator.scenario import Failures, Layout, Measured, Sample, Scenario, Turn, Workload
from tithe.simulator.world import simulate

__all__ = [
    "Clipped",
    "Distribution",
    "Empirical",
    "Exponential",
    "Failures",
    "Fixed",
    "LaneCosts",
    "Layout",
    "LogNormal",
    "Measured",
    "Outcome",
    "PublishCosts",
    "Sample",
    "Scenario",
    "Turn",
    "Uniform",
    "WorkCosts",
    "Workload",
    "histogram",
    "parse_distribution",
    "simulate",
    "total_variation",
]
