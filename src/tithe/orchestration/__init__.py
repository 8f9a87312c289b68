"""The two loops around the pool, evaluation, and how a run stops.

`RolloutLoop` fills the pool from the environment and the engine, `TrainLoop` empties it through a `Learner`; they share
the `Pool`, the `ServedPolicy` (which version the engine serves and which are still in use) and a `RunControl`
(wake-ups, stop, first failure), and neither holds the other. `run_training` runs both, `evaluate` answers held-out
questions, and `stop_on_signals` makes the first SIGINT or SIGTERM a clean stop. No torch here: trainer and engine are
reached by calls.
"""

from tithe.orchestration.admission import GroupSizes
from tithe.orchestration.control import RunControl, StopReason
from tithe.orchestration.counters import RolloutCounters
from tithe.orchestration.evaluate import Answer, Evaluation, QuestionResult, evaluate
from tithe.orchestration.learner import AdvantagesFn, Learner, UpdatePlan
from tithe.orchestration.playing import Player, RenderFn, generate_with
from tithe.orchestration.rollout_loop import RolloutLoop, RolloutPlan
from tithe.orchestration.run import run_training
from tithe.orchestration.served import ServedPolicy, ServedVersion
from tithe.orchestration.signals import stop_on_signals
from tithe.orchestration.train_loop import TrainHooks, TrainLoop, TrainOutcome, TrainPlan

__all__ = [
    "AdvantagesFn",
    "Answer",
    "Evaluation",
    "GroupSizes",
    "Learner",
    "Player",
    "QuestionResult",
    "RenderFn",
    "RolloutCounters",
    "RolloutLoop",
    "RolloutPlan",
    "RunControl",
    "ServedPolicy",
    "ServedVersion",
    "StopReason",
    "TrainHooks",
    "TrainLoop",
    "TrainOutcome",
    "TrainPlan",
    "UpdatePlan",
    "evaluate",
    "generate_with",
    "run_training",
    "stop_on_signals",
]
