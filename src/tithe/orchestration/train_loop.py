"""The loop that empties the pool."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tithe.errors import NonFiniteError, RunError
from tithe.orchestration.batch_metrics import batch_metrics
from tithe.orchestration.control import RunControl, StopReason
from tithe.orchestration.counters import RolloutCounters
from tithe.orchestration.early_stop import EarlyStop
from tithe.orchestration.learner import Learner
from tithe.orchestration.served import ServedPolicy, ServedVersion
from tithe.pool import Checkpoint, DropReason, Pool
from tithe.staleness import Bounds, may_begin_batch, must_drop, must_publish
from tithe.types import MetricSink, PolicyVersion, RolloutGroup

if TYPE_CHECKING:  # needs torch, which this room must not load
    from tithe.trainer import StepResult

MAX_SKIPPED_IN_A_ROW = 3


@dataclass(frozen=True)
class TrainPlan:
    """How long and how often, in batches trained; see the section `run` of the configuration.

    `stall_s` is the longest time in which nothing at all may happen while the loop waits for rollouts or for room: no
    group, version or token.
    """

    max_steps: int
    max_minutes: float | None = None
    eval_every: int | None = None
    checkpoint_every: int = 10
    keep_checkpoints: int = 2
    keep_pool_batches: int = 200
    patience: int | None = None
    stall_s: float = 1800.0


@dataclass(frozen=True)
class TrainHooks:
    """What the loop lets others do.

    `publish` makes the trainer's adapter a version, has the engine load and prove it, and returns the published name.
    It raises `PublishRefused` or `AdapterError`, the served version being unchanged. `evaluate` scores a version on the
    held-out questions and returns one metric row with `eval_sampled` in it, or None when it was broken off. `save`
    writes checkpoint files with the given state, durably, and returns their folder. `extra_state` is what else a
    checkpoint keeps (KL coefficient, schedule, …) as JSON values. `prune` removes checkpoint files and published
    versions that nobody needs any more.
    """

    publish: Callable[[PolicyVersion], str]
    evaluate: Callable[[ServedVersion], Mapping[str, float] | None]
    save: Callable[[int, Mapping[str, Any]], Path]
    extra_state: Callable[[], Mapping[str, Any]]
    prune: Callable[[], None]


@dataclass(frozen=True)
class TrainOutcome:
    """How a run ended, and the checkpoint it can be resumed from.

    >>> TrainOutcome(StopReason.MAX_STEPS, 10, Path("checkpoints/step_000010")).serial
    10
    """

    reason: StopReason
    serial: int
    checkpoint: Path


class TrainLoop:
    """Trains batch after batch, in the calling thread.

    consumes      whole batches of READY groups, oldest admission first
    produces      versions for the engine, metric rows, evaluations, checkpoints; every leased group leaves as TRAINED,
                  DROPPED or requeued
    waits for     a full batch of groups that are young enough; the engine's answer to a publication; room for one more
                  live version
    unblocked by  `RunControl.notify`: a group committed, an older version released, a stop requested, a failure

    Ends after `max_steps` batches, after `max_minutes`, when the held-out score has declined `patience` times in a row,
    or on a signal. A signal breaks the batch in work off between two micro-batches, and its groups are requeued;
    otherwise the last policy is published and evaluated. A checkpoint ends every run that did not fail.

    `work` counts what the sampler has computed so far, in tokens: while it rises, a wait may last as long as it takes.

    Raises what the rollout loop failed with, `NonFiniteError` after three skipped steps in a row, `PublishRefused` when
    the engine does not serve what was trained, `RunError` when nothing happens for `stall_s`.
    """

    def __init__(
        self,
        *,
        pool: Pool,
        learner: Learner,
        served: ServedPolicy,
        control: RunControl,
        bounds: Bounds,
        plan: TrainPlan,
        hooks: TrainHooks,
        counters: RolloutCounters,
        sink: MetricSink,
        lineage: int = 0,
        work: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._learner = learner
        self._served = served
        self._control = control
        self._bounds = bounds
        self._plan = plan
        self._hooks = hooks
        self._counters = counters
        self._sink = sink
        self._lineage = lineage
        self._work = work
        self._clock = clock
        self._deadline_s = math.inf
        self._serial = pool.serial
        self._early_stop = EarlyStop(plan.patience)
        self._evaluated_serial: int | None = None
        self._saved: tuple[int, Path] | None = None
        self._skipped_in_a_row = 0
        self._dropped = 0
        self._checkpoint_s = 0.0

    def resume_from(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint that the pool was rewound to; before `run`."""
        state = checkpoint.state["train_loop"]
        if checkpoint.serial != self._serial:
            raise RunError(f"the checkpoint is of batch {checkpoint.serial}, the pool stands at {self._serial}")
        self._saved = (checkpoint.serial, checkpoint.directory)
        self._evaluated_serial = state["evaluated_serial"]
        self._early_stop.load(state["early_stop"])
        self._skipped_in_a_row = state["skipped_in_a_row"]

    def run(self) -> TrainOutcome:
        """Train until the end; see the class."""
        if self._plan.max_minutes is not None:
            self._deadline_s = self._clock() + 60.0 * self._plan.max_minutes
        self._publish_if_due()
        self._evaluate()
        while not self._limit_reached():
            began_s = self._clock()
            groups = self._wait_for_batch()
            if groups:
                self._train(groups, began_s)
        return self._finish()

    def _limit_reached(self) -> bool:
        if self._serial >= self._plan.max_steps:
            self._control.request_stop(StopReason.MAX_STEPS)
        elif self._clock() >= self._deadline_s:
            self._control.request_stop(StopReason.MAX_MINUTES)
        return self._control.stopping

    def _finish(self) -> TrainOutcome:
        self._control.raise_if_failed()
        if self._control.stop_reason is not StopReason.SIGNAL:
            if self._served_serial() != self._serial:
                self._publish()
            self._evaluate()
        path = self._save()
        reason = self._control.stop_reason
        assert reason is not None  # the loop ends for a reason or by a failure
        return TrainOutcome(reason, self._serial, path)

    # ------------------------------------------------------------------ one batch

    def _wait_for_batch(self) -> Sequence[RolloutGroup]:
        """A leased batch; empty when the run is to stop."""
        while not self._limit_reached():
            seen = self._control.changes
            lease = self._pool.lease_batch(self._bounds.batch_rollouts, self._serial, self._too_old)
            self._dropped += len(lease.dropped)
            if lease.groups or lease.dropped:
                self._control.notify()  # there is room in the buffer
            if lease.groups:
                return lease.groups
            left_s, stall_s, done = self._deadline_s - self._clock(), self._plan.stall_s, self._work()
            moved = self._control.wait(seen, max(0.0, min(stall_s, left_s)))
            if not moved and left_s > stall_s and self._work() == done:
                raise RunError(
                    f"no rollout finished for {stall_s:g} s while waiting: {self._pool.counts()}; nor was a token"
                    " sampled, so that a tool or a reward function (reward.timeout_s) seems to hang"
                )
        return ()

    def _too_old(self, min_serial: int) -> bool:
        return must_drop(self._bounds, min_serial=min_serial, trainer_serial=self._serial)

    def _train(self, groups: Sequence[RolloutGroup], began_s: float) -> None:
        ids = [group.group_id for group in groups]
        leased_s = self._clock()
        step = self._learner.learn(groups, self._serial)
        if step is None:
            self._pool.requeue(ids)
            return
        if step.skipped:
            self._skip(ids, step)
            return
        row = batch_metrics(groups, self._serial)
        self._skipped_in_a_row = 0
        self._pool.mark_trained(ids, self._serial + 1)
        self._serial += 1
        trained_s = self._clock()
        self._publish_if_due()
        published_s = self._clock()
        times = {"wait_s": leased_s - began_s, "train_s": trained_s - leased_s, "publish_s": published_s - trained_s}
        self._write(row | dict(step.metrics) | times | {"step_s": published_s - began_s, "skipped": 0.0})
        if self._plan.eval_every and self._serial % self._plan.eval_every == 0:
            self._evaluate()
        if self._serial % self._plan.checkpoint_every == 0:
            self._save()

    def _skip(self, ids: Sequence[int], step: StepResult) -> None:
        self._skipped_in_a_row += 1
        self._pool.drop(ids, DropReason.NON_FINITE, f"optimizer step {self._serial + 1} was skipped")
        self._control.notify()
        self._sink.write(self._serial + 1, {**step.metrics, "skipped": 1.0})
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise NonFiniteError(
                f"loss or gradients were not finite in {self._skipped_in_a_row} batches in a row, after batch"
                f" {self._serial}; lower optimizer.lr or optimizer.max_grad_norm"
            )

    def _write(self, row: Mapping[str, float]) -> None:
        dropped, self._dropped = self._dropped, 0
        checkpoint_s, self._checkpoint_s = self._checkpoint_s, 0.0
        counted = {"dropped_groups": float(dropped), "checkpoint_s": checkpoint_s, **self._counters.take_failures()}
        counted |= self._counters.take_equal()
        gap = self._serial - self._served.oldest_serial()
        self._sink.write(self._serial, {"version_gap": float(gap), **self._counters.take_speed()})
        self._sink.write(self._serial, {**row, **counted})

    # ------------------------------------------------------------------ between batches

    def _served_serial(self) -> int | None:
        served = self._served.current()
        return None if served is None else served.version.serial

    def _publish_if_due(self) -> None:
        served, trained = self._served_serial(), self._serial
        if (
            served is None
            or must_publish(self._bounds, trainer_serial=trained, served_serial=served)
            or not may_begin_batch(self._bounds, trainer_serial=trained, served_serial=served)
        ):
            self._publish()

    def _publish(self) -> None:
        done = self._work()
        while not self._served.wait_for_room(self._plan.stall_s):
            before, done = done, self._work()
            if done == before:
                raise RunError(
                    f"no live version ended within {self._plan.stall_s:g} s, so batch {self._serial} cannot be"
                    " published; raise engine.max_live_versions"
                )
        version = PolicyVersion(self._lineage, self._serial)
        name = self._hooks.publish(version)
        self._served.confirm(ServedVersion(version, name))

    def _evaluate(self) -> None:
        """Score the served version, unless it was scored before."""
        if self._served_serial() == self._evaluated_serial:
            return
        version = self._served.acquire()
        self._counters.hold()
        try:
            row = self._hooks.evaluate(version)
        finally:
            self._counters.go_on()
            self._served.release(version)
        if row is None:
            return
        self._evaluated_serial = version.version.serial
        self._sink.write(self._evaluated_serial, row)
        if self._early_stop.observe(row["eval_sampled"]):
            self._control.request_stop(StopReason.PATIENCE)

    def _save(self) -> Path:
        """A checkpoint of this serial: files first, then the pool's transaction, then the pruning of older ones."""
        if self._saved is not None and self._saved[0] == self._serial:
            return self._saved[1]
        began_s = self._clock()
        state = {"train_loop": self._state(), **self._hooks.extra_state()}
        path = self._hooks.save(self._serial, state)
        self._pool.record_checkpoint(self._serial, path, state, keep=self._plan.keep_checkpoints)
        self._saved = (self._serial, path)
        self._hooks.prune()
        self._pool.prune_trained(self._plan.keep_pool_batches)
        self._checkpoint_s = self._clock() - began_s
        return path

    def _state(self) -> dict[str, Any]:
        return {
            "evaluated_serial": self._evaluated_serial,
            "early_stop": self._early_stop.state(),
            "skipped_in_a_row": self._skipped_in_a_row,
        }
