"""Bootstrap intervals over questions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_CHUNK_VALUES = 1 << 20  # resampled values held at once: 8 MiB


@dataclass(frozen=True)
class Interval:
    """A mean with its interval.

    >>> str(Interval(0.5, 0.4, 0.6))
    '0.500 [0.400, 0.600]'
    """

    mean: float
    lo: float
    hi: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.lo:.3f}, {self.hi:.3f}]"


def bootstrap_ci(
    values_per_question: Iterable[float | Sequence[float]], *, n: int = 2000, seed: int, level: float = 0.95
) -> Interval:
    """Percentile bootstrap of the mean over *questions*.

    An entry is one question: its value, or the values of its samples, which are averaged first. Samples of one question
    are not independent, so questions are resampled and samples are not; every question weighs the same whatever its
    number of samples. The same `seed` gives the same interval. When every question has the same mean the interval has
    no width: the bootstrap cannot see what it did not sample.

    Raises `ValueError` for no question, a question without samples, a value that is not finite, `n` below 1 or a
    `level` outside (0, 1).
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    means_Q = np.array([_question_mean(i, entry) for i, entry in enumerate(values_per_question)], dtype=np.float64)
    if means_Q.size == 0:
        raise ValueError("no question to bootstrap over")
    tail = (1.0 - level) / 2.0
    lo, hi = np.quantile(_resampled_means(means_Q, n, seed), [tail, 1.0 - tail])
    return Interval(float(means_Q.mean()), float(lo), float(hi))


def _question_mean(index: int, entry: float | Sequence[float]) -> float:
    values = np.asarray(entry, dtype=np.float64)
    if values.size == 0:
        raise ValueError(f"question {index} has no samples")
    mean = float(values.mean())
    if not math.isfinite(mean):
        raise ValueError(f"question {index} has a value that is not finite: {entry!r}")
    return mean


def _resampled_means(means_Q: NDArray[np.float64], n: int, seed: int) -> NDArray[np.float64]:
    rng = np.random.default_rng(seed)
    rows_at_once = max(1, _CHUNK_VALUES // means_Q.size)
    parts = [
        means_Q[rng.integers(0, means_Q.size, size=(min(rows_at_once, n - start), means_Q.size))].mean(axis=1)
        for start in range(0, n, rows_at_once)
    ]
    return np.concatenate(parts)
