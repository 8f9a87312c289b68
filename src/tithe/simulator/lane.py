"""The compute lane of one base: jobs in their order, and between two jobs one tick of its engine (`models.lane`).

consumes      jobs (micro-batches, optimizer steps, publications); ticks of its engine, if it has one
produces      the end of each job; drawn tokens
waits for     a job, or an engine with work
unblocked by  `call`; `wake` after a request was submitted
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator

import simpy

from tithe.simulator.engine import Engine
from tithe.simulator.ledger import SAMPLE, Ledger
from tithe.simulator.signals import Signal

Process = Generator[simpy.Event, object, None]


class Lane:
    """Does one thing at a time. Begins by itself."""

    def __init__(self, env: simpy.Environment, name: str, ledger: Ledger, engine: Engine | None = None) -> None:
        self.name, self.engine = name, engine
        self._env, self._ledger = env, ledger
        self._jobs: deque[tuple[str, float, Callable[[], None], simpy.Event]] = deque()
        self._signal = Signal(env)
        env.process(self._run())

    def call(self, kind: str, seconds: float, then: Callable[[], None] = lambda: None) -> simpy.Event:
        """Queue a job; `then` belongs to it, and runs before anything else gets the lane. The event succeeds at its
        end."""
        done = self._env.event()
        self._jobs.append((kind, seconds, then, done))
        self._signal.fire()
        return done

    def wake(self) -> None:
        """The engine got a request that may begin."""
        self._signal.fire()

    def _run(self) -> Process:
        while True:
            if self._jobs:
                kind, seconds, then, done = self._jobs.popleft()
                begin_s = self._env.now
                yield self._env.timeout(seconds)
                self._ledger.work(self.name, kind, begin_s, self._env.now)
                then()
                done.succeed()
            elif self.engine is None or not self.engine.has_work:
                yield self._signal.wait()
                continue
            if self.engine is not None and self.engine.has_work:
                yield from self._tick(self.engine)

    def _tick(self, engine: Engine) -> Process:
        """One tick, or as many equal ones as fit before somebody needs the lane. A tick that has begun is finished."""
        begin_s, ticks = self._env.now, engine.plan()
        count = ticks.count
        if count == 1 or self._jobs:
            count = 1
            yield self._env.timeout(ticks.tick_s)
        else:
            whole = self._env.timeout(count * ticks.tick_s)
            yield whole | self._signal.wait()
            if not whole.processed:
                elapsed_s = self._env.now - begin_s
                if ticks.tick_s > 0:
                    count = min(count, max(1, math.ceil(elapsed_s / ticks.tick_s - 1e-9)))
                yield self._env.timeout(max(0.0, begin_s + count * ticks.tick_s - self._env.now))
        self._ledger.work(self.name, SAMPLE, begin_s, self._env.now)
        engine.apply(count)
