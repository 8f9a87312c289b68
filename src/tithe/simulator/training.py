"""The loop that empties the pool (`orchestration.train_loop`), with the real rules of staleness.

consumes      whole batches of READY groups, oldest admission first
produces      trained batches, versions, checkpoints
waits for     a full batch of groups that are young enough; its lane; room for one more live version
unblocked by  a group committed, an older version released
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import simpy

from tithe.simulator.engine import Engine
from tithe.simulator.groups import Group, GroupPool
from tithe.simulator.lane import Lane, Process
from tithe.simulator.ledger import PUBLISH, TRAIN, BatchRow, Ledger
from tithe.simulator.scenario import Scenario
from tithe.simulator.serving import LiveVersions
from tithe.simulator.signals import Signal
from tithe.staleness import choose_batch, may_begin_batch, must_drop, must_publish


class TrainLoop:
    """`run` is a process that ends with the last batch published. `saved` is the serial of the last checkpoint."""

    def __init__(
        self,
        env: simpy.Environment,
        scenario: Scenario,
        *,
        pool: GroupPool,
        lane: Lane,
        rollout_lanes: Sequence[Lane],
        versions: LiveVersions,
        ledger: Ledger,
        room: Signal,
        done: Signal,
        saved: int = 0,
    ) -> None:
        self._env, self._scenario, self._pool, self._lane = env, scenario, pool, lane
        self._rollout_lanes = rollout_lanes
        self._versions, self._ledger, self._room, self._done = versions, ledger, room, done
        self._dropped = 0
        self.saved = saved

    def run(self) -> Process:
        """Train all batches."""
        env, pool = self._env, self._pool
        yield from self._publish_if_due()
        while pool.serial < self._scenario.steps:
            began_s = env.now
            groups: list[Group] = []
            yield from self._wait_for_batch(groups)
            yield from self._train(groups, began_s)
        if self._versions.served != pool.serial:
            yield from self._publish()

    def _wait_for_batch(self, leased: list[Group]) -> Process:
        """Fill `leased`."""
        bounds, pool = self._scenario.bounds, self._pool
        while not leased:
            seen = self._done.wait()
            ready = pool.ready()
            old = [g for g in ready if must_drop(bounds, min_serial=g.min_serial, trainer_serial=pool.serial)]
            for group in old:
                pool.drop_stale(group)
                self._ledger.counts["dropped_tokens"] += group.tokens
            self._dropped += len(old)
            young = [group for group in ready if group not in old] if old else ready
            sizes = [group.shape.size for group in young]
            leased += [young[i] for i in choose_batch(sizes, bounds.batch_rollouts, more_to_come=pool.running > 0)]
            pool.lease(leased)
            if leased or old:
                self._room.fire()
            if not leased:
                yield seen
        if self._scenario.lease_s:
            yield self._env.timeout(self._scenario.lease_s)

    def _train(self, groups: list[Group], began_s: float) -> Process:
        env, pool, bounds = self._env, self._pool, self._scenario.bounds
        leased_s, serial = env.now, pool.serial
        served = self._versions.served
        assert served is not None, "a version is published before the first batch"
        ages = tuple(max(0, serial - group.min_serial) for group in groups)
        assert may_begin_batch(bounds, trainer_serial=serial, served_serial=served)
        for seconds in self._micro_batches(groups):
            yield self._lane.call(TRAIN, seconds)
        yield self._lane.call(TRAIN, self._scenario.costs.optimizer_s)
        pool.mark_trained(groups)
        trained_s = env.now
        yield from self._publish_if_due()
        row = BatchRow(
            serial=pool.serial,
            end_s=env.now,
            wait_s=leased_s - began_s,
            train_s=trained_s - leased_s,
            publish_s=env.now - trained_s,
            lag=serial - served,
            ages=ages,
            version_gap=pool.serial - self._versions.oldest,
            dropped=self._dropped,
            rollouts=sum(group.shape.size for group in groups),
            tokens=sum(group.tokens for group in groups),
        )
        self._dropped = 0
        self._ledger.batches.append(row)
        if self._scenario.between_s:
            yield env.timeout(self._scenario.between_s)
        if pool.serial % self._scenario.checkpoint_every == 0:
            if self._scenario.checkpoint_s:
                yield env.timeout(self._scenario.checkpoint_s)
            self.saved = pool.serial

    def _micro_batches(self, groups: list[Group]) -> list[float]:
        """Seconds of each: the batch's rows in equal parts of at most `micro_batch_tokens`, split over the copies."""
        rows = -(-sum(group.rows for group in groups) // self._scenario.layout.train_copies)
        parts = max(1, -(-rows // self._scenario.micro_batch_tokens))
        return [self._scenario.costs.train_s(rows // parts + (part < rows % parts)) for part in range(parts)]

    # ------------------------------------------------------------------ versions

    def _publish_if_due(self) -> Process:
        bounds, served, trained = self._scenario.bounds, self._versions.served, self._pool.serial
        if (
            served is None
            or must_publish(bounds, trainer_serial=trained, served_serial=served)
            or not may_begin_batch(bounds, trainer_serial=trained, served_serial=served)
        ):
            yield from self._publish()

    def _publish(self) -> Process:
        began_s, serial, costs = self._env.now, self._pool.serial, self._scenario.costs.publish
        while not self._versions.has_room:
            yield self._room.wait()
        self._ledger.seconds["version_room"] += self._env.now - began_s
        yield self._lane.call(PUBLISH, costs.trainer_s)
        yield self._env.timeout(costs.transfer_s)
        loads = [
            lane.call(PUBLISH, costs.engine_s, _serving(lane.engine, serial))
            for lane in self._rollout_lanes
            if lane.engine is not None
        ]
        yield self._env.all_of(loads)
        self._versions.confirm(serial)
        self._ledger.counts["publications"] += 1
        self._room.fire()


def _serving(engine: Engine, serial: int) -> Callable[[], None]:
    return lambda: engine.serve(serial)
