"""The shared engine: continuous batching on the trainer's own base, adapters by version, tokens with their log-probs.

consumes      `GenerateRequest`s, from any thread; published adapter directories
produces      `Completion`s with log-prob and version per token
waits for     the lane's ticks; KV pages (a request begins when every page it may ever need is free)
unblocked by  `submit`; finished requests
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from tithe.engines.admission import check_origin, problem_of
from tithe.engines.batch import Forwards, Work, draws, write_table
from tithe.engines.cache import PromptCache
from tithe.engines.sequences import BASE, CLOSED, LiveVersion, Prompt, Running, Waiting, completion, refuse, resolve
from tithe.errors import AdapterError, EngineError
from tithe.models import ALONE, PAGE, Decoder, ForwardPlan, Head, KVPages, Lane, Ranks
from tithe.types import Completion, FinishReason, GenerateRequest, SamplingParams
from tithe.weight_sync import Probe, compare_probe, load_published

OnPublish = Literal["finish", "recompute", "keep"]


class SharedEngine:
    """A `RolloutEngine` on a decoder's lane. Public methods are safe from any thread; pages, plan and lists of running
    requests are touched on the lane only.

    `on_publish` says what happens to requests without an adapter's name when another version is served: `finish` keeps
    the version they began with, `recompute` rebuilds their keys and values, `keep` continues over the old ones. A
    mixture's completions carry the experts that every position took, for training to replay, if `record_experts`.
    `bare` is the version that its base is by itself: where every parameter is trained, each version is a base. On
    several `ranks` each has an engine for requests of its own, and all tick, load and drop together
    (`tithe.engines.spread`).
    """

    def __init__(
        self,
        decoder: Decoder,
        lane: Lane,
        *,
        max_running: int = 64,
        kv_bytes: int = 256 << 20,
        prefill_tokens: int = 512,
        max_live_versions: int = 4,
        on_publish: OnPublish = "finish",
        record_experts: bool = True,
        decode: Callable[[Sequence[int]], str] | None = None,
        bare: LiveVersion = BASE,
        ranks: Ranks = ALONE,
    ) -> None:
        self.decoder, self.lane, self.on_publish, self.ranks = decoder, lane, on_publish, ranks
        self._record_experts = record_experts
        self._decode, self._max_live, self._max_running = decode, max_live_versions, max_running
        operand = decoder.options.operand_dtype
        most = 2 * max_running * -(-decoder.max_context // PAGE)
        pages = max(1, min(kv_bytes // KVPages.page_bytes(decoder.spec, operand), most))
        self.pages = KVPages(decoder.spec, pages, operand)
        # a slot per prompt that may be in use, as many idle ones, and one for scoring
        self._cache = PromptCache(self.pages, first_slot=max_running, slots=2 * max_running + 1)
        self._prefill_tokens, self._rows = prefill_tokens, max_running + prefill_tokens
        self._plan = ForwardPlan(
            decoder,
            self.pages,
            max_rows=self._rows,
            sequences=3 * max_running + 2,
            max_positions=decoder.max_context,
        )
        self._forwards = Forwards(self._plan, ranks)
        self._score_slot = 3 * max_running + 1
        self._head = Head(decoder, chunk_rows=max(64, max_running))
        self._waiting: deque[Waiting] = deque()
        self._running: list[Running] = []
        self._slots = list(range(max_running - 1, -1, -1))
        self._live: dict[str, LiveVersion] = {}
        self._dropped: list[LiveVersion] = []  # still in use by requests that began on them
        self._served = bare
        self._answers: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[float]] = {}
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        self._counts: dict[str, float] = dict.fromkeys(
            ("completions", "generated_tok", "prefill_tok", "decode_s", "prefill_s", "prompt_hits", "prompt_misses"),
            0.0,
        )
        lane.add_ticker(self)

    # ------------------------------------------------------------------ requests

    def submit(self, request: GenerateRequest) -> Future[Completion]:
        """Queue a request; never blocks. The future fails with `EngineError` when it can never be served."""
        future: Future[Completion] = Future()
        with self._lock:
            problem = self.problem(request) if not self.lane.is_closed else CLOSED
            if problem is None:
                version = self._served if request.adapter is None else self._live[request.adapter]
                self._waiting.append(Waiting(request, future, version))
        if problem is not None:
            refuse(future, EngineError(problem))
        self.lane.wake()
        return future

    def problem(self, request: GenerateRequest) -> str | None:
        """Why a request can never be served; None when it can."""
        problem = self._problem(request)
        with self._lock:
            if problem is None and request.adapter is not None and request.adapter not in self._live:
                problem = f"adapter {request.adapter!r} is not live; live are: {', '.join(self._live) or 'none'}"
        return problem

    def _problem(self, request: GenerateRequest) -> str | None:
        return problem_of(request, self.decoder, self.pages.pages, can_decode=self._decode is not None)

    def cancel(self, group: int) -> None:
        """End all requests of a group with FinishReason.CANCELLED; what others have left behind is not kept."""
        with self._lock:
            for seq in self._running:
                seq.cancelled = seq.cancelled or seq.request.params.group == group
            gone = [w for w in self._waiting if w.request.params.group == group]
            self._waiting = deque(w for w in self._waiting if w.request.params.group != group)
            self._idle.notify_all()
        for w in gone:
            resolve(w.future, completion([], [], [], [], FinishReason.CANCELLED))
        self.lane.submit(self._cache.drop_group, group)
        if gone:
            self.lane.submit(self._forget_unused)
        self.lane.wake()

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing runs or waits; False on timeout."""
        with self._idle:
            return self._idle.wait_for(lambda: not (self._running or self._waiting), timeout_s)

    def stats(self) -> Mapping[str, float]:
        """Counters (`generated_tok`, `decode_s`, …) and gauges (`running`, `kv_pages_free`, …)."""
        with self._lock:
            return {
                **self._counts,
                "reused_tok": float(self._cache.reused_tok),
                "running": float(len(self._running)),
                "waiting": float(len(self._waiting)),
                "live_versions": float(len(self._live) + len(self._dropped)),
                "kv_pages_free": float(self._cache.allocator.free),
                "kv_pages": float(self.pages.pages),
                "kv_bytes": float(self.pages.n_bytes),
            }

    # ------------------------------------------------------------------ versions

    def load_adapter(self, directory: Path) -> str:
        """Read, check, load and prove a published version, then serve it; blocks until done.

        Raises `AdapterError` (files, names, base, numeric mode), `PublishRefused` (probe) or `EngineError` (too many
        live versions, a probe that the engine cannot hold); the served version is then unchanged.
        """
        problem: AdapterError | EngineError | None = None
        loaded: tuple[Probe, LiveVersion] | None = None
        try:
            loaded = self._load(directory)
        except (AdapterError, EngineError) as error:
            problem = error
        self.ranks.agree(problem)
        assert loaded is not None
        self.lane.call(self._prove_and_serve, *loaded)
        return loaded[1].name

    def _load(self, directory: Path) -> tuple[Probe, LiveVersion]:
        """A published version in the engine's own copy, not served yet, and what proves it."""
        manifest, tensors, spec = load_published(directory, self.decoder.linear_shapes())
        check_origin(manifest, self.decoder)
        with self._lock:
            if len(self._live) >= self._max_live and manifest.name not in self._live:
                raise EngineError(f"{len(self._live)} versions are live, engine.max_live_versions is {self._max_live}")
            version = self._live.get(manifest.name)
        if version is None:  # else the very same version, which may have requests: proved again, not held twice
            model = self.lane.call(self.decoder.build_adapter, tensors, spec)
            version = LiveVersion(manifest.name, manifest.version.serial, model)
        return manifest.probe, version

    def _prove_and_serve(self, probe: Probe, version: LiveVersion) -> None:
        """Every rank asks its own engine; all serve the version, or none."""
        self._forwards.serve([*self._held(), version])
        try:
            answer = self._forwards.together(lambda: self._prove(probe, version))
        except BaseException:
            if version.name not in self._live:
                self._forget(version)
            self._forwards.serve(self._held())
            raise
        key = (probe.prompt_ids, probe.completion_ids)
        self._answers = {k: v for k, v in self._answers.items() if k[0] == BASE.name and k[1:] == key}
        self._answers[version.name, *key] = answer
        self._serve(version)

    def _prove(self, probe: Probe, version: LiveVersion) -> list[float]:
        prompt, target = probe.prompt_ids, probe.completion_ids
        answer = self._score(version, prompt, target)
        previous = None if self._served is BASE else self._remembered(self._served, prompt, target)
        compare_probe(probe, answer, previous, self._remembered(BASE, prompt, target)).require(version.name)
        return answer

    def _held(self) -> list[LiveVersion]:
        """Versions that requests may be under, in the order that all ranks have."""
        return [*self._live.values(), *self._dropped]

    def _remembered(self, version: LiveVersion, prompt: tuple[int, ...], target: tuple[int, ...]) -> list[float]:
        """What a version answered to this probe when it was proved; asked again only for another probe."""
        key = (version.name, prompt, target)
        if key not in self._answers:
            self._answers[key] = self._score(version, prompt, target)
        return self._answers[key]

    def drop_adapter(self, name: str) -> None:
        """Forget a version: new requests for it are refused, running ones finish, and its pages go with the last. The
        served version cannot be dropped.
        """
        with self._lock:
            version = self._live.get(name)
            if version is None or version is self._served:
                return
            self._dropped.append(self._live.pop(name))
        self.lane.submit(self._forget_unused)

    def score(self, adapter: str | None, prompt: Sequence[int], target: Sequence[int]) -> list[float]:
        """log-probs at T = 1 of given completion tokens, through the prompt cache and pages that serve requests. Ranks
        are asked together."""
        with self._lock:
            version = self._served if adapter is None else self._live.get(adapter)
        if version is None:
            raise EngineError(f"adapter {adapter!r} is not live")
        asked = tuple(prompt), tuple(target)
        return self.lane.call(lambda: self._forwards.together(lambda: self._score(version, *asked)))

    def _serve(self, version: LiveVersion) -> None:
        with self._lock:
            self._live[version.name] = version
            self._served = version
            if self.on_publish == "finish":
                return
            for w in self._waiting:
                w.version = version if w.request.adapter is None else w.version
            followers = [s for s in self._running if s.request.adapter is None]
        for seq in followers:
            if self.on_publish == "keep" and seq.computed:
                seq.is_mixed, seq.version = seq.is_mixed or seq.version is not version, version
            else:
                self._rebuild(seq, version)
        self._forget_unused()

    def _rebuild(self, seq: Running, version: LiveVersion) -> None:
        """Start a running request's keys and values again under another version; its tokens stay.

        When pages are too few for one more copy of its prompt, it finishes under the version it has.
        """
        got = self._cache.acquire(version, seq.request)
        if got is not None:
            self._cache.release(seq.prompt, seq.own)
            seq.version, seq.computed, seq.is_mixed = version, 0, False
            seq.prompt, seq.own = got
            seq.experts.clear()

    def _forget_unused(self) -> None:
        """On the lane: let go of dropped versions whose last request has ended. Ranks do so together."""
        if self.ranks.size == 1:
            self.forget([not used for used in self.dropped_in_use()])

    def dropped_in_use(self) -> list[bool]:
        """Of dropped versions: whether requests here are under them still."""
        with self._lock:
            used = {request.version for request in (*self._running, *self._waiting)}
            return [version in used for version in self._dropped]

    def forget(self, which: Sequence[bool]) -> None:
        """On the lane: let go of dropped versions that no request is under."""
        with self._lock:
            gone = [version for version, goes in zip(self._dropped, which, strict=True) if goes]
            self._dropped = [version for version in self._dropped if version not in gone]
        for version in gone:
            self._forget(version)
        if gone:
            self._forwards.serve(self._held())

    def _forget(self, version: LiveVersion) -> None:
        self._cache.drop_version(version)
        if version.model is not None:
            self._plan.forget(version.model)

    # ------------------------------------------------------------------ the tick

    def has_work(self) -> bool:
        """Whether a tick would do something."""
        return bool(self._running or self._waiting)

    def fail(self, error: BaseException) -> None:
        """End every request: a tick has failed, so none can be trusted."""
        with self._lock:
            running, waiting = self._running, list(self._waiting)
            self._running = []
            self._waiting.clear()
        for seq in running:
            self._cache.release(seq.prompt, seq.own)
            self._slots.append(seq.slot)
        self._forget_unused()
        for request in (*running, *waiting):
            refuse(request.future, EngineError(f"the engine failed: {error!r}"))
        with self._idle:
            self._idle.notify_all()

    def tick(self) -> None:
        """Admit; compute some of the prompts and one position of every running request in one forward; draw, finish."""
        self._advance(admitting=True)

    def _advance(self, *, admitting: bool) -> None:
        self._finish([s for s in self._running if s.cancelled or s.future.cancelled()], FinishReason.CANCELLED)
        if admitting:
            self._admit()
        started = time.perf_counter()
        prompts = self._prompt_work()
        prefilled = sum(len(w.tokens) for w in prompts)
        sequences = self._decode_work(self._rows - prefilled)
        decoded = sum(len(w.tokens) for w in sequences)
        last = self._compute(prompts, sequences)
        middle = time.perf_counter()
        drawn = self._draw_ready(last)
        share = prefilled / max(prefilled + decoded, 1)  # of the forward's time: rows cost the same
        with self._lock:
            self._counts["prefill_tok"] += prefilled
            self._counts["prefill_s"] += share * (middle - started)
            self._counts["generated_tok"] += drawn
            self._counts["decode_s"] += time.perf_counter() - middle + (1 - share) * (middle - started)

    def _admit(self) -> None:
        while self._waiting and self._slots:
            with self._lock:
                if not self._waiting:
                    return
                w = self._waiting[0]
                got = self._cache.acquire(w.version, w.request)
                if got is None:
                    return  # pages come back when running requests finish
                self._waiting.popleft()
                prompt, own = got
                is_new = not prompt.ready and prompt.users == 1
                self._counts["prompt_misses" if is_new else "prompt_hits"] += 1
                self._running.append(Running(w.request, w.future, w.version, self._slots.pop(), prompt, own))

    def _prompt_work(self) -> list[Work[Prompt | Running]]:
        """Prompts to compute, at most `_prefill_tokens` rows; a longer prompt continues in the next tick."""
        room = self._prefill_tokens
        work: list[Work[Prompt | Running]] = []
        for prompt in self._cache.unready():
            if room == 0:
                break
            tokens = list(prompt.tokens[prompt.computed : prompt.computed + room])
            write_table(self._plan, prompt.slot, prompt.pages)
            work.append(Work(prompt, prompt.version, prompt.slot, prompt.computed, tokens))
            room -= len(tokens)
        return work

    def _decode_work(self, room: int) -> list[Work[Prompt | Running]]:
        """The next position of every request whose prompt is ready; many positions where they are rebuilt."""
        work: list[Work[Prompt | Running]] = []
        for seq in self._running:
            if seq.prompt.ready:
                self._begin(seq)
                tokens = seq.pending()[:room]
                if tokens:
                    work.append(Work(seq, seq.version, seq.slot, seq.computed, tokens))
                    room -= len(tokens)
        return work

    def _begin(self, seq: Running) -> None:
        """Give a request whose prompt is ready its own pages behind the prompt's, once."""
        if seq.computed == 0:
            seq.computed = len(seq.request.prompt_ids)
            write_table(self._plan, seq.slot, self._cache.fork(seq.prompt, seq.own))

    def _compute(
        self, prompts: list[Work[Prompt | Running]], sequences: list[Work[Prompt | Running]]
    ) -> dict[int, torch.Tensor]:
        """One forward over all rows, which do not notice each other. The last row [H] of every running request, by its
        id; views that the next forward overwrites."""
        last: dict[int, torch.Tensor] = {}
        work = [*prompts, *sequences]
        for done in self._forwards.run(work):
            owner = done.work.owner
            owner.computed += len(done.work.tokens)
            if done.experts is not None and self._record_experts:
                owner.experts.append(done.experts)
            if isinstance(owner, Running):
                last[id(owner)] = done.x[-1]
            elif owner.computed == len(owner.tokens):
                owner.last_x = done.x[-1].clone()
        return last

    def _draw_ready(self, last: dict[int, torch.Tensor]) -> int:
        """Draw one token for every request whose positions are all computed. Returns how many were drawn."""
        ready: list[Running] = []
        rows: list[torch.Tensor] = []
        for seq in self._running:
            if not seq.prompt.ready:
                continue
            self._begin(seq)
            if seq.computed == seq.length:
                row = last.get(id(seq), seq.prompt.last_x)
                assert row is not None
                ready.append(seq)
                rows.append(row)
        if ready:
            self._draw(ready, torch.stack(rows))
        return len(ready)

    def _draw(self, ready: list[Running], x: torch.Tensor) -> None:
        drawn = self._head.sample(x, draws(ready))
        finished: dict[FinishReason, list[Running]] = {FinishReason.STOP: [], FinishReason.LENGTH: []}
        for i, seq in enumerate(ready):
            seq.tokens.append(int(drawn.token[i]))
            seq.logp.append(float(drawn.logp[i]))
            seq.behaviour.append(float(drawn.logp_behaviour[i]))
            seq.serials.append(seq.version.serial)
            reason = seq.finish_reason(self._decode)
            if reason is not None:
                finished[reason].append(seq)
        for reason, sequences in finished.items():
            self._finish(sequences, reason)

    def _finish(self, sequences: list[Running], reason: FinishReason) -> None:
        if not sequences:
            return
        gone = set(map(id, sequences))
        with self._lock:
            self._running = [s for s in self._running if id(s) not in gone]
            self._counts["completions"] += len(sequences)
        for seq in sequences:
            if reason is FinishReason.STOP and seq.request.may_continue and not seq.is_mixed:
                self._cache.keep(seq)
            else:
                self._cache.release(seq.prompt, seq.own)
            self._slots.append(seq.slot)
            resolve(seq.future, seq.completion(reason))
        if self._dropped:
            self._forget_unused()
        if not self.has_work():  # at L = 0 the trainer is next: it may have the memory
            self.pages.give_back(self._cache.allocator.free_pages())
        with self._idle:
            self._idle.notify_all()

    # ------------------------------------------------------------------ scoring

    def _score(self, version: LiveVersion, prompt: tuple[int, ...], target: tuple[int, ...]) -> list[float]:
        """On the lane: teacher-forced log-probs at T = 1 over the prompt cache's own entry.

        While pages are wanting no request begins, and those that run go on until they give theirs back.
        """
        request = GenerateRequest(prompt, SamplingParams(max_new_tokens=len(target)))
        problem = self._problem(request)
        if problem is not None or not all(0 <= token < self.decoder.n_tokens for token in target):
            raise EngineError(f"cannot score: {problem or 'a target token lies outside the vocabulary'}")
        got = self._cache.acquire(version, request)
        while got is None:
            assert self._running, "idle prompts give their pages back, so only running requests hold any"
            try:
                self._advance(admitting=False)
            except BaseException as error:
                self.fail(error)
                raise
            got = self._cache.acquire(version, request)
        entry, own = got
        try:
            while not entry.ready:
                self._compute(self._prompt_work(), [])
            assert entry.last_x is not None
            write_table(self._plan, self._score_slot, self._cache.fork(entry, own))
            rows = [entry.last_x[None]]
            for i in range(0, len(target) - 1, self._rows):
                tokens = list(target[i : min(i + self._rows, len(target) - 1)])
                work = [Work(entry, version, self._score_slot, len(prompt) + i, tokens)]
                rows.append(self._forwards.run(work)[0].x.clone())
            logp, _ = self._head.score(torch.cat(rows), np.array(target), np.ones(len(target), np.float32))
        finally:
            self._cache.release(entry, own)
        return [float(v) for v in logp]
