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

from tithe.engines.batch import Work, run_rows, write_table
from tithe.engines.cache import PromptCache
from tithe.engines.sequences import BASE, LiveVersion, Prompt, Running, Waiting, completion, refuse, resolve
from tithe.errors import AdapterError, EngineError
from tithe.models import PAGE, Decoder, Draws, ForwardPlan, Head, KVPages, Lane
from tithe.types import Completion, FinishReason, GenerateRequest, SamplingParams
from tithe.weight_sync import Probe, compare_probe, load_published

OnPublish = Literal["finish", "recompute", "keep"]


class SharedEngine:
    """A `RolloutEngine` on a decoder's lane. Public methods are safe from any thread; pages, plan and lists of running
    requests are touched on the lane only.

    `on_publish` says what happens to requests without an adapter's name when another version is served: `finish` keeps
    the version they began with, `recompute` rebuilds their keys and values, `keep` continues over the old ones. A
    mixture's completions carry the experts that every position took, for training to replay, if `record_experts`.
    `bare` is the version that its base is by itself: where every parameter is trained, each version is a base.
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
    ) -> None:
        self.decoder, self.lane, self.on_publish = decoder, lane, on_publish
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
        self._score_slot = 3 * max_running + 1
        self._head = Head(decoder, chunk_rows=max(64, max_running))
        self._waiting: deque[Waiting] = deque()
        self._running: list[Running] = []
        self._slots = list(range(max_running - 1, -1, -1))
        self._live: dict[str, LiveVersion] = {}
        self._dropped: set[LiveVersion] = set()  # still in use by requests that began on them
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
        problem = self._problem(request)
        with self._lock:
            version = self._served if request.adapter is None else self._live.get(request.adapter)
            if version is None and problem is None:
                problem = f"adapter {request.adapter!r} is not live; live are: {', '.join(self._live) or 'none'}"
            if problem is None and version is not None:
                self._waiting.append(Waiting(request, future, version))
        if problem is not None:
            refuse(future, EngineError(problem))
        self.lane.wake()
        return future

    def _problem(self, request: GenerateRequest) -> str | None:
        p, n = request.params, len(request.prompt_ids)
        if n == 0 or p.max_new_tokens < 1:
            return "a request needs at least one prompt token and room for one new token"
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= self.decoder.embedding.rows:
            return f"a prompt token lies outside the vocabulary of {self.decoder.embedding.rows}"
        if n + p.max_new_tokens > self.decoder.max_context:
            return (
                f"prompt and completion may take {n + p.max_new_tokens} tokens, "
                f"model.max_context is {self.decoder.max_context}"
            )
        if -(-n // PAGE) + self._own_pages(request) > self.pages.pages:
            return f"the request may need more than all {self.pages.pages} KV pages: raise engine.kv_memory_mib"
        if p.stop_strings and self._decode is None:
            return "stop strings need an engine that was given a decoder of tokens"
        return None

    @staticmethod
    def _own_pages(request: GenerateRequest) -> int:
        n = len(request.prompt_ids)
        return -(-(n + request.params.max_new_tokens) // PAGE) - n // PAGE

    def cancel(self, group: int) -> None:
        """End all requests of a group with FinishReason.CANCELLED."""
        with self._lock:
            for seq in self._running:
                seq.cancelled = seq.cancelled or seq.request.params.group == group
            gone = [w for w in self._waiting if w.request.params.group == group]
            self._waiting = deque(w for w in self._waiting if w.request.params.group != group)
            self._idle.notify_all()
        for w in gone:
            resolve(w.future, completion([], [], [], [], FinishReason.CANCELLED))
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
        manifest, tensors, spec = load_published(directory, self.decoder.linear_shapes())
        if manifest.base_checksum != self.decoder.checksum:
            raise AdapterError(f"{manifest.name} was trained on another base than this one: set model.path to its base")
        mode = self.decoder.options.numeric_mode
        if manifest.numeric_mode != mode:
            raise AdapterError(
                f"{manifest.name} was trained under {manifest.numeric_mode} and this engine computes under {mode}, "
                f"which is another policy: set model.base_dtype and model.compute_dtype as in training"
            )
        with self._lock:
            if len(self._live) >= self._max_live and manifest.name not in self._live:
                raise EngineError(f"{len(self._live)} versions are live, engine.max_live_versions is {self._max_live}")
            version = self._live.get(manifest.name)
        if version is None:  # else the very same version, which may have requests: proved again, not held twice
            model = self.lane.call(self.decoder.build_adapter, tensors, spec)
            version = LiveVersion(manifest.name, manifest.version.serial, model)
        self.lane.call(self._prove_and_serve, manifest.probe, version)
        return manifest.name

    def _prove_and_serve(self, probe: Probe, version: LiveVersion) -> None:
        prompt, target = probe.prompt_ids, probe.completion_ids
        served = self._served
        try:
            answer = self._score(version, prompt, target)
            previous = None if served is BASE else self._remembered(served, prompt, target)
            compare_probe(probe, answer, previous, self._remembered(BASE, prompt, target)).require(version.name)
        except BaseException:
            if version.name not in self._live:
                self._forget(version)
            raise
        self._answers = {k: v for k, v in self._answers.items() if k[0] == BASE.name and k[1:] == (prompt, target)}
        self._answers[version.name, prompt, target] = answer
        self._serve(version)

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
            del self._live[name]
            self._dropped.add(version)
        self.lane.submit(self._forget_unused)

    def score(self, adapter: str | None, prompt: Sequence[int], target: Sequence[int]) -> list[float]:
        """log-probs at T = 1 of given completion tokens, through the prompt cache and pages that serve requests."""
        with self._lock:
            version = self._served if adapter is None else self._live.get(adapter)
        if version is None:
            raise EngineError(f"adapter {adapter!r} is not live")
        return self.lane.call(self._score, version, tuple(prompt), tuple(target))

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
                seq.version = version
            else:
                self._rebuild(seq, version)
        self._forget_unused()

    def _rebuild(self, seq: Running, version: LiveVersion) -> None:
        """Start a running request's keys and values again under another version; its tokens stay.

        When pages are too few for one more copy of its prompt, it finishes under the version it has.
        """
        got = self._cache.acquire(version, seq.request.prompt_ids, self._own_pages(seq.request))
        if got is not None:
            self._cache.release(seq.prompt, seq.own)
            seq.version, seq.computed = version, 0
            seq.prompt, seq.own = got
            seq.experts.clear()

    def _forget_unused(self) -> None:
        """On the lane: let go of dropped versions whose last request has ended."""
        with self._lock:
            used = {request.version for request in (*self._running, *self._waiting)}
            gone = self._dropped - used
            self._dropped -= gone
        for version in gone:
            self._forget(version)

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
                got = self._cache.acquire(w.version, w.request.prompt_ids, self._own_pages(w.request))
                if got is None:
                    return  # pages come back when running requests finish
                self._waiting.popleft()
                prompt, own = got
                is_new = prompt.computed == 0 and prompt.users == 1
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
        for done in run_rows(self._plan, work) if work else ():
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
        params = [s.request.params for s in ready]
        counters = [(p.seed, p.group, p.sample, len(s.tokens)) for p, s in zip(params, ready, strict=True)]
        drawn = self._head.sample(
            x,
            Draws(
                temperature=np.array([p.temperature for p in params], np.float32),
                top_k=np.array([p.top_k for p in params], np.int32),
                top_p=np.array([p.top_p for p in params], np.float32),
                min_p=np.array([p.min_p for p in params], np.float32),
                counters=np.array(counters, np.int64),
            ),
        )
        finished: dict[FinishReason, list[Running]] = {FinishReason.STOP: [], FinishReason.LENGTH: []}
        for i, seq in enumerate(ready):
            seq.tokens.append(int(drawn.token[i]))
            seq.logp.append(float(drawn.logp[i]))
            seq.behaviour.append(float(drawn.logp_behaviour[i]))
            seq.serials.append(seq.version.serial)
            reason = self._finish_reason(seq)
            if reason is not None:
                finished[reason].append(seq)
        for reason, sequences in finished.items():
            self._finish(sequences, reason)

    def _finish_reason(self, seq: Running) -> FinishReason | None:
        params = seq.request.params
        if seq.tokens[-1] in params.stop_token_ids:
            return FinishReason.STOP
        if params.stop_strings and self._decode is not None:
            text = self._decode(seq.tokens)
            if any(stop in text for stop in params.stop_strings):
                return FinishReason.STOP
        return FinishReason.LENGTH if len(seq.tokens) >= params.max_new_tokens else None

    def _finish(self, sequences: list[Running], reason: FinishReason) -> None:
        if not sequences:
            return
        gone = set(map(id, sequences))
        with self._lock:
            self._running = [s for s in self._running if id(s) not in gone]
            self._counts["completions"] += len(sequences)
        for seq in sequences:
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
        got = self._cache.acquire(version, prompt, self._own_pages(request))
        while got is None:
            assert self._running, "idle prompts give their pages back, so only running requests hold any"
            try:
                self._advance(admitting=False)
            except BaseException as error:
                self.fail(error)
                raise
            got = self._cache.acquire(version, prompt, self._own_pages(request))
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
                rows.append(run_rows(self._plan, work)[0].x.clone())
            logp, _ = self._head.score(torch.cat(rows), np.array(target), np.ones(len(target), np.float32))
        finally:
            self._cache.release(entry, own)
        return [float(v) for v in logp]
