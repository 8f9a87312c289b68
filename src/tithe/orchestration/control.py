"""What the two loops share besides pool and served policy: a wake-up, the request to stop, the first fatal error.

Neither loop holds the other. Whoever changes something that another may wait for (a group committed, a version
confirmed, groups dropped) calls `notify`; whoever must end the run calls `request_stop` or `fail`.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StopReason(enum.StrEnum):
    """Why a run ended without an error."""

    MAX_STEPS = "max_steps"
    MAX_MINUTES = "max_minutes"
    PATIENCE = "patience"
    SIGNAL = "signal"


class RunControl:
    """Safe to call from every thread, and from a signal handler: `request_stop` takes no lock that its own thread may
    hold, because the lock is reentrant.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._changes = 0
        self._stop: StopReason | None = None
        self._signalled = False  # apart from `_stop`: a handler may run between any two steps of `request_stop`
        self._error: BaseException | None = None
        self._listeners: list[Callable[[], None]] = []

    @property
    def changes(self) -> int:
        """Number of notifications so far. Read it before looking at the pool, then pass it to `wait`."""
        return self._changes

    def notify(self) -> None:
        """Wake everyone: something changed."""
        with self._changed:
            self._changes += 1
            self._changed.notify_all()
            for listener in self._listeners:
                listener()

    def wait(self, seen: int, timeout_s: float | None) -> bool:
        """Block until there are more notifications than `seen`; False when the time is over first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._changes > seen, timeout_s)

    @contextmanager
    def listening(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call `listener` on every notification while the block runs. It must not block or raise."""
        with self._changed:
            self._listeners.append(listener)
        try:
            yield
        finally:
            with self._changed:
                self._listeners.remove(listener)

    @property
    def stop_reason(self) -> StopReason | None:
        """Why the run shall stop; None while it shall go on."""
        return StopReason.SIGNAL if self._signalled else self._stop

    @property
    def stopping(self) -> bool:
        """Whether loops shall end: a stop was requested, or something failed for good."""
        return self._signalled or self._stop is not None or self._error is not None

    @property
    def hurrying(self) -> bool:
        """Whether to break off even what a clean end would wait for: a signal came, or something failed."""
        return self._signalled or self._error is not None

    def request_stop(self, reason: StopReason) -> None:
        """Ask for a clean end. The first reason counts, but a signal overrules the others: it is in a hurry."""
        if reason is StopReason.SIGNAL:
            self._signalled = True
        elif self._stop is None:
            self._stop = reason
        self.notify()

    def fail(self, error: BaseException) -> None:
        """End the run with an error. The first one counts."""
        if self._error is None:
            self._error = error
        self.notify()

    def raise_if_failed(self) -> None:
        """Raise what `fail` was called with."""
        if self._error is not None:
            raise self._error
