"""The staleness contract and its proof.

Names (all counts in rollouts, all serials in batches trained)

    B  rollouts per batch          G  rollouts per group, B a multiple of G (of several sizes: `batches`)
    S  the trainer's serial: batches trained so far
    V  the served serial: the newest version the engine has confirmed; V ≤ S
    L  `max_policy_update_lag`     M  `max_sample_age`     K  `sync_every`, 1 ≤ K ≤ max(1, L)
    A  accepted = S·B + rollouts of finished groups that wait or are leased (dropped groups do not count)
    R  running: rollouts of admitted groups that are not finished

`A` needs no history: the pool computes it from S and from the rows it holds. A run resumed at S = 50 with an empty pool
has A = 50·B and may admit (M + 1)·B rollouts, not 50·B more.

Rules

    may_start_group   A + R + G ≤ (V + M + 1)·B
    may_begin_batch   S - V ≤ L, asked once per batch
    must_publish      S - V ≥ min(K, M + 1), asked after every batch and before waiting for the next
    must_drop         S - (serial of the group's oldest token) > M, asked when the batch begins

Proof

1.  *Backlog.* Only an admission raises A + R: finishing moves a group from R to A, training moves B from "waiting" to
    S·B, a drop lowers the sum. V never falls. So A + R ≤ (V + M + 1)·B always holds, and the outstanding rollouts
    A + R - S·B never exceed (V + M + 1 - S)·B ≤ (M + 1)·B.
2.  *One batch per version at M = 0.* A batch begins at S only if B rollouts wait: (S + 1)·B ≤ A. With 1,
    (S + 1)·B ≤ (V + 1)·B, so V = S. Before V reached S, A + R ≤ S·B (1 with V ≤ S - 1); V reaches S only after
    S batches are trained, so the outstanding A + R - S·B was then ≤ 0: nothing admitted under an older version was
    left. Hence batch S holds exactly the B rollouts admitted under version S.
3.  *Age.* `must_drop` lets no group older than M into a batch: the age of every trained group is ≤ M. It seldom
    acts: groups admitted under versions ≤ V that are not dropped number at most (V + M + 1)·B rollouts, so if they
    are trained in the order in which they were admitted, the last of them enters a batch that begins at S ≤ V + M,
    at an age ≤ M. Only a group that a later one has overtaken can grow too old.
4.  *Lag.* Every batch begins with S - V ≤ L. With `must_publish` obeyed, S - V ≤ min(K, M + 1) - 1 when the trainer
    starts to wait, which is ≤ min(max(1, L) - 1, M) ≤ min(L, M): `may_begin_batch` holds, unless an engine confirms
    late.
5.  *No deadlock.* The trainer waits at S, with S - V ≤ M by 4, because fewer than B rollouts wait once the old ones
    are dropped. If nothing runs (R = 0), then A ≤ S·B + B - G and A + R + G ≤ (S + 1)·B ≤ (V + M + 1)·B: a group may
    start. If something runs, it ends. So one of the two always moves. This is why `must_publish` looks at M as
    well: with K = 4 and M = 0 the trainer would wait for rollouts that need version 1, and version 1 for batch 4.
6.  *No endless dropping.* A waiting group becomes too old only when S rises. While the trainer waits, S stands and
    S - V ≤ M, so a group admitted now is young enough for the batch that is waited for.

A further bound on waiting groups (`rollout_buffer_size`) keeps 5 true as long as it is at least B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from tithe.errors import ConfigError

if TYPE_CHECKING:
    from tithe.config.learning import RlSettings


@dataclass(frozen=True)
class Bounds:
    """The five numbers of the contract; see the module's proof.

    >>> sync = Bounds(batch_rollouts=64, group_size=8, max_lag=0, max_age=0, sync_every=1)
    >>> sync.groups_per_batch
    8
    >>> may_start_group(sync, accepted=0, running=56, served_serial=0)
    True
    >>> may_start_group(sync, accepted=0, running=64, served_serial=0)
    False
    """

    batch_rollouts: int
    group_size: int
    max_lag: int
    max_age: int
    sync_every: int = 1

    @classmethod
    def of(cls, rl: RlSettings) -> Self:
        """The contract of a configuration."""
        return cls(
            batch_rollouts=rl.batch_size_per_update,
            group_size=rl.samples_per_prompt,
            max_lag=rl.max_policy_update_lag,
            max_age=rl.max_sample_age,
            sync_every=rl.sync_every,
        )

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ConfigError(
                f"rl.samples_per_prompt is {self.group_size}; it must be at least 1", "rl.samples_per_prompt"
            )
        if self.batch_rollouts < 1 or self.batch_rollouts % self.group_size:
            raise ConfigError(
                f"rl.batch_size_per_update is {self.batch_rollouts} rollouts; it must be a positive multiple of "
                f"rl.samples_per_prompt = {self.group_size}",
                "rl.batch_size_per_update",
            )
        if self.max_lag < 0:
            raise ConfigError(
                f"rl.max_policy_update_lag is {self.max_lag}; it must be 0 or more", "rl.max_policy_update_lag"
            )
        if self.max_age < 0:
            raise ConfigError(f"rl.max_sample_age is {self.max_age}; it must be 0 or more", "rl.max_sample_age")
        if not 1 <= self.sync_every <= max(1, self.max_lag):
            raise ConfigError(
                f"rl.sync_every is {self.sync_every}; it must lie between 1 and max(1, rl.max_policy_update_lag) "
                f"= {max(1, self.max_lag)}",
                "rl.sync_every",
            )

    @property
    def groups_per_batch(self) -> int:
        """B / G."""
        return self.batch_rollouts // self.group_size

    @property
    def max_outstanding(self) -> int:
        """Most rollouts that can be finished or running and not yet trained: (M + 1)·B (proof 1)."""
        return (self.max_age + 1) * self.batch_rollouts

    @property
    def publish_gap(self) -> int:
        """Batches trained on one served version before a publish is due: min(K, M + 1) (proofs 4 and 5)."""
        return min(self.sync_every, self.max_age + 1)


def may_start_group(bounds: Bounds, *, accepted: int, running: int, served_serial: int) -> bool:
    """Whether one more whole group may be admitted under the served version.

    `accepted` = S·B + rollouts that wait or are leased, `running` = rollouts of admitted, unfinished groups.
    """
    room = room_for_rollouts(bounds, accepted=accepted, running=running, served_serial=served_serial)
    return room >= bounds.group_size


def room_for_rollouts(bounds: Bounds, *, accepted: int, running: int, served_serial: int) -> int:
    """Rollouts that may still be admitted under the served version, in groups of any size: (V + M + 1)·B - A - R."""
    return (served_serial + bounds.max_age + 1) * bounds.batch_rollouts - accepted - running


def may_begin_batch(bounds: Bounds, *, trainer_serial: int, served_serial: int) -> bool:
    """Whether the next batch may begin: the trainer is at most L batches ahead of what is served."""
    return trainer_serial - served_serial <= bounds.max_lag


def must_publish(bounds: Bounds, *, trainer_serial: int, served_serial: int) -> bool:
    """Whether the trainer has to publish before it waits for another batch."""
    return trainer_serial - served_serial >= bounds.publish_gap


def must_drop(bounds: Bounds, *, min_serial: int, trainer_serial: int) -> bool:
    """Whether a group whose oldest token has `min_serial` is too old for the batch that begins at `trainer_serial`."""
    return trainer_serial - min_serial > bounds.max_age
