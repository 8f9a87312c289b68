"""What is counted while a simulation runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

SAMPLE, TRAIN, PUBLISH = "sample", "train", "publish"
"""Kinds of work on a lane."""


@dataclass(frozen=True)
class Span:
    """A lane's uninterrupted work of one kind, in seconds since the start.

    >>> Span("rollout-0", "sample", 1.0, 3.5).seconds
    2.5
    """

    lane: str
    kind: str
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class BatchRow:
    """One trained batch, with the names of ``metrics.jsonl``. `lag` is the trainer's serial minus the served one when
    the batch began, `ages` the age of each of its groups, `version_gap` the serial minus the oldest live version after
    its publication.
    """

    serial: int
    end_s: float
    wait_s: float
    train_s: float
    publish_s: float
    lag: int
    ages: tuple[int, ...]
    version_gap: int
    dropped: int
    rollouts: int
    tokens: int

    @property
    def step_s(self) -> float:
        """Waiting, training and publishing."""
        return self.wait_s + self.train_s + self.publish_s


@dataclass(eq=False)
class Ledger:
    """Mutable totals over all lives of the process."""

    spans: list[Span] = field(default_factory=list[Span])
    batches: list[BatchRow] = field(default_factory=list[BatchRow])
    counts: Counter[str] = field(default_factory=Counter[str])
    """Groups admitted, trained, dropped, …; tokens; ticks."""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Waiting by cause, and reward workers' work."""

    def work(self, lane: str, kind: str, begin_s: float, end_s: float) -> None:
        """A lane worked; what touches the span before is joined to it."""
        if end_s <= begin_s:
            return
        for at in range(len(self.spans) - 1, max(-1, len(self.spans) - 9), -1):
            last = self.spans[at]
            if last.lane == lane:
                if last.kind == kind and last.end_s == begin_s:
                    self.spans[at] = Span(lane, kind, last.begin_s, end_s)
                    return
                break
        self.spans.append(Span(lane, kind, begin_s, end_s))

    def busy_s(self, lane: str, kind: str | None = None) -> float:
        """Seconds of a lane's work, of one kind or of all."""
        return sum(s.seconds for s in self.spans if s.lane == lane and kind in (None, s.kind))
