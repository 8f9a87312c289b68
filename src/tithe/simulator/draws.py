"""Random numbers by address, and the distributions that turn them into seconds and tokens.

A draw is a pure function of (seed, what, numbers): the same group has the same lengths under every setting that is
compared, and the order of events never changes what happens. Two settings thus differ by what they are, not by luck.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

from tithe.errors import UserError

_NORMAL = NormalDist()
_FORMS = "a number, exp:MEAN, lognormal:MEAN,SIGMA, or uniform:LOW,HIGH"


def uniform(seed: int, what: str, *numbers: int) -> float:
    """A number above 0 and below 1 for this address.

    >>> uniform(0, "length", 3, 1) == uniform(0, "length", 3, 1)
    True
    """
    key = struct.pack(f"<q{len(numbers)}q", seed, *numbers) + what.encode()
    word = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    return ((word >> 11) + 0.5) / 2**53


class Distribution(Protocol):
    """Values by inverse transform; `quantile` rises with `u`, 0 < u < 1."""

    def quantile(self, u: float) -> float:
        """The value that a share `u` of draws does not exceed."""
        ...

    @property
    def mean(self) -> float:
        """Expected value."""
        ...


@dataclass(frozen=True)
class Fixed:
    """Always the same.

    >>> Fixed(2.0).quantile(0.9)
    2.0
    """

    value: float

    def quantile(self, u: float) -> float:  # noqa: ARG002  the protocol's
        """`value`."""
        return self.value

    @property
    def mean(self) -> float:
        """`value`."""
        return self.value


@dataclass(frozen=True)
class Uniform:
    """Evenly between two bounds."""

    low: float
    high: float

    def quantile(self, u: float) -> float:
        """low + u (high − low)."""
        return self.low + u * (self.high - self.low)

    @property
    def mean(self) -> float:
        """The middle."""
        return (self.low + self.high) / 2


@dataclass(frozen=True)
class Exponential:
    """Without memory; `mean_value` is its mean and its spread."""

    mean_value: float

    def quantile(self, u: float) -> float:
        """−mean · ln(1 − u)."""
        return -self.mean_value * math.log1p(-u)

    @property
    def mean(self) -> float:
        """`mean_value`."""
        return self.mean_value


@dataclass(frozen=True)
class LogNormal:
    """Long-tailed: exp of a normal variable with spread `sigma`, scaled to the mean `mean_value`.

    >>> round(LogNormal(1.0, 0.8).quantile(0.5), 3)
    0.726
    """

    mean_value: float
    sigma: float

    def quantile(self, u: float) -> float:
        """mean · exp(σ z − σ²/2), z the normal quantile."""
        return self.mean_value * math.exp(self.sigma * _NORMAL.inv_cdf(u) - self.sigma**2 / 2)

    @property
    def mean(self) -> float:
        """`mean_value`."""
        return self.mean_value


@dataclass(frozen=True)
class Empirical:
    """Measured values, each as likely as the others. `values` ascend and are not empty."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Empirical:
        """From values in any order."""
        return cls(tuple(sorted(values)))

    def quantile(self, u: float) -> float:
        """The value at rank ⌊u n⌋."""
        return self.values[min(len(self.values) - 1, int(u * len(self.values)))]

    @property
    def mean(self) -> float:
        """Of the values."""
        return sum(self.values) / len(self.values)


@dataclass(frozen=True)
class Clipped:
    """Another distribution, cut at `high`: lengths under a token limit."""

    inner: Distribution
    high: float

    def quantile(self, u: float) -> float:
        """The smaller of the two."""
        return min(self.high, self.inner.quantile(u))

    @property
    def mean(self) -> float:
        """Over 1,000 evenly spaced quantiles."""
        return sum(self.quantile((i + 0.5) / 1000) for i in range(1000)) / 1000


def parse_distribution(text: str, name: str) -> Distribution:
    """What the command line says of an option. Raises `UserError` that names it.

    >>> parse_distribution("lognormal:2,0.5", "--reward-s")
    LogNormal(mean_value=2.0, sigma=0.5)
    """
    kind, colon, rest = text.strip().partition(":")
    try:
        numbers = [float(part) for part in (rest if colon else kind).split(",")]
    except ValueError:
        numbers = []
    ok = bool(numbers) and all(math.isfinite(number) and number >= 0 for number in numbers)
    made: dict[tuple[str, int], Distribution] = {}
    if ok:
        made["", 1] = Fixed(numbers[0])
        made["exp", 1] = Exponential(numbers[0])
        if len(numbers) == 2 and numbers[0] <= numbers[1]:
            made["uniform", 2] = Uniform(*numbers)
        if len(numbers) == 2:
            made["lognormal", 2] = LogNormal(*numbers)
    found = made.get((kind if colon else "", len(numbers)))
    if found is None:
        raise UserError(f"{name} = {text!r} is no distribution: give {_FORMS}, all at least 0")
    return found


def histogram(values: Sequence[int]) -> dict[int, float]:
    """Shares by value, ascending; empty without values.

    >>> histogram([1, 1, 2, 1])
    {1: 0.75, 2: 0.25}
    """
    return {value: values.count(value) / len(values) for value in sorted(set(values))}


def total_variation(a: dict[int, float], b: dict[int, float]) -> float:
    """Half the summed difference of two histograms: 0 equal, 1 disjoint.

    >>> total_variation({0: 1.0}, {0: 0.75, 1: 0.25})
    0.25
    """
    return sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in {*a, *b}) / 2


def percentile(values: Sequence[float], share: float) -> float:
    """The value at a share of the sorted values; 0 without any.

    >>> percentile([3.0, 1.0, 2.0], 0.5)
    2.0
    """
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
