"""One simulation: the lives of a process, from its start or a crash to the next one or the end."""

from __future__ import annotations

import math

import simpy

from tithe.errors import RunError
from tithe.simulator.draws import uniform
from tithe.simulator.engine import Engine
from tithe.simulator.groups import GroupPool
from tithe.simulator.lane import Lane
from tithe.simulator.ledger import Ledger
from tithe.simulator.outcome import Outcome
from tithe.simulator.prompts import Prompts
from tithe.simulator.rollouts import RolloutLoop
from tithe.simulator.scenario import Scenario
from tithe.simulator.serving import LiveVersions
from tithe.simulator.signals import Signal
from tithe.simulator.training import TrainLoop

MAX_CRASHES = 1000


def simulate(scenario: Scenario) -> Outcome:
    """Run a scenario to its last batch. The same scenario gives the same outcome.

    Raises `RunError` when rollouts fail as the real loop would not bear, when nothing can happen any more, or when
    crashes come too fast for any checkpoint to be reached.
    """
    prompts = Prompts(scenario.workload.prompts, scenario.seed, scenario.curriculum)
    pool, ledger = GroupPool(prompts), Ledger()
    now_s, saved, crashes = 0.0, 0, 0
    while True:
        life = _Life(scenario, pool, ledger, now_s, saved)
        crash_s = _next_crash_s(scenario, now_s, crashes)
        if life.run_until(crash_s):
            return Outcome(scenario, pool, ledger, span_s=life.now_s, lanes=life.lane_names, crashes=crashes)
        crashes += 1
        if crashes >= MAX_CRASHES:
            raise RunError(f"{crashes} crashes and only batch {pool.serial}: checkpoints are too far apart")
        saved = life.saved
        given_up, replayed = pool.crash(saved)
        ledger.counts["given_up"] += given_up
        ledger.counts["replayed"] += replayed
        del ledger.batches[saved:]
        now_s = crash_s + scenario.failures.restart_s


def _next_crash_s(scenario: Scenario, now_s: float, number: int) -> float:
    mean_s = scenario.failures.crash_mean_s
    if mean_s is None:
        return math.inf
    return now_s - mean_s * math.log1p(-uniform(scenario.seed, "crash time", number))


class _Life:
    """One process of a run."""

    def __init__(self, scenario: Scenario, pool: GroupPool, ledger: Ledger, now_s: float, saved: int) -> None:
        self._env = env = simpy.Environment(initial_time=now_s)
        room, done = Signal(env), Signal(env)
        versions = LiveVersions(room, scenario.max_live_versions)
        self._ledger = ledger
        layout = scenario.layout
        self._engines = [_engine(scenario) for _ in range(layout.rollout_copies)]
        if layout.kind == "shared":
            lanes = [Lane(env, "shared", ledger, self._engines[0])]
            trainer = lanes[0]
        else:
            lanes = [Lane(env, f"rollout-{i}", ledger, engine) for i, engine in enumerate(self._engines)]
            trainer = Lane(env, "train", ledger)
        self.lane_names = tuple(lane.name for lane in lanes) + (() if trainer in lanes else (trainer.name,))
        self._train = TrainLoop(
            env,
            scenario,
            pool=pool,
            lane=trainer,
            rollout_lanes=lanes,
            versions=versions,
            ledger=ledger,
            room=room,
            done=done,
            saved=saved,
        )
        RolloutLoop(env, scenario, pool=pool, lanes=lanes, versions=versions, ledger=ledger, room=room, done=done)

    @property
    def now_s(self) -> float:
        """Simulated time."""
        return self._env.now

    @property
    def saved(self) -> int:
        """Serial of the last checkpoint."""
        return self._train.saved

    def run_until(self, crash_s: float) -> bool:
        """Whether the run ended before the crash."""
        ended = self._env.process(self._train.run())
        stop = ended if math.isinf(crash_s) else ended | self._env.timeout(crash_s - self._env.now)
        try:
            self._env.run(until=stop)
        except RuntimeError as error:
            raise RunError("the simulation came to a stand: no event is left and batches are missing") from error
        for engine in self._engines:
            self._ledger.counts["ticks"] += engine.ticks
            self._ledger.counts["decode_rows"] += engine.decode_rows
            self._ledger.counts["drawn_tokens"] += engine.tokens
        return ended.triggered


def _engine(scenario: Scenario) -> Engine:
    return Engine(
        scenario.costs,
        max_running=-(-scenario.max_running // scenario.layout.rollout_copies),
        prefill_tokens=scenario.prefill_tokens,
        on_publish=scenario.on_publish,
    )
