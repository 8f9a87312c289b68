"""Running statistics and window rates, in plain floats."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable


class RunningStats:
    """Count, mean, spread and range of a stream in constant memory (Welford's update, Chan's merge).

    Values that are not finite are counted in `non_finite` and left out.

    >>> stats = RunningStats([1.0, 2.0, 3.0])
    >>> stats.mean, stats.std, stats.count
    (2.0, 1.0, 3)
    """

    def __init__(self, values: Iterable[float] = ()) -> None:
        self.count = 0
        self.non_finite = 0
        self.mean = 0.0
        self.minimum = math.inf
        self.maximum = -math.inf
        self._sum_sq = 0.0
        for value in values:
            self.add(value)

    def add(self, value: float) -> None:
        """Take one value in."""
        if not math.isfinite(value):
            self.non_finite += 1
            return
        self.count += 1
        delta = value - self.mean
        self.mean += delta / self.count
        self._sum_sq += delta * (value - self.mean)
        self.minimum = min(self.minimum, value)
        self.maximum = max(self.maximum, value)

    def merge(self, other: RunningStats) -> None:
        """Take in everything that `other` has seen."""
        total = self.count + other.count
        self.non_finite += other.non_finite
        if other.count == 0:
            return
        delta = other.mean - self.mean
        self._sum_sq += other._sum_sq + delta * delta * self.count * other.count / total
        self.mean += delta * other.count / total
        self.count = total
        self.minimum = min(self.minimum, other.minimum)
        self.maximum = max(self.maximum, other.maximum)

    @property
    def std(self) -> float:
        """Sample standard deviation (divisor n - 1); 0 for fewer than two values."""
        return math.sqrt(max(self._sum_sq, 0.0) / (self.count - 1)) if self.count > 1 else 0.0


class WindowRate:
    """Events per second over the last `window_s` seconds, e.g. generated tokens per second.

    Until a whole window has passed, the time since construction divides. The rate falls to 0 when nothing happens.
    """

    def __init__(self, window_s: float = 10.0, *, clock: Callable[[], float] = time.monotonic) -> None:
        if window_s <= 0:
            raise ValueError(f"window_s must be above 0, got {window_s}")
        self.total = 0.0
        self._window_s = window_s
        self._clock = clock
        self._start_s = clock()
        self._events: deque[tuple[float, float]] = deque()
        self._in_window = 0.0

    def add(self, amount: float) -> None:
        """Count `amount` events now."""
        self.total += amount
        self._events.append((self._clock(), amount))
        self._in_window += amount

    def rate_per_s(self) -> float:
        """Events per second over the window that ends now."""
        now_s = self._clock()
        while self._events and self._events[0][0] < now_s - self._window_s:
            self._in_window -= self._events.popleft()[1]
        if not self._events:
            self._in_window = 0.0  # no rounding residue stays behind
            return 0.0
        span_s = min(self._window_s, now_s - self._start_s)
        return self._in_window / span_s if span_s > 0 else 0.0
