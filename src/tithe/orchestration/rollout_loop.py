"""The loop that fills the pool."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from tithe.advantages import has_spread
from tithe.config import Schedule
from tithe.errors import EngineError, FailureCause, RunError
from tithe.orchestration.admission import AdmissionRules, GroupSizes, Room
from tithe.orchestration.batch_metrics import pass_rate
from tithe.orchestration.control import RunControl
from tithe.orchestration.counters import RolloutCounters
from tithe.orchestration.playing import Player
from tithe.orchestration.served import ServedPolicy, ServedVersion
from tithe.pool import Admission, DropReason, Pool
from tithe.rewards import penalise_likeness, unpenalised
from tithe.staleness import Bounds
from tithe.types import PromptItem, Rollout, RolloutEngine, RolloutGroup, SamplingParams

EQUAL_BATCHES = 10
"""Batches' worth of rollouts in groups of equal rewards, in a row, before dynamic sampling gives up (as verl's
`max_num_gen_batches`)."""


@dataclass(frozen=True)
class RolloutPlan:
    """How groups are made. Sizes count rollouts.

    `params` is the template of every request, with the run's seed in it. `buffer` bounds what waits or runs
    (`rl.rollout_buffer_size`); `max_running` bounds the sequences that the engine has or is about to get
    (`engine.max_running`), so that a group is bound to a version only when the engine has room for it; a rollout whose
    tool or reward is awaited is none of them. `failed_batches` is how many batches' worth of
    rollouts may fail in a row, in groups of which nothing can be used, before the run ends. `schedule` and `sizes` say
    what changes from batch to batch and from prompt to prompt. `diversity_penalty` is taken off the rewards of a group,
    times each completion's likeness to the others. `needs_spread` drops groups of equal rewards and lets other prompts
    take their places (DAPO's dynamic sampling).
    """

    params: SamplingParams
    on_publish: Literal["finish", "recompute", "keep"] = "finish"
    buffer: int = 2**31
    max_running: int = 2**31
    failed_batches: int = 3
    schedule: Schedule | None = None
    sizes: GroupSizes = field(default_factory=GroupSizes)
    diversity_penalty: float = 0.0
    needs_spread: bool = False


class RolloutLoop:
    """Plays groups and commits them to the pool. An asyncio loop in a thread of its own.

    consumes      prompts, from the pool's queue and cursor; the served version
    produces      committed groups (READY), and rejected ones of which nothing can be used
    waits for     room (`room_for_rollouts`, `rollout_buffer_size`, `max_running`); the engine and the graders of groups
                  that run
    unblocked by  `RunControl.notify`: a version confirmed, a batch leased, groups dropped, a stop requested; a turn
                  that has been sampled

    With `on_publish: finish` a group is bound to the version served at its admission, and keeps it live; otherwise
    requests carry no adapter's name and follow what is served. Failures of rollouts are data. What ends the run: an
    error of the pool, an engine that answers with another version than it was asked for, groups that all fail for
    several batches, prompts that have all been given up. `RunControl.fail` is then called with the error.
    """

    def __init__(
        self,
        *,
        pool: Pool,
        items: Mapping[str, PromptItem],
        player: Player,
        engine: RolloutEngine,
        served: ServedPolicy,
        control: RunControl,
        bounds: Bounds,
        plan: RolloutPlan,
        counters: RolloutCounters,
    ) -> None:
        self._pool = pool
        self._items = items
        self._player = player
        self._engine = engine
        self._served = served
        self._control = control
        self._bounds = bounds
        self._plan = plan
        self._rules = AdmissionRules(bounds, plan.params, plan.schedule, plan.sizes)
        self._counters = counters
        self._failed_in_a_row = self._equal_in_a_row = 0
        self._groups: set[asyncio.Task[None]] = set()
        self._ended = False
        self._placed = 0  # sequences in the engine or on their way; only the loop's own thread touches it
        self._wake = asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="rollout-loop", daemon=True)

    def start(self) -> None:
        """Begin in a thread. Groups are admitted as soon as a version is served."""
        self._thread.start()

    def stop(self) -> None:
        """End: running groups are given up, and a resume makes them again. Blocks until the thread has ended. A second
        call does nothing.
        """
        self._ended = True
        self._control.notify()
        if self._thread.is_alive():
            self._thread.join()

    def raise_if_failed(self) -> None:
        """Raise what ended the run, after `stop`: the end itself may fail."""
        self._control.raise_if_failed()

    async def _run(self) -> None:
        await asyncio.wait([self._watch(self._admit_groups())])
        running = list(self._groups)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.wait([self._watch(self._give_up())])

    async def _give_up(self) -> None:
        self._pool.give_up_running()

    def _watch(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(self._report)
        return task

    def _report(self, task: asyncio.Task[None]) -> None:
        self._groups.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._control.fail(error)

    # ------------------------------------------------------------------ admission

    async def _admit_groups(self) -> None:
        loop = asyncio.get_running_loop()

        def listener() -> None:
            loop.call_soon_threadsafe(self._wake.set)

        with self._control.listening(listener):
            while not self._stopping():
                self._wake.clear()
                while not self._stopping() and (room := self._room()) is not None:
                    self._begin_group(room)
                    await asyncio.sleep(0)  # the group submits its requests before the next one is admitted
                await self._wake.wait()

    def _stopping(self) -> bool:
        return self._ended or self._control.stopping

    def _room(self) -> Room | None:
        served, plan = self._served.current(), self._plan
        if served is None or self._placed >= plan.max_running:
            return None
        counts = self._pool.counts()
        # The version may rise between this check and the admission. That only adds room (proof 1 of
        # `staleness.bounds`).
        room = self._rules.room(counts, served.version.serial)
        if room is None or (self._placed and self._placed + room.likely > plan.max_running):
            return None
        return None if counts.running_rollouts + counts.ready_rollouts + room.likely > plan.buffer else room

    def _begin_group(self, room: Room) -> None:
        served = self._served.acquire()
        admission = self._pool.admit_next(served.version.lineage, served.version.serial, self._rules.draw(room))
        if not self._binds:
            self._served.release(served)
        self._counters.begin()
        self._placed += admission.n_samples
        self._groups.add(self._watch(self._make_group(admission, served)))

    # ------------------------------------------------------------------ one group

    async def _make_group(self, admission: Admission, served: ServedVersion) -> None:
        rollouts: tuple[Rollout, ...] = ()
        placed = admission.n_samples

        def places(change: int) -> None:
            nonlocal placed
            placed += change
            self._placed += change
            if change < 0:
                self._wake.set()

        try:
            params = self._rules.sampling(admission.batch, admission.group_id)
            variants = [replace(params, sample=sample) for sample in range(admission.n_samples)]
            item = self._items[admission.prompt_id]
            adapter = served.name if self._binds else None
            prompt_ids, rollouts = await self._player.play(item, variants, adapter, places)
        finally:
            self._placed -= placed  # those that never began
            self._counters.end(rollouts)
            if self._binds:
                self._served.release(served)
            if not rollouts or any(r.failure and r.failure.cause is FailureCause.TIMEOUT for r in rollouts):
                self._engine.cancel(admission.group_id)  # given up, or a sample that nobody waits for any more
        if self._plan.diversity_penalty > 0:
            rollouts = penalise_likeness(rollouts, self._plan.diversity_penalty)
        version = served.version
        self._settle(
            RolloutGroup(
                group_id=admission.group_id,
                prompt_id=admission.prompt_id,
                prompt_ids=np.array(prompt_ids, np.int32),
                rollouts=rollouts,
                lineage=version.lineage,
                admitted_serial=version.serial,
            )
        )

    @property
    def _binds(self) -> bool:
        return self._plan.on_publish == "finish"

    def _settle(self, group: RolloutGroup) -> None:
        self._check_versions(group)
        if any(rollout.failure is None and rollout.reward is not None for rollout in group.rollouts):
            self._failed_in_a_row = 0
            self._commit(group)
        else:
            self._failed_in_a_row += len(group.rollouts)
            detail = _why_unusable(group)
            self._pool.reject(group, detail)
            if self._failed_in_a_row >= self._plan.failed_batches * self._bounds.batch_rollouts:
                failed = f"{self._failed_in_a_row} rollouts in a row are in groups of which nothing can be used"
                raise RunError(f"{failed} (monitor.alarm_after batches of them end a run); the last one: {detail}")
        self._control.notify()

    def _commit(self, group: RolloutGroup) -> None:
        # A charge for likeness would make nearly every group look mixed.
        found = [unpenalised(r) for r in group.rollouts if r.failure is None]
        rewards = [reward for reward in found if reward is not None]
        if not self._plan.needs_spread or has_spread(rewards):
            self._equal_in_a_row = 0
            self._pool.commit(group, pass_rate(group))
            return
        self._counters.count_equal()
        self._equal_in_a_row += len(group.rollouts)
        self._pool.reject(group, f"equal rewards: {rewards[0]:g}", DropReason.NO_SPREAD, pass_rate(group))
        if self._equal_in_a_row >= EQUAL_BATCHES * self._bounds.batch_rollouts:
            raise RunError(
                f"{self._equal_in_a_row} rollouts in a row are in groups of equal rewards, the last one of"
                f" {rewards[0]:g}, and rl.dynamic_sampling waits for others: give prompts that are neither solved nor"
                " hopeless, more rl.samples_per_prompt, or set rl.dynamic_sampling to false"
            )

    def _check_versions(self, group: RolloutGroup) -> None:
        for rollout in group.rollouts:
            serials = rollout.serials
            if not len(serials):
                continue
            oldest, newest = int(serials.min()), int(serials.max())
            if oldest < group.admitted_serial or (self._binds and newest != group.admitted_serial):
                raise EngineError(
                    f"group {group.group_id} was to be sampled from version {group.admitted_serial};"
                    f" the engine answered with versions {oldest} to {newest}"
                )


def _why_unusable(group: RolloutGroup) -> str:
    failure = next((rollout.failure for rollout in group.rollouts if rollout.failure is not None), None)
    if failure is None:
        return "no rollout was given a reward"
    return f"{failure.cause}: {failure.message}"
