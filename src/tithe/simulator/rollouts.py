"""The loop that fills the pool (`orchestration.rollout_loop`), with the real admission rule.

consumes      groups by number; the served version
produces      READY groups, and rejected ones of which nothing can be used
waits for     room (`room_for_rollouts`, `buffer`, `max_running`); engine, tools and reward workers of groups that run
unblocked by  a version confirmed, a batch leased, groups dropped, a turn that has been sampled
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial

import simpy

from tithe.errors import RunError
from tithe.pool import Draw
from tithe.simulator.engine import Request
from tithe.simulator.groups import Group, GroupPool
from tithe.simulator.lane import Lane, Process
from tithe.simulator.ledger import Ledger
from tithe.simulator.scenario import Sample, Scenario
from tithe.simulator.serving import LiveVersions
from tithe.simulator.shapes import draw_shape
from tithe.simulator.signals import Signal
from tithe.staleness import fit_group, room_for_rollouts


@dataclass(eq=False)
class _Ending:
    """How a rollout ended."""

    first_serial: int
    tokens: int
    usable: bool
    is_right: bool


@dataclass(frozen=True)
class _Room:
    """Room for one more group, as `orchestration.admission` has it: `most` rollouts by the staleness bounds, `in_batch`
    of them in the batch numbered `batch`, `likely` as many as the group will hardly exceed."""

    batch: int
    most: int
    in_batch: int
    likely: int


class RolloutLoop:
    """Begins by itself. `room` wakes it, `done` is fired when a group was committed or rejected."""

    def __init__(
        self,
        env: simpy.Environment,
        scenario: Scenario,
        *,
        pool: GroupPool,
        lanes: Sequence[Lane],
        versions: LiveVersions,
        ledger: Ledger,
        room: Signal,
        done: Signal,
    ) -> None:
        self._env, self._scenario, self._pool, self._lanes = env, scenario, pool, lanes
        self._versions, self._ledger, self._room, self._done = versions, ledger, room, done
        self._placed = 0  # sequences in the engine or on their way
        self._failed_in_a_row = 0
        workers = scenario.reward_workers
        self._workers = None if workers is None else simpy.Resource(env, workers)
        self._processor = simpy.Resource(env, 1)  # the loop's own thread, which commits
        env.process(self._admit())

    def _admit(self) -> Process:
        while True:
            while isinstance(room := self._next_room(), _Room):
                self._env.process(self._play_group(room))
                yield self._env.timeout(0)  # the group submits its requests before the next one is admitted
            began_s = self._env.now
            yield self._room.wait()
            self._ledger.seconds[f"held_back_by_{room}"] += self._env.now - began_s

    def _next_room(self) -> _Room | str:
        """Room for the next group, or what keeps it from starting. Its phase is that of the batch it is for."""
        scenario, pool, served = self._scenario, self._pool, self._versions.served
        if served is None:
            return "first_version"
        batch_rollouts, running = scenario.bounds.batch_rollouts, pool.running_rollouts
        admitted = pool.serial * batch_rollouts + pool.outstanding_rollouts
        most = room_for_rollouts(scenario.bounds, accepted=admitted - running, running=running, served_serial=served)
        batch, in_batch = admitted // batch_rollouts, batch_rollouts - admitted % batch_rollouts
        likely = min(scenario.most_samples(batch), in_batch)
        if self._placed and self._placed + likely > scenario.max_running:
            return "max_running"
        if most <= 0:
            return "staleness"
        is_full = running + pool.waiting_rollouts + likely > scenario.buffer
        return "buffer" if is_full else _Room(batch, most, in_batch, likely)

    def _draw(self, room: _Room) -> Draw:
        scenario = self._scenario
        return Draw(
            batch=room.batch,
            samples=lambda record: fit_group(
                scenario.samples(room.batch, record), room.in_batch, scenario.least_samples
            ),
            most=room.most,
        )

    def _play_group(self, room: _Room) -> Process:
        scenario, pool = self._scenario, self._pool
        version = self._versions.acquire()
        binds = scenario.on_publish == "finish"
        if not binds:
            self._versions.release(version)
        group = pool.admit(self._draw(room), partial(draw_shape, scenario), version, self._env.now)
        self._ledger.counts["admitted"] += 1
        self._placed += group.shape.size
        ends: list[_Ending] = []
        plays = [
            self._env.process(self._play(group, number, sample, version if binds else None, ends))
            for number, sample in enumerate(group.shape.samples)
        ]
        yield self._env.all_of(plays)
        if binds:
            self._versions.release(version)
        for lane in self._lanes:
            if lane.engine is not None:
                lane.engine.forget(group.group_id)
        if scenario.commit_s:
            with self._processor.request() as turn:
                yield turn
                yield self._env.timeout(scenario.commit_s)
        self._settle(group, ends)

    def _settle(self, group: Group, ends: list[_Ending]) -> None:
        usable = [end for end in ends if end.usable]
        group.min_serial = min((end.first_serial for end in ends if end.tokens), default=group.admitted_serial)
        group.ended_s = self._env.now
        group.usable = len(usable)
        if usable and self._scenario.workload.pass_rate is not None:
            group.pass_rate = sum(end.is_right for end in usable) / len(usable)
            self._pool.prompts.measure(group.prompt, group.batch, group.group_id, group.pass_rate)
        group.tokens = sum(end.tokens for end in ends)
        self._ledger.counts["failed_rollouts"] += len(ends) - len(usable)
        if usable:
            crashed = sum(sample.rows for sample in group.shape.samples) * (1 - len(usable) / len(ends))
            group.rows = group.shape.prompt_tokens + sum(s.rows for s in group.shape.samples) - round(crashed)
            self._failed_in_a_row = 0
            self._pool.commit(group)
        else:
            self._failed_in_a_row += group.shape.size
            self._pool.reject(group)
            if self._failed_in_a_row >= self._scenario.failed_batches * self._scenario.bounds.batch_rollouts:
                raise RunError(f"{self._failed_in_a_row} rollouts in a row are in groups that failed as a whole")
        self._room.fire()
        self._done.fire()

    def _play(self, group: Group, number: int, sample: Sample, version: int | None, ends: list[_Ending]) -> Process:
        """One rollout: its turns, then its reward."""
        context, tokens, first, usable = group.shape.prompt_tokens, 0, -1, not sample.crashes
        for at, turn in enumerate(sample.turns):
            lane = min(self._lanes, key=lambda lane: lane.engine.load if lane.engine else 0)
            engine = lane.engine
            assert engine is not None, "rollout lanes have an engine"
            request = Request(group.group_id, number, at, context, turn.new_tokens, version, self._env.event())
            if at:
                self._placed += 1  # the first turn has its place since the group's admission
            if engine.submit(request):
                lane.wake()
            yield request.done
            self._placed -= 1
            self._room.fire()
            tokens += turn.new_tokens
            first = request.first_serial if first < 0 else first
            context += turn.new_tokens + turn.tool_tokens
            if not usable:
                break
            if turn.tool_s:
                self._ledger.seconds["tools"] += turn.tool_s
                yield self._env.timeout(turn.tool_s)
        if usable:
            usable = yield from self._judge(sample.reward_s)
        ends.append(_Ending(first, tokens, usable, sample.is_right))

    def _judge(self, seconds: float) -> Generator[simpy.Event, object, bool]:
        """Wait for a worker and its verdict; False when it takes too long and is killed."""
        limit_s = self._scenario.reward_timeout_s
        in_time = limit_s is None or seconds <= limit_s
        spent_s = seconds if limit_s is None else min(seconds, limit_s)
        self._ledger.seconds["reward_work"] += spent_s
        if self._workers is None:
            yield self._env.timeout(spent_s)
            return in_time
        queued_s = self._env.now
        with self._workers.request() as worker:
            yield worker
            self._ledger.seconds["reward_queue"] += self._env.now - queued_s
            yield self._env.timeout(spent_s)
        return in_time
