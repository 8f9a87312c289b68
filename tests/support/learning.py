"""A tiny base with everything that learns on it: lane, shared engine, trainer, published versions with their probes.

with Rig(decoder, tmp_path) as rig:
    name = rig.publish()                      # the trainer's adapter, proved and served
    groups = rig.rollouts([[5, 9]], 4)        # sampled by the engine, rewarded by `reward`
    rig.learn(groups)                         # one optimizer step
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from torch import Tensor

from support.decoders import random_adapter
from tithe.advantages import batch_advantages
from tithe.engines import SharedEngine
from tithe.engines.admission import own_pages
from tithe.engines.cache import PromptCache
from tithe.engines.sequences import LiveVersion, Prompt
from tithe.lora import LoraSpec, init_tensors
from tithe.losses import Aggregation, LossSettings
from tithe.models import Decoder, Lane
from tithe.models.lane import _run, _tick
from tithe.trainer import FullTrainer, Perturbed, StepResult, Trainer, TrainerSettings, probe_masters
from tithe.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    PolicyVersion,
    Rollout,
    RolloutGroup,
    SamplingParams,
    TrainingBatch,
)
from tithe.weight_sync import DirectoryChannel, Probe, manifest_fields

SPEC = LoraSpec(r=4, alpha=8)
SETTINGS = TrainerSettings(
    algorithm="grpo",
    loss=LossSettings(aggregation=Aggregation.TOKEN_MEAN),
    norm_tokens=8,
    lr=1e-2,
    micro_batch_tokens=64,
)
PROBE_PROMPT, PROBE_TARGET = (5, 17, 9, 33, 21), (40, 8, 61, 12, 90, 7)
WAIT_S = 60.0
"""Longest wait for anything a test expects to happen."""


def first_token_reward(completion: Completion) -> float:
    """Pays for even token ids: something a tiny random model can learn."""
    return float(np.mean(completion.token_ids % 2 == 0))


def trainer(decoder: Decoder, settings: TrainerSettings = SETTINGS, *, seed: int = 0, size: float = 0.05) -> Trainer:
    """A trainer on a random adapter (`size` 0: B is zero)."""
    tensors = random_adapter(decoder, SPEC, seed, size) if size else init_tensors(SPEC, decoder.linear_shapes(), seed)
    return Trainer(decoder, SPEC, tensors, settings)


def request(
    prompt: Sequence[int], *, adapter: str | None = None, group: int = 0, sample: int = 0, **params: Any
) -> GenerateRequest:
    """A request with short answers."""
    values: dict[str, Any] = {"max_new_tokens": 8, "seed": 7, "group": group, "sample": sample, **params}
    return GenerateRequest(tuple(int(t) for t in prompt), SamplingParams(**values), adapter)


def same(a: Completion, b: Completion) -> bool:
    """Bit for bit, versions aside."""
    return (
        np.array_equal(a.token_ids, b.token_ids)
        and np.array_equal(a.logp, b.logp)
        and np.array_equal(a.logp_behaviour, b.logp_behaviour)
        and a.finish == b.finish
    )


def rollout(
    ids: Sequence[int],
    *,
    sample: int = 0,
    logp: Sequence[float] | None = None,
    mask: Sequence[bool] | None = None,
    reward: float | None = 0.0,
    temperature: float = 1.0,
) -> Rollout:
    """A rollout by hand."""
    n = len(ids)
    values = np.array(logp if logp is not None else [-3.0] * n, np.float32)
    return Rollout(
        sample=sample,
        token_ids=np.array(ids, np.int32),
        loss_mask=np.array(mask if mask is not None else [True] * n, np.bool_),
        logp=values,
        logp_behaviour=values,
        serials=np.zeros(n, np.int32),
        temperature=temperature,
        finish=FinishReason.STOP,
        reward=reward,
    )


def group(prompt: Sequence[int], rollouts: Sequence[Rollout], group_id: int = 0) -> RolloutGroup:
    """A group by hand."""
    return RolloutGroup(group_id, f"p{group_id}", np.array(prompt, np.int32), tuple(rollouts), 0, 0)


def batch(groups: Sequence[RolloutGroup], advantages: Sequence[Sequence[float]] | None = None) -> TrainingBatch:
    """A batch with one advantage per rollout, or those that its rewards give."""
    if advantages is None:
        return TrainingBatch(groups, batch_advantages(groups, "std"), 0)
    rows = [
        [np.full(len(r.token_ids), a, np.float32) for r, a in zip(g.rollouts, row, strict=True)]
        for g, row in zip(groups, advantages, strict=True)
    ]
    return TrainingBatch(groups, rows, 0)


def train(learner: Trainer | FullTrainer, what: TrainingBatch) -> StepResult:
    """One optimizer step, without a lane."""
    for micro in learner.plan(what):
        learner.accumulate(micro)
    return learner.step()


class Forgetful(PromptCache):
    """A prompt cache whose keys lack the version: what D01 warns of."""

    def acquire(self, version: LiveVersion, request: GenerateRequest) -> tuple[Prompt, list[int]] | None:
        for prompt in list(self._prompts.values()):
            if prompt.tokens == request.prompt_ids and prompt.ready:
                prompt.users += 1
                return prompt, self.allocator.take(own_pages(request))
        return super().acquire(version, request)


class ManualLane(Lane):
    """Jobs run at once in the caller's thread, ticks when a test says so: no time, no races."""

    def submit(self, job: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        _run(lambda: job(*args), future)
        return future

    def call(self, job: Callable[..., Any], *args: Any) -> Any:
        return job(*args)

    def tick(self, n: int = 1) -> None:
        """n rounds of what the thread of a real lane does."""
        for _ in range(n):
            for ticker in self._tickers:
                if ticker.has_work():
                    _tick(ticker)

    def settle(self) -> None:
        """Tick until nothing is left to do."""
        while any(ticker.has_work() for ticker in self._tickers):
            self.tick()


def snapshot(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies: what a trainer hands out is what it goes on changing."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


@dataclass(eq=False)
class Rig:
    """See the module. Engine options go to `SharedEngine`. `threaded` takes a real lane."""

    decoder: Decoder
    root: Path
    settings: TrainerSettings = SETTINGS
    options: Mapping[str, Any] | None = None
    threaded: bool = False

    def __post_init__(self) -> None:
        self.lane = Lane().start() if self.threaded else ManualLane()
        values: dict[str, Any] = {"max_running": 8, "kv_bytes": 1 << 20, "prefill_tokens": 32, **(self.options or {})}
        self.engine = SharedEngine(self.decoder, self.lane, **values)
        self.trainer = trainer(self.decoder, self.settings, size=0.0)
        self.channel = DirectoryChannel(self.root / "adapters", "rig")
        self.serial = 0
        self._parent_logp: tuple[float, ...] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.lane.close()

    # ------------------------------------------------------------------ versions

    def write(self, tensors: Mapping[str, Tensor] | None = None, *, probe: Probe | None = None, **changes: Any) -> Path:
        """Publish on disk only, with an honest probe unless one is given. `changes` replace manifest fields."""
        tensors = self.trainer.adapter_tensors() if tensors is None else dict(tensors)
        fields: dict[str, Any] = {
            "lora": self.trainer.spec,
            "parent": f"v{self.serial - 1}" if self.serial else None,
            "optimizer_step": self.trainer.optimizer_step,
            "base_checksum": self.decoder.checksum,
            "numeric_mode": self.decoder.options.numeric_mode,
            "probe": self._probe(tensors) if probe is None else probe,
        }
        version = PolicyVersion(0, self.serial)
        self.serial += 1
        return self.channel.publish(version, tensors, manifest_fields(**{**fields, **changes}))

    def _probe(self, tensors: Mapping[str, Tensor]) -> Probe:
        def score(masters: Mapping[str, Tensor]) -> list[float]:
            passes, spec = self.trainer.passes, self.trainer.spec
            return self.lane.call(probe_masters, passes, PROBE_PROMPT, PROBE_TARGET, masters, spec)

        logp, shaken = score(tensors), score(Perturbed(tensors))
        parent, self._parent_logp = self._parent_logp, tuple(logp)
        return Probe(
            token_ids=(*PROBE_PROMPT, *PROBE_TARGET),
            prompt_len=len(PROBE_PROMPT),
            logp=tuple(logp),
            noise_floor=max(abs(a - b) for a, b in zip(logp, shaken, strict=True)),
            parent_logp=parent,
        )

    def publish(self, tensors: Mapping[str, Tensor] | None = None) -> str:
        """Publish the trainer's adapter (or the given one) and have the engine prove and serve it."""
        return self.engine.load_adapter(self.write(tensors))

    def publish_random(self, seed: int, size: float = 0.2) -> str:
        """Publish an adapter that changes the answers."""
        return self.publish(random_adapter(self.decoder, SPEC, seed, size))

    # ------------------------------------------------------------------ requests and steps

    def answers(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """All at once."""
        futures = [self.engine.submit(r) for r in requests]
        if isinstance(self.lane, ManualLane):
            self.lane.settle()
        return [f.result(WAIT_S) for f in futures]

    def tick(self, n: int = 1) -> None:
        """Tick a manual lane."""
        assert isinstance(self.lane, ManualLane)
        self.lane.tick(n)

    def answer(self, one: GenerateRequest) -> Completion:
        """Alone."""
        return self.answers([one])[0]

    def rollouts(
        self,
        prompts: Sequence[Sequence[int]],
        samples: int,
        *,
        first_group: int = 0,
        reward: Callable[[Completion], float] = first_token_reward,
        **params: Any,
    ) -> list[RolloutGroup]:
        """Groups sampled from what is served."""
        requests = [
            request(prompt, group=first_group + g, sample=s, **params)
            for g, prompt in enumerate(prompts)
            for s in range(samples)
        ]
        done = self.answers(requests)
        groups: list[RolloutGroup] = []
        for g, prompt in enumerate(prompts):
            own = done[g * samples : (g + 1) * samples]
            rows = [
                replace(
                    rollout(c.token_ids.tolist(), sample=s, logp=c.logp.tolist(), reward=reward(c)),
                    serials=c.serials,
                    temperature=params.get("temperature", 1.0),
                )
                for s, c in enumerate(own)
            ]
            groups.append(group(prompt, rows, first_group + g))
        return groups

    def learn(self, groups: Sequence[RolloutGroup]) -> StepResult:
        """One optimizer step on the lane."""
        what = batch(groups)
        for micro in self.trainer.plan(what):
            self.lane.call(self.trainer.accumulate, micro)
        return self.lane.call(self.trainer.step)
