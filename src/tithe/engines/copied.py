"""The engine for policies that are whole models: every live version is a copy of its own, loaded from where it was
published.

consumes      `GenerateRequest`s, from any thread; published model directories
produces      `Completion`s with log-prob and version per token
waits for     the lane's ticks; KV pages of a request's version
unblocked by  `submit`; finished requests

A request finishes on the version it began with; a version's copy goes with its last request once it was dropped. Over
ranks each has copies of its own (of a mixture's experts its share), and all load, tick and drop together
(`tithe.engines.spread`).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from tithe.arch import read_checkpoint
from tithe.engines.sequences import LiveVersion, refuse
from tithe.engines.shared import SharedEngine
from tithe.errors import AdapterError, EngineError, PublishRefused
from tithe.models import ALONE, Lane, ModelOptions, Ranks, load_model, on_ranks
from tithe.types import Completion, GenerateRequest
from tithe.utils.memory import release_unused
from tithe.weight_sync import Manifest, Probe, read_manifest

T = TypeVar("T")

TOLERANCES = {"fp32": 1e-3, "bf16": 0.5}
"""Largest difference, in nats per token, between transformers' forward in a dtype and this engine's on the same
weights. In bf16 transformers also rounds the residual stream, which the engine keeps in float32. A quantized copy is
another policy: its difference is measured and has no bound."""

_ROUNDING = "Operands in float32 round less: set model.base_dtype = fp32"
_TIES = (
    "In a mixture the cause is mostly a tie of experts: two router scores that differ by less than rounding, of which "
    "transformers takes one and the copy the other. Operands in float32 round less: set model.base_dtype = fp32; or "
    "train an adapter (model.train = lora), which replays the sampler's experts (rl.router_replay = true)"
)

_GAUGES = ("running", "waiting", "live_versions", "kv_pages_free", "kv_pages", "kv_bytes")


@dataclass(frozen=True)
class SamplerGap:
    """|trainer's log-prob - sampler's| over a probe's tokens, in nats; `tolerance` None: measured, not bounded."""

    largest: float
    mean: float
    tolerance: float | None


def measure_gap(
    probe: Probe,
    answer: Sequence[float],
    previous: Sequence[float] | None,
    tolerance: float | None,
    name: str,
    *,
    is_mixture: bool = False,
) -> SamplerGap:
    """Compare a fresh copy's answer with the trainer's. Pure.

    Raises `PublishRefused` for an answer that is no numbers, that lies outside the tolerance, or that is the version's
    before to the bit while the trainer's moved by more than a quantized copy's own gap.
    """
    if len(answer) != len(probe.logp) or not all(math.isfinite(x) for x in answer):
        raise PublishRefused(f"{name} is refused: the copy's log-probs are no finite numbers; the old version serves")
    differences = [abs(a - b) for a, b in zip(answer, probe.logp, strict=True)]
    gap = SamplerGap(max(differences), sum(differences) / len(differences), tolerance)
    if tolerance is not None and gap.largest > tolerance:
        raise PublishRefused(
            f"{name} is refused: its copy answers {gap.largest:.3g} nats away from the trainer, {tolerance:g} is "
            f"allowed. {_TIES if is_mixture else _ROUNDING}; the old version keeps serving"
        )
    moved = 0.0
    if probe.parent_logp is not None:
        moved = max(abs(a - b) for a, b in zip(probe.logp, probe.parent_logp, strict=True))
    if previous is not None and list(previous) == list(answer) and moved > (0.0 if tolerance else gap.largest):
        raise PublishRefused(f"{name} is refused: its copy still answers as the version before; that one keeps serving")
    return gap


