"""The shared engine over ranks: each samples requests of its own on pages of its own, and all tick together.

             rank 0                                             every rank, 0 too
    SpreadEngine: submit, cancel, load, drop           EngineShare: an order's own part on this
    ├ which rank a request goes to                     rank's `SharedEngine`, and what has
    └ orders, on the lane, one after the other ─────▶  ended since the tick before
    waits for     the lane's ticks
    unblocked by  `submit`; what ranks tell at the end of a tick

Attention is data-parallel: a request's keys and values stay on one rank. Experts answer for all ranks in every layer,
so a rank without rows takes part in the tick all the same. A request's tokens do not depend on the rank it is on.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from tithe.engines.copied import CopiedEngine
from tithe.engines.sequences import CLOSED, completion, refuse, resolve
from tithe.engines.shared import SharedEngine
from tithe.errors import EngineError
from tithe.models import Lane, Orders
from tithe.types import Completion, FinishReason, GenerateRequest, SamplingParams

T = TypeVar("T")

STICKY = 8
"""A rank that has a group's prompt takes one more of its requests while it has no more than 1/8 of the mean, or 1,
above the rank with the fewest."""


REMEMBERED = 1024
"""Groups of which it is remembered where their conversations lie."""


@dataclass(frozen=True)
class Begin:
    """Requests: (number, rank, request)."""

    requests: tuple[tuple[int, int, GenerateRequest], ...]


@dataclass(frozen=True)
class Tick:
    """One tick on every rank."""


@dataclass(frozen=True)
class Cancel:
    """End a group's requests, and those of these numbers that nobody waits for any more."""

    group: int | None
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Load:
    """Read, prove and serve a published version."""

    directory: str


@dataclass(frozen=True)
class Drop:
    """Forget a version."""

    name: str


@dataclass(frozen=True)
class Ended:
    """What became of a request: an answer or the reason why there is none."""

    number: int
    answer: Completion | None
    problem: str


ENGINE_ORDERS = (Begin, Tick, Cancel, Load, Drop, Ended, GenerateRequest, SamplingParams, Completion, FinishReason)
"""What travels for an engine over ranks."""


class Here(Lane):
    """The lane of what runs on a lane already: jobs run at once, and nobody ticks."""

    def __init__(self) -> None:
        super().__init__("tithe-here")

    def add_ticker(self, ticker: object) -> None:
        """Nothing: ticks are orders."""

    def start(self) -> Lane:
        """Nothing: the thread runs."""
        return self

    def wake(self) -> None:
        """Nothing: nobody sleeps."""

    def submit(self, job: Callable[..., T], *args: Any) -> Future[T]:
        """Run it."""
        future: Future[T] = Future()
        future.set_result(job(*args))
        return future

    def call(self, job: Callable[..., T], *args: Any) -> T:
        """Run it."""
        return job(*args)


