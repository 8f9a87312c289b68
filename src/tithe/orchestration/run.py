"""Both loops together."""

from __future__ import annotations

from tithe.orchestration.rollout_loop import RolloutLoop
from tithe.orchestration.train_loop import TrainLoop, TrainOutcome


def run_training(rollouts: RolloutLoop, train: TrainLoop) -> TrainOutcome:
    """Fill the pool in a thread and train in this one until the train loop ends; then end the other. Raises what either
    failed with.
    """
    rollouts.start()
    try:
        outcome = train.run()
    finally:
        rollouts.stop()
    rollouts.raise_if_failed()  # after the last batch, too
    return outcome
