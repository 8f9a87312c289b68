"""Continuous batching, tick by tick, as `engines.shared` does it.

In a tick the engine admits waiting requests to free slots, computes up to `prefill_tokens` rows of prompts, and one row
of every live sequence; then each sequence whose rows are all computed draws a token. A prompt is computed once for all
samples of its group under one version. Where nothing but decoding happens, many ticks are one step of the simulation.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

import simpy

from tithe.simulator.costs import WorkCosts
from tithe.simulator.scenario import OnPublish

MAX_TICKS_AT_ONCE = 256
"""The context grows while ticks are taken together; its mean stands for it."""

PromptKey = tuple[int, int, int, int]
"""Version, group, sample (-1 in a first turn) and turn: what shares a prefill."""


@dataclass(eq=False)
class Request:
    """One completion to be drawn. `version` is None when it follows what is served. `first_serial` is the version that
    drew its first token; `done` succeeds with the last.
    """

    group: int
    sample: int
    turn: int
    prompt_tokens: int
    new_tokens: int
    version: int | None
    done: simpy.Event
    drawn: int = 0
    first_serial: int = -1
    ends_at: int = 0
    owed: int = 0
    key: PromptKey = (0, 0, 0, 0)


@dataclass(frozen=True)
class Ticks:
    """The next ticks, all alike: `count` of `tick_s` seconds each."""

    count: int
    tick_s: float


@dataclass(eq=False)
class _Step:
    """What the planned tick will do besides decoding."""

    prefill: list[tuple[PromptKey, int]] = field(default_factory=list[tuple[PromptKey, int]])
    rebuild: list[tuple[Request, int]] = field(default_factory=list[tuple[Request, int]])


class Engine:
    """One engine. `plan` says what the next ticks are, `apply` carries them out; a lane calls both in turn."""

    def __init__(
        self, costs: WorkCosts, *, max_running: int, prefill_tokens: int, on_publish: OnPublish, served: int = -1
    ) -> None:
        self._costs, self._slots, self._room = costs, max_running, prefill_tokens
        self._rows = max_running + prefill_tokens
        self._on_publish = on_publish
        self.served = served
        self._waiting: deque[Request] = deque()
        self._unready: dict[PromptKey, int] = {}  # rows still to compute
        self._ready: set[PromptKey] = set()
        self._held: dict[PromptKey, list[Request]] = {}  # begun, their prompt not yet computed
        self._rebuilding: list[Request] = []  # their own tokens are computed again
        self._starting: list[Request] = []  # everything is computed: the next tick draws for them
        self._live: list[tuple[int, int, Request]] = []  # a heap by the tick that draws the last token
        self._n_running, self._order, self._tick, self._context = 0, 0, 0, 0
        self._step = _Step()
        self.tokens = 0
        self.ticks = 0
        self.decode_rows = 0

    # ------------------------------------------------------------------ requests

    @property
    def has_work(self) -> bool:
        """Whether a tick would do something."""
        return bool(self._n_running or self._waiting)

    @property
    def load(self) -> int:
        """Requests that wait or run."""
        return self._n_running + len(self._waiting)

    def submit(self, request: Request) -> bool:
        """Queue a request; whether it may begin at once, so that a run of plain decoding must end early."""
        self._waiting.append(request)
        return self._n_running < self._slots

    def serve(self, serial: int) -> None:
        """Another version is served. Requests that follow it go on under it, as `on_publish` says."""
        self.served = serial
        if self._on_publish == "finish":
            return
        begun = [request for requests in self._held.values() for request in requests]
        self._held.clear()
        self._unready.clear()
        if self._on_publish == "recompute":
            begun += [request for _, _, request in self._live] + self._starting + self._rebuilding
            self._live, self._starting, self._rebuilding, self._context = [], [], [], 0
        for request in sorted(begun, key=lambda r: (r.group, r.sample)):
            if request.ends_at:
                request.drawn = request.new_tokens - (request.ends_at - self._tick)
            request.owed, request.ends_at = request.drawn, 0
            self._need_prompt(request)

    def forget(self, group: int) -> None:
        """A group has ended: its prompts are not wanted again."""
        self._ready = {key for key in self._ready if key[1] != group}

    # ------------------------------------------------------------------ ticks

    def plan(self) -> Ticks:
        """The next ticks. Call only with work at hand, and follow it by `apply`."""
        while self._waiting and self._n_running < self._slots:
            self._n_running += 1
            self._need_prompt(self._waiting.popleft())
        self._step = step = _Step()
        room = self._room
        for key, left in self._unready.items():
            if not room:
                break
            rows = min(left, room)
            step.prefill.append((key, rows))
            room -= rows
        prefill = self._room - room
        free = self._rows - prefill - len(self._live)
        for request in self._rebuilding:
            rows = min(request.owed, max(0, free))
            step.rebuild.append((request, rows))
            free -= rows
        prefill += sum(rows for _, rows in step.rebuild)
        steady = not (prefill or self._starting or self._held or self._rebuilding)
        count = min(self._live[0][0] - self._tick, MAX_TICKS_AT_ONCE) if steady else 1
        grown = len(self._live) * (count - 1) // 2
        tick_s = self._costs.tick_s(
            prefill_tokens=prefill, sequences=len(self._live), context_tokens=self._context + grown
        )
        return Ticks(count, tick_s)

    def apply(self, count: int) -> None:
        """`count` of the planned ticks have been computed."""
        decoding = len(self._live)
        self._tick += count
        self.ticks += count
        self.decode_rows += decoding * count
        self._context += decoding * count
        self.tokens += decoding * count
        for key, rows in self._step.prefill:
            self._unready[key] -= rows
            if not self._unready[key]:
                del self._unready[key]
                self._ready.add(key)
                self._begin(self._held.pop(key, []))
        for request, rows in self._step.rebuild:
            request.owed -= rows
        self._starting += [request for request in self._rebuilding if not request.owed]
        self._rebuilding = [request for request in self._rebuilding if request.owed]
        for request in self._starting:
            self._draw_first(request)
        self._starting.clear()
        while self._live and self._live[0][0] <= self._tick:
            request = heapq.heappop(self._live)[2]
            self._context -= request.prompt_tokens + request.new_tokens
            self._n_running -= 1
            request.done.succeed()

    def _need_prompt(self, request: Request) -> None:
        version = self.served if request.version is None else request.version
        sample = -1 if request.turn == 0 else request.sample  # only first turns share their prompt
        request.key = (version, request.group, sample, request.turn)
        if request.key in self._ready:
            self._begin([request])
            return
        self._unready.setdefault(request.key, request.prompt_tokens)
        self._held.setdefault(request.key, []).append(request)

    def _begin(self, requests: list[Request]) -> None:
        """The prompt is there: what is left of their own rows, then the next token."""
        for request in requests:
            (self._rebuilding if request.owed else self._starting).append(request)

    def _draw_first(self, request: Request) -> None:
        """The tick just applied drew a token for a request that did not decode in it."""
        request.drawn += 1
        if request.first_serial < 0:
            request.first_serial = self.served if request.version is None else request.version
        request.ends_at = self._tick + request.new_tokens - request.drawn
        self._order += 1
        self._context += request.prompt_tokens + request.drawn
        self.tokens += 1
        heapq.heappush(self._live, (request.ends_at, self._order, request))
