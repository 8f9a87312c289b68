"""Life of a group in the pool.

    admit ─▶ RUNNING ──commit──▶ READY ──lease_batch──▶ LEASED ──mark_trained──▶ TRAINED
                │                 │ ▲                    │ │                        │
                │                 │ └──────requeue───────┘ │                        │
           reject, drop          drop ──▶ DROPPED ◀──drop──┘      rewind (resume):  └─▶ READY, in its old batch order
                └───────────────────────────▲

A lease ends exactly once: TRAINED, DROPPED or requeued. Rows that an earlier owner held when it died are settled when
the next owner opens the pool: LEASED returns to READY, RUNNING (which has no rollouts) is deleted and its prompt put
back.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tithe.types import RolloutGroup


class GroupState(enum.StrEnum):
    """Where a group is; the text is what the column `rollout_group.state` holds."""

    RUNNING = "running"
    READY = "ready"
    LEASED = "leased"
    TRAINED = "trained"
    DROPPED = "dropped"


@dataclass(frozen=True)
class Move:
    """A legal change of state; from anywhere else it raises `PoolError`. A rewind, done before the loops start, is the
    only way out of TRAINED.
    """

    name: str
    sources: frozenset[GroupState]
    target: GroupState


COMMIT = Move("committed", frozenset({GroupState.RUNNING}), GroupState.READY)
REJECT = Move("rejected", frozenset({GroupState.RUNNING}), GroupState.DROPPED)
LEASE = Move("leased", frozenset({GroupState.READY}), GroupState.LEASED)
TRAIN = Move("marked trained", frozenset({GroupState.LEASED}), GroupState.TRAINED)
REQUEUE = Move("requeued", frozenset({GroupState.LEASED}), GroupState.READY)
DROP = Move("dropped", frozenset({GroupState.RUNNING, GroupState.READY, GroupState.LEASED}), GroupState.DROPPED)


class DropReason(enum.StrEnum):
    """Why a group left without being trained; its prompt is put back.

    STALE: too old when its batch began. FAILED: no rollout of it can be used; after several failures in a row the
    prompt is not put back. NON_FINITE: its optimizer step was skipped. NO_SPREAD: its rewards are equal and
    `rl.dynamic_sampling` wants others; the prompt is not put back, it comes again in its turn.
    """

    STALE = "stale"
    FAILED = "failed"
    NON_FINITE = "non_finite"
    NO_SPREAD = "no_spread"


@dataclass(frozen=True)
class PoolCounts:
    """Groups by where they are and the rollouts in them, with the serial they belong to, read at one instant.

    >>> counts = PoolCounts(serial=50, running=2, ready=1, leased=0, running_rollouts=8, ready_rollouts=4)
    >>> counts.accepted_rollouts(batch_rollouts=8)
    404
    """

    serial: int
    running: int
    ready: int
    leased: int
    running_rollouts: int = 0
    ready_rollouts: int = 0
    leased_rollouts: int = 0

    def accepted_rollouts(self, *, batch_rollouts: int) -> int:
        """`accepted` of `staleness.may_start_group`: what was trained plus what waits or is leased."""
        return self.serial * batch_rollouts + self.ready_rollouts + self.leased_rollouts


@dataclass(frozen=True)
class Admission:
    """A group that may now be generated: `n_samples` rollouts, with the settings that the schedule has for `batch`."""

    group_id: int
    prompt_id: str
    n_samples: int
    batch: int


@dataclass(frozen=True, eq=False)
class Lease:
    """Answer to a request for a batch: `groups` is a whole batch or empty; `dropped` lists what was too old."""

    groups: tuple[RolloutGroup, ...]
    dropped: tuple[int, ...]


@dataclass(frozen=True)
class Checkpoint:
    """A durable checkpoint: files in `directory`, loop state in `state` (JSON values)."""

    serial: int
    directory: Path
    state: Mapping[str, Any]


@dataclass(frozen=True)
class Rewind:
    """What a resume goes on from. `checkpoint` is None when none was recorded: the run starts again at serial 0.

    `replayed` groups were trained after the checkpoint and wait again, in their old batches.
    """

    checkpoint: Checkpoint | None
    serial: int
    replayed: int
