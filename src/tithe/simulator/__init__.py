"""What asynchrony would do to a run: the two loops, the pool, the engine and the lane as discrete events (SimPy).

Time is simulated; the rules of staleness are the real ones (`tithe.staleness`). Free of torch. What is modelled and
what is left out is in docs/simulator.md.
"""

from tithe.simulator.answer import Answer, answer
from tithe.simulator.command import DISTRIBUTIONS, Options, parse_costs, simulate_target
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
from tithe.simulator.measured import Measurement, measure_run
from tithe.simulator.outcome import Outcome
from tithe.simulator.scenario import Failures, Layout, Measured, Sample, Scenario, Turn, Workload
from tithe.simulator.settings import scenario_of, scenario_of_run
from tithe.simulator.sweep import AXES, Sweep, parse_axis, run_sweep, throughput
from tithe.simulator.world import simulate

__all__ = [
    "AXES",
    "DISTRIBUTIONS",
    "Answer",
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
    "Measurement",
    "Options",
    "Outcome",
    "PublishCosts",
    "Sample",
    "Scenario",
    "Sweep",
    "Turn",
    "Uniform",
    "WorkCosts",
    "Workload",
    "answer",
    "histogram",
    "measure_run",
    "parse_axis",
    "parse_costs",
    "parse_distribution",
    "run_sweep",
    "scenario_of",
    "scenario_of_run",
    "simulate",
    "simulate_target",
    "throughput",
    "total_variation",
]
