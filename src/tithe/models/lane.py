"""The compute lane: one thread that owns torch's threads, and an ordered queue of everything computed on one base.

consumes      jobs (training micro-batches, optimizer steps, scoring, loading a version) and decode ticks of its engines
produces      results, as futures
waits for     a job or an engine with work
unblocked by  `submit`, `call`, `wake`

Jobs run in the order they came; between two jobs every engine with work gets one tick, so that neither starves.
The order changes when something is computed, never what: rows do not depend on what else runs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from tithe.errors import RunError
from tithe.quant import set_threads, stay_serial

T = TypeVar("T")


class Ticker(Protocol):
    """An engine on the lane."""

    def has_work(self) -> bool:
        """Whether a tick would do something."""
        ...

    def tick(self) -> None:
        """One batch of decode or prefill; must not raise for what concerns single requests."""
        ...

    def fail(self, error: BaseException) -> None:
        """End every request with this error: a tick has failed."""
        ...


class Lane:
    """Start with `start`, end with `close`. `call` from the lane's own thread runs at once.

    `threads` is what it computes with (`quant.set_threads`, called in the lane); the thread that starts it, and those
    that first compute later, stay at one. None leaves torch's setting alone.
    """

    def __init__(self, name: str = "tithe-lane", threads: int | None = None) -> None:
        self._threads = threads
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._tickers: list[Ticker] = []
        self._condition = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._started = False
        self._ready = threading.Event()

    def add_ticker(self, ticker: Ticker) -> None:
        """Give an engine its ticks."""
        with self._condition:
            self._tickers.append(ticker)
            self._condition.notify_all()

    def start(self) -> Lane:
        """Begin; idempotent."""
        with self._condition:
            if not self._started:
                self._started = True
                self._thread.start()
        if self._threads is not None:
            self._ready.wait()
            stay_serial()
        return self

    @property
    def is_closed(self) -> bool:
        """Whether nothing is computed any more. Engines refuse requests then: their last chance to fail has passed."""
        return self._closed

    def wake(self) -> None:
        """Look for work again: an engine got a request."""
        with self._condition:
            self._condition.notify_all()

    def submit(self, job: Callable[..., T], *args: Any) -> Future[T]:
        """Queue a job; never blocks."""
        future: Future[T] = Future()
        with self._condition:
            if self._closed:
                future.set_exception(RunError("the compute lane is closed"))
                return future
            self._jobs.append((lambda: job(*args), future))
            self._condition.notify_all()
        return future

    def call(self, job: Callable[..., T], *args: Any) -> T:
        """Queue a job and wait for its result; its exception is raised here."""
        if threading.current_thread() is self._thread:
            return job(*args)
        return self.submit(job, *args).result()

    def close(self, timeout_s: float = 30.0) -> None:
        """Finish the running job, cancel the rest, end the thread; requests that are left in engines fail."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        if self._started and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        while self._jobs:
            self._jobs.popleft()[1].cancel()
        for ticker in self._tickers:
            ticker.fail(RunError("the compute lane is closed"))

    def _loop(self) -> None:
        if self._threads is not None:
            set_threads(self._threads)
        self._ready.set()
        while True:
            with self._condition:
                while not (self._closed or self._jobs or any(t.has_work() for t in self._tickers)):
                    self._condition.wait()
                if self._closed:
                    return
                job = self._jobs.popleft() if self._jobs else None
            if job is not None:
                _run(*job)
            for ticker in list(self._tickers):
                if ticker.has_work():
                    _tick(ticker)


def _run(job: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = job()
    except BaseException as error:  # noqa: BLE001  the caller's future carries it; the lane must live on
        future.set_exception(error)
    else:
        future.set_result(result)


def _tick(ticker: Ticker) -> None:
    try:
        ticker.tick()
    except BaseException as error:  # noqa: BLE001  every request of the engine ends with it
        ticker.fail(error)
