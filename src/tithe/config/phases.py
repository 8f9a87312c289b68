"""The values of a run's schedule at a batch: a pure function of the configuration and a number that the pool keeps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tithe.config.schedules import EVERY_RATE, Phase
from tithe.config.sections import RunSections


@dataclass(frozen=True)
class PhaseValues:
    """What holds at one batch. `index` counts phases from 0; a run without phases is one nameless phase.

    >>> PhaseValues("explore", 0, 1.0, 0.95, 8, kl_coef=0.01, lr=2e-4).samples
    8
    """

    name: str
    index: int
    temperature: float
    top_p: float
    samples: int
    kl_coef: float
    lr: float


@dataclass(frozen=True)
class Schedule:
    """Phase i begins with batch `starts[i]` (0 is the first batch of the run) and has `values[i]` there.

    Batches are numbered by the trainer's serial when they begin. Resume-safe because `at` has no state: the number
    comes from the pool.
    """

    starts: tuple[int, ...]
    values: tuple[PhaseValues, ...]
    is_linear: bool = False

    def at(self, batch: int) -> PhaseValues:
        """The values at a batch; beyond the last phase's beginning they stay.

        >>> a, b = PhaseValues("a", 0, 1.0, 1.0, 8, 0.0, 2e-4), PhaseValues("b", 1, 0.6, 1.0, 4, 0.0, 1e-4)
        >>> [Schedule((0, 4), (a, b), is_linear=True).at(i).temperature for i in (0, 1, 4, 9)]
        [1.0, 0.9, 0.6, 0.6]
        """
        index = max(0, bisect_right(self.starts, batch) - 1)
        here = self.values[index]
        if not self.is_linear or index + 1 == len(self.values):
            return here
        there = self.values[index + 1]
        done = (batch - self.starts[index]) / (self.starts[index + 1] - self.starts[index])
        return replace(
            here,
            temperature=_between(here.temperature, there.temperature, done),
            top_p=_between(here.top_p, there.top_p, done),
            kl_coef=_between(here.kl_coef, there.kl_coef, done),
            lr=_between(here.lr, there.lr, done),
        )


def _between(start: float, end: float, done: float) -> float:
    return start if start == end else (1.0 - done) * start + done * end


def schedule_of(cfg: RunSections) -> Schedule:
    """The schedule of a configuration. A phase of no batches is left out, its values being those of none."""
    usual = PhaseValues(
        name="",
        index=0,
        temperature=cfg.rollout.temperature,
        top_p=cfg.rollout.top_p,
        samples=cfg.rl.samples_per_prompt,
        kl_coef=cfg.rl.kl_coef,
        lr=cfg.optimizer.lr,
    )
    phases = cfg.schedule.phases
    if not phases:
        return Schedule((0,), (usual,))
    starts = phase_starts(phases, cfg.run.max_steps)
    ends = (*starts[1:], max(cfg.run.max_steps, starts[-1]) + 1)
    kept = [i for i, (start, end) in enumerate(zip(starts, ends, strict=True)) if start < end]
    values = tuple(_values(phases[i], i, usual) for i in kept)
    return Schedule(tuple(starts[i] for i in kept), values, is_linear=cfg.schedule.change == "linear")


def _values(phase: Phase, index: int, usual: PhaseValues) -> PhaseValues:
    given = {
        "temperature": phase.temperature,
        "top_p": phase.top_p,
        "samples": phase.samples_per_prompt,
        "kl_coef": phase.kl_coef,
        "lr": phase.lr,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    return replace(usual, name=phase.name, index=index, **changes)


def phase_starts(phases: tuple[Phase, ...], total: int) -> tuple[int, ...]:
    """First batch of each phase, the first one's being 0. Shares are rounded to whole batches of `total`.

    >>> [phase_starts(tuple(Phase(name=n, share=s) for n, s in (("a", 2), ("b", 1), ("c", 1))), 10)]
    [(0, 5, 8)]
    >>> phase_starts((Phase(name="a", until_step=3), Phase(name="b")), 10)
    (0, 3)
    """
    if any(phase.until_step is not None for phase in phases):
        return (0, *(phase.until_step or 0 for phase in phases[:-1]))
    shares = [1.0 if phase.share is None else phase.share for phase in phases]
    before = [sum(shares[:i]) for i in range(len(shares))]
    whole = sum(shares) or 1.0
    return tuple(int(total * part / whole + 0.5) for part in before)


def phase_problems(cfg: RunSections) -> Iterator[tuple[str, str]]:
    """(key to change, what is wrong with it) of the section `schedule`."""
    schedule, rl = cfg.schedule, cfg.rl
    phases = schedule.phases
    names = [phase.name for phase in phases]
    if len(set(names)) < len(names):
        yield "schedule.phases", f"{', '.join(names)}: two phases share a name; rename one"
    yield from _length_problems(phases)
    for phase in phases:
        size = phase.samples_per_prompt
        if size is not None and rl.batch_size_per_update % size:
            batch = f"rl.batch_size_per_update = {rl.batch_size_per_update}"
            problem = f"samples_per_prompt = {size} does not divide {batch}; change one of the two"
            yield "schedule.phases", f"{phase.name}: {problem}"
    if schedule.change == "linear" and len(phases) < 2:
        yield "schedule.change", f"linear while there are {len(phases)} phases to go between; give two, or leave it out"
    low, high = schedule.rest_outside
    if low >= high:
        yield "schedule.rest_outside", f"[{low:g}, {high:g}]: the first must be less than the second"
    elif (low, high) != EVERY_RATE and schedule.rest_batches == 0:
        reason = "while schedule.rest_batches = 0 lets no prompt rest; give that, or leave this out"
        yield "schedule.rest_outside", f"[{low:g}, {high:g}] {reason}"
    if schedule.adaptive_samples is None:
        return
    fewest, most = schedule.adaptive_samples
    sizes = [rl.samples_per_prompt, *(p.samples_per_prompt for p in phases if p.samples_per_prompt is not None)]
    if fewest > min(sizes):
        reason = f"more than the number of samples it would lower ({min(sizes)}); lower it, or raise that"
        yield "schedule.adaptive_samples", f"[{fewest}, {most}]: {fewest} is {reason}"
    if most < max(sizes):
        reason = f"less than the number of samples it would raise ({max(sizes)}); raise it"
        yield "schedule.adaptive_samples", f"[{fewest}, {most}]: {most} is {reason}"


def _length_problems(phases: tuple[Phase, ...]) -> Iterator[tuple[str, str]]:
    by_share = [phase.name for phase in phases if phase.share is not None]
    by_step = [phase for phase in phases if phase.until_step is not None]
    if by_share and by_step:
        yield "schedule.phases", f"{by_share[0]} has a share and {by_step[0].name} until_step; give all phases the same"
    elif by_share and (len(by_share) < len(phases) or not any(phase.share for phase in phases)):
        yield "schedule.phases", "either every phase has a share, and one of them more than 0, or none has"
    elif by_step:
        ends = [phase.until_step for phase in phases[:-1]]
        known = [end for end in ends if end is not None]
        if len(known) < len(ends):
            yield "schedule.phases", "every phase but the last needs until_step"
        elif sorted(set(known)) != known or (phases[-1].until_step or known[-1] + 1) <= known[-1]:
            yield "schedule.phases", f"until_step must rise from phase to phase, not {known}"