class CopiedEngine:
    """A `RolloutEngine` of whole models on one lane. Public methods are safe from any thread.

    `options` say how copies are held (quantized, say), `origin` is the checksum of the model a run began from,
    `numeric_mode` names trainer's and copy's arithmetic. Other `settings` go to each copy's `SharedEngine`.
    """

    def __init__(
        self,
        lane: Lane,
        options: ModelOptions,
        *,
        origin: str,
        numeric_mode: str,
        max_live_versions: int = 4,
        settings: Mapping[str, Any],
        ranks: Ranks = ALONE,
    ) -> None:
        self.lane, self.options, self.ranks = lane, options, ranks
        self._origin, self._mode, self._max_live = origin, numeric_mode, max_live_versions
        self._settings = dict(settings)
        self._copies: dict[str, SharedEngine] = {}
        self._engines: tuple[SharedEngine, ...] = ()  # the same, for readers without the lock
        self._dropped: list[str] = []
        self._served: str | None = None
        self._answer: tuple[Probe, list[float]] | None = None
        self._past: dict[str, float] = {}  # counters of copies that are gone
        self._lock = threading.RLock()
        self.gap: SamplerGap | None = None
        """Of the newest version that was proved."""
        lane.add_ticker(self)

    # ------------------------------------------------------------------ requests

    def submit(self, request: GenerateRequest) -> Future[Completion]:
        """Queue a request; never blocks. The future fails with `EngineError` when it can never be served."""
        with self._lock:
            copy = self._copy_of(request)
            if copy is not None:
                return copy.submit(replace(request, adapter=None))
        future: Future[Completion] = Future()
        refuse(future, EngineError(self._not_live(request)))
        return future

    def _copy_of(self, request: GenerateRequest) -> SharedEngine | None:
        name = self._served if request.adapter is None else request.adapter
        return None if name is None or name in self._dropped else self._copies.get(name)

    def _not_live(self, request: GenerateRequest) -> str:
        return f"version {request.adapter!r} is not live; live are: {', '.join(self._copies) or 'none'}"

    def problem(self, request: GenerateRequest) -> str | None:
        """Why a request can never be served; None when it can."""
        with self._lock:
            copy = self._copy_of(request)
        return self._not_live(request) if copy is None else copy.problem(replace(request, adapter=None))

    def cancel(self, group: int) -> None:
        """End all requests of a group with FinishReason.CANCELLED."""
        for copy in self._engines:
            copy.cancel(group)

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing runs or waits; False on timeout."""
        deadline = time.monotonic() + timeout_s
        return all(copy.drain(max(0.0, deadline - time.monotonic())) for copy in self._engines)

    def stats(self) -> Mapping[str, float]:
        """As `SharedEngine.stats`, over all copies; `kv_bytes` counts every copy's pages."""
        with self._lock:
            total = dict.fromkeys((*_GAUGES, *self._past), 0.0) | self._past
            for copy in self._copies.values():
                for key, value in copy.stats().items():
                    total[key] = total.get(key, 0.0) + value
            total["live_versions"] = float(len(self._copies))
            return total

    def copy_bytes(self) -> int:
        """Weights of all live copies."""
        return sum(copy.decoder.resident_bytes() for copy in self._engines)

    # ------------------------------------------------------------------ versions

    def load_adapter(self, directory: Path) -> str:
        """Read, check, load and prove a published model, then serve it; blocks until done.

        Raises `AdapterError` (files, names, origin, numeric mode), `ModelError` (weights), `PublishRefused` (probe) or
        `EngineError` (too many live versions); the served version is then unchanged.
        """
        problem: AdapterError | EngineError | None = None
        loaded: tuple[Manifest, SharedEngine] | None = None
        try:
            loaded = self._copy_from(directory)
        except (AdapterError, EngineError) as error:
            problem = error
        self.ranks.wait_for_all()  # reading a whole model may take one of them much longer
        self.ranks.agree(problem)
        assert loaded is not None
        manifest, copy = loaded
        name, probe = manifest.name, manifest.probe
        answer = copy.score(None, probe.prompt_ids, probe.completion_ids)
        refused: PublishRefused | None = None
        try:
            previous, is_mixture = self._answer_to(probe), bool(copy.decoder.blocks())
            self.gap = measure_gap(probe, answer, previous, self._tolerance(), name, is_mixture=is_mixture)
        except PublishRefused as error:
            refused = error
        self.ranks.agree(refused)
        with self._lock:
            self._answer = (probe, answer)
            self._copies[name] = copy
            self._engines = tuple(self._copies.values())
            self._dropped = [other for other in self._dropped if other != name]
            self._served = name
        self.lane.wake()
        return name

    def _copy_from(self, directory: Path) -> tuple[Manifest, SharedEngine]:
        """A published version's manifest and its copy, which is new unless it is the very same version."""
        manifest = read_manifest(directory)
        self._check(manifest)
        with self._lock:
            copy = self._copies.get(manifest.name)
            if copy is None and len(self._copies) >= self._max_live:
                raise EngineError(f"{len(self._copies)} copies are live, engine.max_live_versions is {self._max_live}")
        if copy is None:
            copy = self.lane.call(self._load, directory, LiveVersion(manifest.name, manifest.version.serial, None))
        return manifest, copy

    def _check(self, manifest: Manifest) -> None:
        if manifest.base_checksum != self._origin:
            raise AdapterError(f"{manifest.name} was trained from another model: set model.path to that one")
        if manifest.numeric_mode != self._mode:
            raise AdapterError(
                f"{manifest.name} was published for {manifest.numeric_mode}, this engine's copies are {self._mode}: "
                "set model.base_dtype, model.compute_dtype and model.quantize as in training"
            )

    def _load(self, directory: Path, version: LiveVersion) -> SharedEngine:
        checkpoint, ranks = read_checkpoint(directory), self.ranks
        if ranks.size == 1:
            decoder = load_model(checkpoint, self.options)
        else:
            decoder = on_ranks(load_model(checkpoint, self.options, ranks.shard), ranks)
        release_unused()
        return SharedEngine(decoder, _Berth(self.lane), bare=version, ranks=ranks, **self._settings)

    def _answer_to(self, probe: Probe) -> list[float] | None:
        """What the version before answered to the same question."""
        if self._answer is None or self._answer[0].token_ids != probe.token_ids:
            return None
        return self._answer[1]

    def _tolerance(self) -> float | None:
        return None if self.options.quantize != "none" else TOLERANCES[self.options.base_dtype]

    def score(self, adapter: str | None, prompt: Sequence[int], target: Sequence[int]) -> list[float]:
        """log-probs at T = 1 of given completion tokens under a live version (None: the served one)."""
        name = self._served if adapter is None else adapter
        copy = None if name is None else self._copies.get(name)
        if copy is None:
            raise EngineError(f"version {adapter!r} is not live")
        return copy.score(None, prompt, target)

    def drop_adapter(self, name: str) -> None:
        """Forget a version: new requests for it are refused, its copy goes with its last request. The served version
        cannot be dropped.
        """
        with self._lock:
            if name not in self._copies or name in (self._served, *self._dropped):
                return
            self._dropped.append(name)
        self.lane.submit(self._forget_unused)

    def _forget_unused(self) -> None:
        """On the lane: let go of dropped copies that have nothing left to do. Ranks do so together."""
        if self.ranks.size == 1:
            self.forget([not used for used in self.dropped_in_use()])

    def dropped_in_use(self) -> list[bool]:
        """Of dropped copies: whether requests here are under them still."""
        with self._lock:
            return [self._copies[name].has_work() for name in self._dropped]

    def forget(self, which: Sequence[bool]) -> None:
        """On the lane: let go of dropped copies that no request is under."""
        with self._lock:
            gone = [name for name, goes in zip(self._dropped, which, strict=True) if goes]
            for name in gone:
                counted = self._copies.pop(name).stats()
                for key in counted.keys() - set(_GAUGES):
                    self._past[key] = self._past.get(key, 0.0) + counted[key]
            self._dropped = [name for name in self._dropped if name not in gone]
            self._engines = tuple(self._copies.values())
        if gone:
            release_unused()

    # ------------------------------------------------------------------ the lane's ticks

    def has_work(self) -> bool:
        """Whether a tick would do something."""
        return any(copy.has_work() for copy in self._engines)

    def tick(self) -> None:
        """One tick of every copy with work; over ranks of every copy, since others may have some."""
        for copy in self._engines:
            if copy.has_work() or self.ranks.size > 1:
                copy.tick()
        if self._dropped:
            self._forget_unused()

    def fail(self, error: BaseException) -> None:
        """End every request."""
        for copy in self._engines:
            copy.fail(error)


class _Berth(Lane):
    """A copy's place on the lane: its jobs go there, its ticks come from the `CopiedEngine` that holds it."""

    def __init__(self, lane: Lane) -> None:
        super().__init__("tithe-berth")
        self._lane = lane

    def add_ticker(self, ticker: object) -> None:
        """Nothing: the holder ticks."""

    def start(self) -> Lane:
        """Nothing: the lane itself runs."""
        return self

    def wake(self) -> None:
        """Wake the lane."""
        self._lane.wake()

    @property
    def is_closed(self) -> bool:
        """As the lane."""
        return self._lane.is_closed

    def submit(self, job: Callable[..., T], *args: Any) -> Future[T]:
        """Queue a job on the lane."""
        return self._lane.submit(job, *args)

    def call(self, job: Callable[..., T], *args: Any) -> T:
        """Queue a job on the lane and wait for its result."""
        return self._lane.call(job, *args)

    def close(self, timeout_s: float = 30.0) -> None:
        """Nothing: the lane has an owner."""
