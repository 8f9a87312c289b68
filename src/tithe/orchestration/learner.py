"""One batch through the trainer: planned, accumulated micro-batch by micro-batch on the lane, stepped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tithe.orchestration.control import RunControl
from tithe.types import RolloutGroup, TrainingBatch

if TYPE_CHECKING:  # both need torch, which this room must not load
    from tithe.models import Lane
    from tithe.trainer import FullTrainer, LeadingTrainer, StepResult, TrainerSettings

AdvantagesFn = Callable[[Sequence[RolloutGroup]], Sequence[Sequence[NDArray[np.float32] | None]]]
"""Groups → what `TrainingBatch.advantages` holds, e.g. `advantages.batch_advantages` with its scale bound."""


class Learner:
    """Turns leased groups into one optimizer step. Between two micro-batches the lane is free for the sampler.

    `settings_at` gives the trainer's settings for a batch that begins at a serial (learning rate and KL coefficient of
    a schedule); None keeps those it was made with.
    """

    def __init__(
        self,
        *,
        trainer: LeadingTrainer | FullTrainer,
        lane: Lane,
        advantages: AdvantagesFn,
        control: RunControl,
        settings_at: Callable[[int], TrainerSettings] | None = None,
    ) -> None:
        self._trainer = trainer
        self._lane = lane
        self._advantages = advantages
        self._control = control
        self._settings_at = settings_at

    def learn(self, groups: Sequence[RolloutGroup], serial: int) -> StepResult | None:
        """Train on one batch that begins at `serial`. None when the run is stopping and micro-batches are left: they
        are abandoned and no step is taken; the next batch's plan starts from zero gradients.
        """
        if self._settings_at is not None:
            self._trainer.settings = self._settings_at(serial)
        batch = TrainingBatch(groups, self._advantages(groups), serial)
        for micro in self._lane.call(self._trainer.plan, batch):
            if self._control.stopping:
                return None
            self._lane.call(self._trainer.accumulate, micro)
        return self._lane.call(self._trainer.step)
