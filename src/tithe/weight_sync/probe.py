"""The probe: how an engine proves that it samples from the version it was told to load.

A version is published with one short sequence and the trainer's own log-probs on it. After loading, the engine scores
the same sequence; `compare_probe` is the pure comparison of the two answers. It fails closed: what cannot be matched
is refused.

Shape legend: _T completion tokens of the probe.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tithe.errors import PublishRefused

TOLERANCE_FACTOR = 8.0
"""How many noise floors the engine's answer may lie from the trainer's. The floor is one sample of a rounding
difference's size; a few of them is what another order of additions can do."""

TINY = 1e-6
"""Least tolerance, in nats: two units in the last place of a float32 log-prob of about -8."""


@dataclass(frozen=True)
class Probe:
    """What the trainer says about a version.

    `token_ids` are prompt and completion, `prompt_len` how many belong to the prompt; `logp` (nats, at T = 1) are the
    trainer's log-probs of the completion [T] under this version, `parent_logp` the same under the version before it
    (None for the first). `noise_floor` (nats) is the largest |Δlogp| after a 1e-7-relative change of the adapter.

    Raises `ValueError` when lengths do not fit or a number is not finite.

    >>> probe = Probe(token_ids=(1, 7, 9, 4), prompt_len=2, logp=(-0.5, -1.25), noise_floor=0.0)
    >>> probe.completion_ids
    (9, 4)
    """

    token_ids: tuple[int, ...]
    prompt_len: int
    logp: tuple[float, ...]
    noise_floor: float
    parent_logp: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        n_T = len(self.token_ids) - self.prompt_len
        if self.prompt_len < 1 or n_T < 1:
            raise ValueError(f"a probe needs a prompt and a completion, not {self.prompt_len} and {n_T} tokens")
        for name, logp_T in (("logp", self.logp), ("parent_logp", self.parent_logp)):
            if logp_T is None:
                continue
            if len(logp_T) != n_T:
                raise ValueError(f"{name} has {len(logp_T)} values for {n_T} completion tokens")
            if not all(math.isfinite(x) for x in logp_T):
                raise ValueError(f"{name} holds a number that is not finite")
        if not math.isfinite(self.noise_floor) or self.noise_floor < 0:
            raise ValueError(f"noise_floor is {self.noise_floor!r}; it must be finite and not negative")

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The part that is read."""
        return self.token_ids[: self.prompt_len]

    @property
    def completion_ids(self) -> tuple[int, ...]:
        """The part that is scored."""
        return self.token_ids[self.prompt_len :]


class ProbeCause(enum.StrEnum):
    """What a comparison found; only MATCH lets a version serve."""

    MATCH = "match"
    MALFORMED = "malformed"
    STALE = "stale"
    ZERO_DELTA = "zero_delta"
    MISMATCH = "mismatch"


@dataclass(frozen=True)
class ProbeVerdict:
    """Outcome of a comparison. Differences and tolerance are the largest over the probe's tokens, in nats.

    `trainer_change` is how far the trainer's answer moved from the parent version, `engine_change` how far the
    engine's did; None where there is nothing to compare with.
    """

    cause: ProbeCause
    reason: str
    max_abs_delta: float
    tolerance: float
    trainer_change: float | None = None
    engine_change: float | None = None

    @property
    def ok(self) -> bool:
        """Whether the version may serve."""
        return self.cause is ProbeCause.MATCH

    def require(self, name: str) -> None:
        """Raise `PublishRefused`, naming the version, unless the probe matched."""
        if not self.ok:
            raise PublishRefused(f"{name} is refused ({self.cause}): {self.reason}; the old version keeps serving")


def compare_probe(
    probe: Probe,
    engine_logp_T: Sequence[float],
    previous_engine_logp_T: Sequence[float] | None = None,
    base_engine_logp_T: Sequence[float] | None = None,
    *,
    factor: float = TOLERANCE_FACTOR,
    tiny: float = TINY,
) -> ProbeVerdict:
    """Compare the engine's answer on a freshly loaded version with the trainer's.

    Two conditions, both needed:

    1. The answer lies within max(noise floor x factor, tiny) of the trainer's. Exactly 0 is normal.
    2. Where the answer is not the trainer's to the bit although the trainer's own moved from the parent version by more
       than the noise floor, it is neither `previous_engine_logp_T` (the engine's answer under the version it served
       before, None for the first) nor `base_engine_logp_T` (its answer without any adapter, None when not asked).
       This catches a stale cache or a lost delta where the step was smaller than the tolerance.

    Pure: loads and switches nothing.

    >>> probe = Probe((1, 7, 9, 4), 2, (-0.5, -1.25), noise_floor=1e-6, parent_logp=(-0.6, -1.5))
    >>> compare_probe(probe, (-0.5, -1.25), (-0.6, -1.5)).cause
    <ProbeCause.MATCH: 'match'>
    >>> compare_probe(probe, (-0.6, -1.5), (-0.6, -1.5)).cause
    <ProbeCause.STALE: 'stale'>
    """
    tolerance = max(probe.noise_floor * factor, tiny)
    problem = _malformed(probe, engine_logp_T, previous_engine_logp_T, base_engine_logp_T)
    if problem is not None:
        return ProbeVerdict(ProbeCause.MALFORMED, problem, math.inf, tolerance)
    delta = _distance(engine_logp_T, probe.logp)
    trainer_change = None if probe.parent_logp is None else _distance(probe.logp, probe.parent_logp)
    engine_change = None if previous_engine_logp_T is None else _distance(engine_logp_T, previous_engine_logp_T)

    def verdict(cause: ProbeCause, reason: str) -> ProbeVerdict:
        return ProbeVerdict(cause, reason, delta, tolerance, trainer_change, engine_change)

    moved = trainer_change is not None and trainer_change > probe.noise_floor
    as_before = engine_change == 0
    as_base = base_engine_logp_T is not None and _distance(engine_logp_T, base_engine_logp_T) == 0
    said = f"max |delta log-prob| {delta:.3g}, {tolerance:.3g} is allowed"
    if delta <= tolerance and not (moved and delta > 0 and (as_before or as_base)):
        return verdict(ProbeCause.MATCH, said)
    if as_before and moved:
        reason = f"{said}; the trainer's answer moved by {trainer_change:.3g}, the engine's is still the previous one"
        return verdict(ProbeCause.STALE, reason)
    if as_base:
        return verdict(
            ProbeCause.ZERO_DELTA, f"{said}; the engine's answer is the bare base's: the adapter does nothing"
        )
    return verdict(ProbeCause.MISMATCH, said)


def _malformed(probe: Probe, *answers: Sequence[float] | None) -> str | None:
    wanted = len(probe.logp)
    for answer in answers:
        if answer is None:
            continue
        if len(answer) != wanted:
            return f"the engine gave {len(answer)} log-probs for {wanted} tokens"
        if not all(math.isfinite(x) for x in answer):
            return "the engine gave a log-prob that is not finite"
    return None


def _distance(a_T: Sequence[float], b_T: Sequence[float]) -> float:
    return max(abs(float(a) - float(b)) for a, b in zip(a_T, b_T, strict=True))