class EngineShare:
    """One rank's part of every order. On the lane."""

    def __init__(self, engine: SharedEngine | CopiedEngine, orders: Orders) -> None:
        self.engine, self._orders = engine, orders
        self._open: dict[int, Future[Completion]] = {}
        self.stats: list[Mapping[str, float]] = [engine.stats()] * orders.ranks.size
        """Every rank's, as of the last tick."""
        orders.handle(Begin, self._begin)
        orders.handle(Tick, self._tick)
        orders.handle(Cancel, self._cancel)
        orders.handle(Load, self._load)
        orders.handle(Drop, self._drop)

    def _begin(self, order: Begin) -> None:
        for number, rank, request in order.requests:
            if rank == self._orders.ranks.rank:
                self._open[number] = self.engine.submit(request)

    def _tick(self, _: Tick) -> list[Ended]:
        """What has ended on any rank."""
        self.engine.tick()
        return self._tell()

    def _tell(self) -> list[Ended]:
        """Ranks tell each other: requests that have ended, counters, dropped versions that are still in use."""
        ranks, own = self._orders.ranks, self.engine.stats()
        ended = [_ended(number, future) for number, future in self._open.items() if future.done()]
        for one in ended:
            del self._open[one.number]
        data = self._orders.wire.encode(ended) if ended else b""
        used = self.engine.dropped_in_use()
        told = ranks.all_gather(torch.tensor([len(data), *used, *own.values()], dtype=torch.float64))
        if used:
            self.engine.forget([not any(one[1 + i] for one in told) for i in range(len(used))])
        live = {"live_versions": self.engine.stats()["live_versions"]}  # the same on all ranks
        self.stats = [dict(zip(own, one[1 + len(used) :].tolist(), strict=True)) | live for one in told]
        parts = ranks.gather_known(data, [int(one[0]) for one in told])
        if ranks.rank > 0:
            return []
        return [one for part in parts if part for one in self._orders.wire.decode(part)]

    def _cancel(self, order: Cancel) -> None:
        if order.group is not None:
            self.engine.cancel(order.group)
        for number in order.numbers:
            if number in self._open:
                self._open[number].cancel()

    def _load(self, order: Load) -> str:
        return self.engine.load_adapter(Path(order.directory))

    def _drop(self, order: Drop) -> list[Ended]:
        self.engine.drop_adapter(order.name)
        return self._tell()


def _ended(number: int, future: Future[Completion]) -> Ended:
    error = None if future.cancelled() else future.exception()
    if future.cancelled() or error is not None:
        return Ended(number, None, str(error or "cancelled"))
    return Ended(number, future.result(), "")


