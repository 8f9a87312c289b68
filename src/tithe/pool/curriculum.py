"""Which prompts are drawn, and how often, by the share of right answers measured so far. Pure functions.

p is a prompt's pass rate: the share of right answers in its newest measured group. The spread of a group's rewards,
which is all that a group-relative advantage learns from, is that of a coin of weight p: p·(1 - p), nothing at 0 and 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from tithe.config.schedules import ScheduleSettings

LEAST_WEIGHT = 0.1
"""Smallest share of the passes in which a measured prompt is drawn, so that what was unlucky is measured again."""


@dataclass(frozen=True)
class PromptRecord:
    """The newest measured group of a prompt, and the batch it was for.

    >>> PromptRecord(pass_rate=0.5, batch=3).spread
    1.0
    """

    pass_rate: float
    batch: int

    @property
    def spread(self) -> float:
        """4·p·(1 - p): 1 where half of the answers are right, 0 where all are or none is."""
        return 4.0 * self.pass_rate * (1.0 - self.pass_rate)


@dataclass(frozen=True)
class Curriculum:
    """When a prompt is passed over: when its batch has it already, and by its record if it was ever measured.

    With `rest_batches` R > 0, a prompt whose pass rate is at most `rest_below` (hopeless) or at least `rest_above`
    (solved) rests for R batches and then comes back to be measured again. If `is_weighted`, a prompt between the two
    is drawn in a share of the passes that is its spread 4·p·(1 - p), at least `LEAST_WEIGHT` (sampling by learnability,
    arXiv 2502.12272).

    >>> rested = Curriculum(rest_batches=5)
    >>> [rested.skips(PromptRecord(1.0, 3), batch=batch, coin=0.0) for batch in (4, 8, 9)]
    [True, True, False]
    """

    rest_batches: int = 0
    rest_below: float = 0.0
    rest_above: float = 1.0
    is_weighted: bool = False

    @classmethod
    def of(cls, schedule: ScheduleSettings) -> Self:
        """Which prompts a run passes over, by its configuration."""
        low, high = schedule.rest_outside
        return cls(schedule.rest_batches, low, high, schedule.prompt_weights == "pass_rate")

    @property
    def is_on(self) -> bool:
        """Whether anything is ever passed over."""
        return self.is_weighted or self.rest_batches > 0

    def skips(self, record: PromptRecord | None, *, batch: int, coin: float) -> bool:
        """Whether to pass over a prompt when drawing for `batch`; `coin` in [0, 1) is the draw's random number."""
        if record is None:
            return False
        if self.rest_batches > 0 and not self.rest_below < record.pass_rate < self.rest_above:
            return batch - record.batch <= self.rest_batches
        return self.is_weighted and coin >= max(record.spread, LEAST_WEIGHT)


def adaptive_samples(record: PromptRecord | None, *, usual: int, least: int, most: int) -> int:
    """Samples for a prompt: `usual` when it was never measured, else from `least` (solved or hopeless) to `most` (half
    of the answers right) in proportion to the spread 4·p·(1 - p).

    >>> [adaptive_samples(PromptRecord(p, 0), usual=8, least=4, most=16) for p in (0.0, 0.125, 0.5, 1.0)]
    [4, 9, 16, 4]
    """
    if record is None:
        return usual
    return least + round((most - least) * record.spread)


@dataclass(frozen=True)
class Draw:
    """What an admission asks for: a group for `batch`, in the phase of that name, of the size that `samples` gives for
    the drawn prompt's record. Where a group takes the place of one that was dropped or given up, it takes that one's
    size instead, up to `most`.

    >>> Draw(batch=3, samples=lambda record: 8).phase
    ''
    """

    batch: int = 0
    phase: str = ""
    samples: Callable[[PromptRecord | None], int] = lambda _: 1
    most: int = 2**31
