"""What the rollout side did since it was last asked, for the metric rows."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from tithe.metrics import FAILURE_PREFIX
from tithe.types import Rollout


class RolloutCounters:
    """Tokens, failures and sampling time. Safe to call from several threads.

    Sampling time is the time in which at least one group was running, so the speed is that of the sampler and not of a
    loop that waits for the trainer. Time and tokens between `hold` and `go_on` (an evaluation) do not count.

    `drawn` counts the tokens that the engine has drawn so far; without it a rollout's tokens count when its group ends,
    all at once.

    >>> ticks = iter([0.0, 2.0, 5.0])
    >>> counters = RolloutCounters(clock=lambda: next(ticks))
    >>> counters.begin()
    >>> counters.end([])
    >>> counters.take_speed()
    {'sample_s': 2.0}
    """

    def __init__(
        self, *, drawn: Callable[[], float] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._drawn = drawn
        self._lock = threading.Lock()
        self._running = 0
        self._held = False
        self._busy_since_s = 0.0
        self._busy_s = 0.0
        self._drawn_before = 0.0 if drawn is None else drawn()
        self._tokens = 0.0
        self._equal = 0
        self._failures: Counter[str] = Counter()
        self._causes_seen: set[str] = set()

    def begin(self) -> None:
        """A group has been admitted."""
        with self._lock:
            if self._running == 0:
                self._busy_since_s = self._clock()
            self._running += 1

    def end(self, rollouts: Sequence[Rollout]) -> None:
        """A group has ended, with these rollouts; none when it was given up."""
        with self._lock:
            self._settle_time()
            self._running -= 1
            if self._drawn is None:
                self._tokens += sum(len(rollout.token_ids) for rollout in rollouts)
            self._failures.update(str(r.failure.cause) for r in rollouts if r.failure is not None)

    def hold(self) -> None:
        """Something else is sampled from now on."""
        with self._lock:
            self._settle_time()
            self._settle_tokens()
            self._held = True

    def go_on(self) -> None:
        """It is over."""
        with self._lock:
            self._settle_time()
            self._settle_tokens()
            self._held = False

    def _settle_time(self) -> None:
        now_s = self._clock()
        if self._running and not self._held:
            self._busy_s += now_s - self._busy_since_s
        self._busy_since_s = now_s

    def _settle_tokens(self) -> None:
        if self._drawn is not None:
            before, self._drawn_before = self._drawn_before, self._drawn()
            if not self._held:
                self._tokens += self._drawn_before - before

    def count_equal(self) -> None:
        """A group of equal rewards was dropped for it."""
        with self._lock:
            self._equal += 1

    def take_equal(self) -> dict[str, float]:
        """`no_spread_groups` since the last call, once there was any."""
        with self._lock:
            equal, self._equal = self._equal, 0
        return {"no_spread_groups": float(equal)} if equal else {}

    def take_speed(self) -> dict[str, float]:
        """`sample_s` (seconds of sampling) since the last call, and `tok_per_s` if a token was drawn in them: where all
        rollouts had been drawn before, 0 would be the speed of nothing."""
        with self._lock:
            self._settle_time()
            self._settle_tokens()
            busy_s, tokens, self._busy_s, self._tokens = self._busy_s, self._tokens, 0.0, 0.0
        speed = {"tok_per_s": tokens / busy_s} if tokens > 0 and busy_s > 0 else {}
        return {**speed, "sample_s": busy_s}

    def take_failures(self) -> dict[str, float]:
        """`failures` and `failures_<cause>` since the last call; a cause that once occurred stays, with 0."""
        with self._lock:
            failures, self._failures = self._failures, Counter()
            self._causes_seen |= failures.keys()
            row = {f"{FAILURE_PREFIX}{cause}": float(failures[cause]) for cause in sorted(self._causes_seen)}
        return {"failures": float(failures.total()), **row}
