"""One forward over rows of many sequences: writes the plan's inputs, runs it, hands each owner its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from tithe.engines.sequences import LiveVersion, Running
from tithe.errors import EngineError, PublishRefused
from tithe.models import Draws, ForwardPlan, Ranks, Segment, serve
from tithe.types import ExpertArray

Owner = TypeVar("Owner")
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Work(Generic[Owner]):
    """Tokens of one sequence at positions `first`.. to be computed under one version; `slot` is its block-table row."""

    owner: Owner
    version: LiveVersion
    slot: int
    first: int
    tokens: list[int]


@dataclass(frozen=True, eq=False)
class Computed(Generic[Owner]):
    """A piece of work done: residual rows x [n, H] (a view valid until the next run), and the experts that the rows
    took [n, L, k] (None in a dense model)."""

    work: Work[Owner]
    x: Tensor
    experts: ExpertArray | None


def run_rows(plan: ForwardPlan, work: list[Work[Owner]]) -> list[Computed[Owner]]:
    """Compute all rows. Rows of one version are put side by side, in the order given."""
    names = list(dict.fromkeys(w.version.name for w in work))
    ordered = sorted(work, key=lambda w: names.index(w.version.name))
    lengths = np.array([len(w.tokens) for w in ordered])
    total = int(lengths.sum())
    ids = np.fromiter((t for w in ordered for t in w.tokens), np.int32, total)
    start = np.cumsum(lengths) - lengths
    position = np.arange(total) - np.repeat(start - np.array([w.first for w in ordered]), lengths)
    b = plan.buffers
    b.position[:total] = torch.from_numpy(position.astype(np.int32))
    b.sequence[:total] = torch.from_numpy(np.repeat(np.array([w.slot for w in ordered], np.int32), lengths))
    segments: list[Segment] = []
    at = 0
    for name in names:
        rows = sum(len(w.tokens) for w in ordered if w.version.name == name)
        model = next(w.version.model for w in ordered if w.version.name == name)
        segments.append((at, at + rows, model))
        at += rows
    x = plan.run(torch.from_numpy(ids), segments)
    chosen = plan.chosen(total).numpy().astype(np.uint16).transpose(1, 0, 2) if plan.is_mixture else None
    parts = [slice(int(s), int(s + n)) for s, n in zip(start, lengths, strict=True)]
    return [
        Computed(w, x[part], None if chosen is None else chosen[part].copy())
        for w, part in zip(ordered, parts, strict=True)
    ]


class Forwards:
    """The forwards of an engine. On several ranks all make them together: one a tick, with rows or without; `together`
    each as many as its job needs. Belongs to the lane."""

    def __init__(self, plan: ForwardPlan, ranks: Ranks) -> None:
        self._plan, self._ranks = plan, ranks
        self._is_apart = False

    def serve(self, versions: Sequence[LiveVersion]) -> None:
        """Say which versions the rows of any rank may be under, in an order that all ranks have."""
        if self._ranks.size > 1:
            serve(self._plan, [version.model for version in versions if version.model is not None])

    def run(self, work: list[Work[Owner]]) -> list[Computed[Owner]]:
        """Compute all rows, if there are any."""
        if work:
            if self._is_apart:
                self._any_has_rows(True)
            return run_rows(self._plan, work)
        if self._ranks.size > 1 and not self._is_apart:
            self._plan.run_idle()
        return []

    def together(self, job: Callable[[], T]) -> T:
        """What `job` gives, which makes as many forwards as it needs. Every rank has one; what any refuses
        (`EngineError`, `PublishRefused`) is refused on all."""
        problem: EngineError | PublishRefused | None = None
        answers: list[T] = []
        with self._apart():
            try:
                answers.append(job())
            except (EngineError, PublishRefused) as error:
                problem = error
        self._ranks.agree(problem)
        return answers[0]

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """A block in which ranks make different numbers of forwards: they tell each other before each, and those that
        have left the block take part until all have. An error that leaves the block ends the run."""
        if self._ranks.size == 1:
            yield
            return
        self._is_apart = True
        yield
        self._is_apart = False
        while self._any_has_rows(False):
            self._plan.run_idle()

    def _any_has_rows(self, own: bool) -> bool:
        told = self._ranks.all_gather(torch.tensor([own]))
        return any(bool(one) for one in told)


def draws(ready: Sequence[Running]) -> Draws:
    """How each request's next token is drawn."""
    params = [s.request.params for s in ready]
    counters = [(p.seed, p.group, p.sample, len(s.tokens)) for p, s in zip(params, ready, strict=True)]
    return Draws(
        temperature=np.array([p.temperature for p in params], np.float32),
        top_k=np.array([p.top_k for p in params], np.int32),
        top_p=np.array([p.top_p for p in params], np.float32),
        min_p=np.array([p.min_p for p in params], np.float32),
        counters=np.array(counters, np.int64),
    )


def write_table(plan: ForwardPlan, slot: int, pages: list[int]) -> None:
    """Point a block-table row at its pages."""
    plan.buffers.table[slot, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
