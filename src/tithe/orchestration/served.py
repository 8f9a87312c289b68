"""Which policy the engine serves, and which older ones are still in use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from tithe.errors import RunError
from tithe.orchestration.control import RunControl
from tithe.types import PolicyVersion


@dataclass(frozen=True)
class ServedVersion:
    """A version that the engine has loaded and proved, under its published name.

    >>> ServedVersion(PolicyVersion(0, 3), "run-0-v3-1a2b3c4d").version.serial
    3
    """

    version: PolicyVersion
    name: str


class ServedPolicy:
    """The newest confirmed version and the users of every live one.

    A version counts as served only after `confirm`, which is called when the engine has answered; until then samples
    begin on, and are tagged with, the one before. An older version is retired (`retire(name)`, which tells the engine
    to drop it) when its last user has released it. At most `max_live` versions are live: `wait_for_room` blocks a
    publisher until one more may be loaded. Safe to call from several threads.
    """

    def __init__(self, control: RunControl, *, max_live: int, retire: Callable[[str], None]) -> None:
        self._control = control
        self._max_live = max_live
        self._retire = retire
        self._lock = threading.Lock()
        self._current: ServedVersion | None = None
        self._users: dict[ServedVersion, int] = {}

    def current(self) -> ServedVersion | None:
        """The served version; None before the first."""
        return self._current

    def confirm(self, version: ServedVersion) -> None:
        """Serve a version that the engine has loaded and proved. Raises `RunError` if it is not newer."""
        with self._lock:
            if self._current is not None and version.version <= self._current.version:
                raise RunError(f"{version.name} is served after {self._current.name}: versions only ascend")
            self._users.setdefault(version, 0)
            self._current = version
            unused = self._forget_unused()
        self._finish(unused)

    def acquire(self) -> ServedVersion:
        """The served version, kept live until `release`. Raises `RunError` before the first is served."""
        with self._lock:
            if self._current is None:
                raise RunError("no version is served yet")
            self._users[self._current] += 1
            return self._current

    def release(self, version: ServedVersion) -> None:
        """End one use of a version."""
        with self._lock:
            self._users[version] -= 1
            unused = self._forget_unused()
        self._finish(unused)

    def oldest_serial(self) -> int:
        """Serial of the oldest live version: what the slowest running group samples from. Raises `RunError` before the
        first is served.
        """
        with self._lock:
            if not self._users:
                raise RunError("no version is served yet")
            return min(live.version.serial for live in self._users)

    def wait_for_room(self, timeout_s: float) -> bool:
        """Block until fewer than `max_live` versions are live; False when nothing at all happens for `timeout_s`.

        Room comes by itself: nobody acquires an older version any more, and every group ends.
        """
        while True:
            seen = self._control.changes
            if len(self._users) < self._max_live:
                return True
            if not self._control.wait(seen, timeout_s):
                return False

    def _forget_unused(self) -> list[str]:
        unused = [v for v, users in self._users.items() if users == 0 and v != self._current]
        for version in unused:
            del self._users[version]
        return [version.name for version in unused]

    def _finish(self, unused: list[str]) -> None:
        # outside the lock: the engine may take its time, and notified listeners may come back here
        for name in unused:
            self._retire(name)
        self._control.notify()
