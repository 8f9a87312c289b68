"""One batch through the trainer: planned, accumulated micro-batch by micro-batch on the lane, stepped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from tithe.orchestration.control import RunControl
from tithe.types import RolloutGroup, TrainingBatch

_T = TypeVar("_T")

AdvantagesFn = Callable[[Sequence[RolloutGroup]], Sequence[Sequence[NDArray[np.float32] | None]]]
"""Groups → what `TrainingBatch.advantages` holds, e.g. `advantages.batch_advantages` with its scale bound."""


class StepLike(Protocol):
    """Answer of `Trainer.step`."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Named numbers of the batch."""
        ...

    @property
    def skipped(self) -> bool:
        """Whether loss or gradients were not finite, so that nothing was changed."""
        ...


class TrainerLike(Protocol):
    """The three calls of `trainer.Trainer` that a batch needs. Described here because that room needs torch and this
    one must not.
    """

    def plan(self, batch: TrainingBatch) -> Sequence[Any]:
        """Cut a batch into micro-batches."""
        ...

    def accumulate(self, micro: Any) -> object:
        """Forward and backward of one micro-batch; gradients add up until `step`."""
        ...

    def step(self) -> StepLike:
        """One optimizer step on what was accumulated."""
        ...


class LaneLike(Protocol):
    """The one call of `models.Lane` that a batch needs."""

    def call(self, job: Callable[[], _T], /) -> _T:
        """Run `job` on the lane's thread, in order; blocks and returns or raises what it does."""
        ...


class Learner:
    """Turns leased groups into one optimizer step. Between two micro-batches the lane is free for the sampler."""

    def __init__(self, *, trainer: TrainerLike, lane: LaneLike, advantages: AdvantagesFn, control: RunControl) -> None:
        self._trainer = trainer
        self._lane = lane
        self._advantages = advantages
        self._control = control

    def learn(self, groups: Sequence[RolloutGroup], serial: int) -> StepLike | None:
        """Train on one batch that begins at `serial`. None when the run is stopping and micro-batches are left: they
        are abandoned, no step is taken, and the trainer must not be stepped again.
        """
        batch = TrainingBatch(groups, self._advantages(groups), serial)
        for micro in self._trainer.plan(batch):
            if self._control.stopping:
                return None
            self._accumulate(micro)
        return self._lane.call(self._trainer.step)

    def _accumulate(self, micro: Any) -> None:
        self._lane.call(lambda: self._trainer.accumulate(micro))
