"""Stop when the held-out score keeps falling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class EarlyStop:
    """Counts evaluations in a row whose score is below the one before. `patience` None never stops.

    >>> stop = EarlyStop(2)
    >>> [stop.observe(score) for score in (0.5, 0.4, 0.45, 0.44, 0.43)]
    [False, False, False, False, True]
    """

    def __init__(self, patience: int | None) -> None:
        self._patience = patience
        self._last: float | None = None
        self._declines = 0

    def observe(self, score: float) -> bool:
        """Take a score in; whether to stop."""
        falls = self._last is not None and score < self._last
        self._declines = self._declines + 1 if falls else 0
        self._last = score
        return self._patience is not None and self._declines >= self._patience

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"last": self._last, "declines": self._declines}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`."""
        self._last = state["last"]
        self._declines = state["declines"]
