"""Which versions are live, as `orchestration.served` keeps them."""

from __future__ import annotations

from collections import Counter

from tithe.simulator.signals import Signal


class LiveVersions:
    """The served serial, and the users of every live one. `changed` fires when a version goes."""

    def __init__(self, changed: Signal, max_live: int) -> None:
        self._changed = changed
        self._max_live = max_live
        self._users: Counter[int] = Counter()
        self.served: int | None = None

    @property
    def has_room(self) -> bool:
        """Whether one more may be loaded."""
        return len(self._users) < self._max_live

    @property
    def oldest(self) -> int:
        """Serial of the oldest live version."""
        return min(self._users)

    def confirm(self, serial: int) -> None:
        """Serve a version."""
        self._users[serial] += 0
        self.served = serial
        self._forget_unused()

    def acquire(self) -> int:
        """The served version, kept live until `release`."""
        assert self.served is not None, "nothing is admitted before the first publication"
        self._users[self.served] += 1
        return self.served

    def release(self, serial: int) -> None:
        """End one use."""
        self._users[serial] -= 1
        self._forget_unused()

    def _forget_unused(self) -> None:
        for serial in [serial for serial, users in self._users.items() if not users and serial != self.served]:
            del self._users[serial]
            self._changed.fire()
