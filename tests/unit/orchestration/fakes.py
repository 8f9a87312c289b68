"""A whole run in small: an engine, a trainer and an environment of a few lines each, and their wiring.

The "weights" are a hash of everything trained so far, in order; the tokens are a hash of weights, seed, group and
sample. So two runs end with equal weights only if they sampled and trained exactly the same.
"""

from __future__ import annotations

import hashlib
import json
import random
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tithe.advantages import AdvantagePlan, make_advantages
from tithe.config import Schedule
from tithe.errors import EngineError
from tithe.orchestration import (
    GroupSizes,
    Learner,
    Player,
    RolloutCounters,
    RolloutLoop,
    RolloutPlan,
    RunControl,
    ServedPolicy,
    TrainHooks,
    TrainLoop,
    TrainPlan,
    generate_with,
    run_training,
)
from tithe.pool import Curriculum, Pool, PromptSource
from tithe.staleness import Bounds
from tithe.types import Completion, FinishReason, PolicyVersion, PromptItem, Rollout, SamplingParams


def digest(*parts) -> str:
    return hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()


class FakeEngine:
    """Answers from a thread pool after a random delay, under the version a request names (or the served one)."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.versions: dict[str, tuple[int, str]] = {}
        self.served: str | None = None
        self.dropped: list[str] = []
        self.cancelled: list[int] = []
        self.requests = []
        self.delay_s = delay_s
        self.fault = lambda _request: None
        self._rng = random.Random(time.monotonic_ns())
        self._threads = ThreadPoolExecutor(4)

    def load(self, name: str, serial: int, weights: str) -> None:
        self.versions[name] = (serial, weights)
        self.served = name

    def submit(self, request) -> Future[Completion]:
        self.requests.append(request)
        return self._threads.submit(self._answer, request, request.adapter or self.served)

    def _answer(self, request, name: str | None) -> Completion:
        if self.delay_s:
            time.sleep(self._rng.random() * self.delay_s)
        self.fault(request)
        if name not in self.versions:
            raise EngineError(f"no version {name}")
        serial, weights = self.versions[name]
        p = request.params
        text = digest(weights, p.seed, p.group, p.sample, p.temperature, *request.prompt_ids)
        ids = np.frombuffer(bytes.fromhex(text[: 2 * p.max_new_tokens]), np.uint8).astype(np.int32)
        logp = -ids.astype(np.float32) / 100
        return Completion(ids, logp, logp, np.full(len(ids), serial, np.int32), FinishReason.STOP)

    def drop_adapter(self, name: str) -> None:
        self.dropped.append(name)
        del self.versions[name]

    def cancel(self, group: int) -> None:
        self.cancelled.append(group)

    def close(self) -> None:
        self._threads.shutdown()


class FakeEnv:
    """One turn; the reward is 1 when the first token is even. `fault` may raise or answer something else."""

    def __init__(self) -> None:
        self.fault = lambda _item, _request: "play"

    async def rollout(self, item, request, generate):
        instead = self.fault(item, request)
        if instead != "play":
            return instead
        c = await generate(request)
        right = float(c.token_ids[0] % 2 == 0)
        return Rollout(
            sample=request.params.sample,
            token_ids=c.token_ids,
            loss_mask=np.ones(len(c.token_ids), np.bool_),
            logp=c.logp,
            logp_behaviour=c.logp_behaviour,
            serials=c.serials,
            temperature=request.params.temperature,
            finish=c.finish,
            text=" ".join(map(str, c.token_ids)),
            reward=right,
            reward_parts={"answer": right, "fact.right": right, "fact.readable": 1.0},
        )


@dataclass(frozen=True)
class FakeStep:
    metrics: dict[str, float]
    skipped: bool = False


class FakeTrainer:
    """One micro-batch per group."""

    def __init__(self, weights: str = "start") -> None:
        self.weights = weights
        self.gathered: list[str] = []
        self.batches: list[list[int]] = []
        self.ages: list[int] = []
        self.skip = lambda _batch: False
        self.on_micro = lambda: None

    def plan(self, batch):
        self._skipping = self.skip(batch)
        self._ids = [group.group_id for group in batch.groups]
        self._ages = [batch.serial - group.min_serial for group in batch.groups]
        assert len(batch.advantages) == len(batch.groups)
        return list(zip(batch.groups, batch.advantages, strict=True))

    def accumulate(self, micro) -> None:
        self.on_micro()
        group, advantages = micro
        self.gathered += [r.text for r in group.rollouts] + [str(a[0]) for a in advantages if a is not None]

    def step(self) -> FakeStep:
        gathered, self.gathered = self.gathered, []
        if self._skipping:
            return FakeStep({"loss": float("nan")}, skipped=True)
        self.batches.append(self._ids)
        self.ages += self._ages
        self.weights = digest(self.weights, *gathered)
        return FakeStep({"loss": 0.5, "kl_mean": 0.0})


class InlineLane:
    def call(self, job, *args):
        return job(*args)


@dataclass
class Rows:
    """A metric sink that keeps its rows."""

    rows: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    def write(self, step, values) -> None:
        self.rows.append((step, dict(values)))

    def close(self) -> None:
        pass

    def named(self, name: str) -> list[tuple[int, float]]:
        return [(step, row[name]) for step, row in self.rows if name in row]


PARAMS = SamplingParams(max_new_tokens=6, seed=7)


class World:
    """Everything of one process of a run. `World(folder)` begins a run, `World(folder)` again resumes it."""

    def __init__(
        self,
        folder: Path,
        *,
        bounds: Bounds | None = None,
        prompts: int = 40,
        steps: int = 6,
        delay_s: float = 0.0,
        max_live: int = 4,
        buffer: int = 1000,
        on_publish="finish",
        timeout_s: float | None = None,
        schedule: Schedule | None = None,
        sizes: GroupSizes | None = None,
        curriculum: Curriculum | None = None,
        **plan,
    ) -> None:
        self.folder = folder
        self.bounds = bounds or Bounds(batch_rollouts=6, group_size=2, max_lag=0, max_age=0)
        path = folder / "pool.sqlite"
        fresh = not path.exists()
        self.pool = Pool.create(path, "run") if fresh else Pool.open(path)
        self.items = {f"p{i}": PromptItem(f"p{i}", text=f"prompt {i}") for i in range(prompts)}
        self.pool.bind_prompts(PromptSource(list(self.items), seed=1), max_failures=3, curriculum=curriculum)
        self.trainer = FakeTrainer()
        self.engine = FakeEngine(delay_s)
        self.env = FakeEnv()
        self.control = RunControl()
        self.counters = RolloutCounters()
        self.sink = Rows()
        self.published: list[PolicyVersion] = []
        self.before_load = lambda _version: None
        self.score = lambda _version: 0.5
        self.served = ServedPolicy(self.control, max_live=max_live, retire=self.engine.drop_adapter)
        self.player = Player(self.env, generate_with(self.engine), lambda item: [len(item.id), 1], timeout_s)
        rewind = None if fresh else self.pool.rewind_to_checkpoint()
        hooks = TrainHooks(
            publish=self.publish,
            evaluate=lambda version: {"eval_sampled": self.score(version)},
            save=self.save,
            extra_state=lambda: {"kl_coef": 0.01},
            prune=lambda: None,
        )
        self.learner = Learner(
            trainer=self.trainer,
            lane=InlineLane(),
            advantages=lambda groups, _scores, _whole: make_advantages(groups, AdvantagePlan()),
            control=self.control,
        )
        self.train = TrainLoop(
            pool=self.pool,
            learner=self.learner,
            served=self.served,
            control=self.control,
            bounds=self.bounds,
            plan=TrainPlan(max_steps=steps, **{"checkpoint_every": 2, "stall_s": 20.0, **plan}),
            hooks=hooks,
            counters=self.counters,
            sink=self.sink,
            lineage=0 if fresh else 1,
        )
        self.rollouts = RolloutLoop(
            pool=self.pool,
            items=self.items,
            player=self.player,
            engine=self.engine,
            served=self.served,
            control=self.control,
            bounds=self.bounds,
            plan=RolloutPlan(PARAMS, on_publish, buffer, 12, schedule=schedule, sizes=sizes or GroupSizes()),
            counters=self.counters,
        )
        if rewind is not None and rewind.checkpoint is not None:
            self.trainer.weights = json.loads((rewind.checkpoint.directory / "weights.json").read_text())
            self.train.resume_from(rewind.checkpoint)

    def publish(self, version: PolicyVersion) -> str:
        self.before_load(version)
        name = f"run-{version.lineage}-v{version.serial}"
        self.engine.load(name, version.serial, self.trainer.weights)
        self.published.append(version)
        return name

    def save(self, serial: int, _state) -> Path:
        folder = self.folder / f"step_{serial}"
        folder.mkdir(exist_ok=True)
        (folder / "weights.json").write_text(json.dumps(self.trainer.weights))
        return folder

    def run(self):
        try:
            return run_training(self.rollouts, self.train)
        finally:
            self.close()

    def close(self) -> None:
        self.engine.close()
        self.pool.close()

    def stop_soon(self, reason, when) -> None:
        """Request a stop from another thread once `when()` holds."""

        def watch() -> None:
            while not when():
                time.sleep(0.001)
            self.control.request_stop(reason)

        threading.Thread(target=watch, daemon=True).start()