class SpreadEngine:
    """The `RolloutEngine` of several ranks, on rank 0. Public methods are safe from any thread.

    When ranks are lost, `on_lost` is told and open requests stay open, so that nobody takes it for their own failure;
    without it they fail.
    """

    def __init__(self, share: EngineShare, orders: Orders, lane: Lane) -> None:
        self._share, self._orders, self._lane = share, orders, lane
        self.on_lost: Callable[[BaseException], None] | None = None
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        self._next = 0
        self._queued: dict[int, GenerateRequest] = {}
        self._open: dict[int, tuple[GenerateRequest, Future[Completion]]] = {}
        """Everything that has not ended, queued requests too."""
        self._place: dict[int, int] = {}
        self._home: dict[int, int] = {}
        self._left: dict[int, dict[tuple[int, ...], int]] = {}
        """By group: where requests that may be continued have left what they computed (at most; it may be gone)."""
        lane.add_ticker(self)

    # ------------------------------------------------------------------ requests

    def submit(self, request: GenerateRequest) -> Future[Completion]:
        """As `SharedEngine.submit`."""
        future: Future[Completion] = Future()
        problem = self._share.engine.problem(request)
        with self._lock:
            problem = CLOSED if self._lane.is_closed else problem
            if problem is None:
                self._queued[self._next] = request
                self._open[self._next] = request, future
                self._next += 1
        if problem is not None:
            refuse(future, EngineError(problem))
        self._lane.wake()
        return future

    def cancel(self, group: int) -> None:
        """As `SharedEngine.cancel`."""
        with self._lock:
            queued = [n for n, request in self._queued.items() if request.params.group == group]
            gone = [self._close(n) for n in queued]
            is_known = group in self._left or any(request.params.group == group for request, _ in self._open.values())
            self._left.pop(group, None)
        for future in gone:
            resolve(future, completion([], [], [], [], FinishReason.CANCELLED))
        if is_known:
            self._lane.submit(self._orders.give, Cancel(group, ()))

    def drain(self, timeout_s: float) -> bool:
        """As `SharedEngine.drain`."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._open, timeout_s)

    def stats(self) -> Mapping[str, float]:
        """Sums over ranks of what `SharedEngine.stats` tells, as of the last tick; of seconds and live versions the
        largest."""
        own = self._share.stats
        largest = {"decode_s", "prefill_s", "live_versions"}
        told = {key: (max if key in largest else sum)(one[key] for one in own) for key in own[0]}
        with self._lock:
            return {**told, "waiting": told["waiting"] + len(self._queued)}

    # ------------------------------------------------------------------ versions

    def load_adapter(self, directory: Path) -> str:
        """As `SharedEngine.load_adapter`, on every rank; none serves what one refuses."""
        return self._lane.call(self._load, directory)

    def _load(self, directory: Path) -> str:
        self._begin()
        return self._orders.give(Load(str(directory)))

    def drop_adapter(self, name: str) -> None:
        """As `SharedEngine.drop_adapter`."""
        self._lane.submit(self._drop, name)

    def _drop(self, name: str) -> None:
        self._begin()
        self._end(self._orders.give(Drop(name)))

    # ------------------------------------------------------------------ the tick

    def has_work(self) -> bool:
        """Whether a tick would do something."""
        return bool(self._open)

    def tick(self) -> None:
        """Send what was submitted, one tick on all ranks, answer what has ended."""
        with self._lock:
            given_up = tuple(n for n, (_, future) in self._open.items() if future.cancelled())
            for number in given_up:
                self._close(number)
        if given_up:
            self._orders.give(Cancel(None, given_up))
        self._begin()
        if self._open:
            self._end(self._orders.give(Tick()))

    def _begin(self) -> None:
        with self._lock:
            if not self._queued:
                return
            placed = tuple((n, self._choose(n, request), request) for n, request in self._queued.items())
            self._queued.clear()
        self._orders.give(Begin(placed))

    def _choose(self, number: int, request: GenerateRequest) -> int:
        """The rank that has what the request continues; else the one with the fewest requests, or the one that took the
        group's last if it has hardly more."""
        size, group = self._orders.ranks.size, request.params.group
        left = self._left.get(group, {})
        begins = [tokens for tokens in left if request.prompt_ids[: len(tokens)] == tokens]
        if begins:
            self._place[number] = left[max(begins, key=len)]
            return self._place[number]
        load = Counter(self._place.values())
        fewest = min(range(size), key=lambda rank: (load[rank], rank))
        home = self._home.get(group, fewest)
        if load[home] > load[fewest] + max(1, len(self._place) // (size * STICKY)):
            home = fewest
        self._place[number] = self._home[group] = home
        return home

    def _end(self, ended: Sequence[Ended]) -> None:
        for one in ended:
            with self._idle:
                if one.number not in self._open:
                    continue  # its caller had given it up
                self._remember(one)
                future = self._close(one.number)
                self._idle.notify_all()
            if one.answer is None:
                refuse(future, EngineError(one.problem))
            else:
                resolve(future, one.answer)

    def _remember(self, one: Ended) -> None:
        """On which rank a request's keys and values may be continued."""
        request, _ = self._open[one.number]
        if one.answer is None or one.answer.finish is not FinishReason.STOP or not request.may_continue:
            return
        left = self._left.setdefault(request.params.group, {})
        left[(*request.prompt_ids, *one.answer.token_ids.tolist())] = self._place[one.number]
        if len(self._left) > REMEMBERED:
            del self._left[next(iter(self._left))]

    def _close(self, number: int) -> Future[Completion]:
        request, future = self._open.pop(number)
        self._queued.pop(number, None)
        self._place.pop(number, None)
        group = request.params.group
        if not any(other.params.group == group for other, _ in self._open.values()):
            self._home.pop(group, None)
        return future

    def fail(self, error: BaseException) -> None:
        """End: ranks are lost, or the lane closes."""
        if self._orders.is_broken and self.on_lost is not None:
            self.on_lost(error)
        with self._idle:
            gone = [self._close(number) for number in list(self._open)]
            self._idle.notify_all()
        if not self._orders.is_broken or self.on_lost is None:
            for future in gone:
                refuse(future, EngineError(f"the engine failed: {error!r}"))
