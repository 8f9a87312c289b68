"""The writer's view of the experience pool: admissions, commits, leases, checkpoints."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tithe.errors import PoolError, ResumeError, RunError
from tithe.pool.codec import ARRAY_DTYPES, check_group
from tithe.pool.curriculum import Curriculum, Draw
from tithe.pool.prompts import PromptSource
from tithe.pool.rows import (
    add_group,
    failures_in_a_row,
    give_up_running,
    has_running,
    is_in_batch,
    last_failure,
    last_record,
    load_group,
    move_group,
    store_rollouts,
)
from tithe.pool.states import (
    COMMIT,
    DROP,
    LEASE,
    REJECT,
    REQUEUE,
    TRAIN,
    Admission,
    Checkpoint,
    DropReason,
    GroupState,
    Lease,
    PoolCounts,
    Rewind,
)
from tithe.pool.store import Store
from tithe.staleness import choose_batch
from tithe.types import RolloutGroup

_QUEUE_ORDER = "batch_serial IS NULL, batch_serial, batch_position, group_id"
"""Groups to be trained again come first, in their old batches; then the others in the order of their admission."""

ANY = Draw()
"""One sample of the next prompt."""


class Pool:
    """The experience pool of one run, owned by one process; safe to call from several threads.

    Every change is one durable transaction: on return it is on the device (SQLite WAL, synchronous=FULL), on an
    exception nothing has happened. Illegal moves raise `PoolError`; a full or read-only disk raises `UserError`. All
    calls block for the disk (a fraction of a millisecond to a few) and never for the other loop.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> with Pool.create(Path(folder.name) / "pool.sqlite", "run-1") as pool:
    ...     group_id = pool.admit("sum-3-4", lineage=0, serial=0)
    ...     pool.counts()
    PoolCounts(serial=0, running=1, ready=0, leased=0)
    >>> folder.cleanup()
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._prompts: PromptSource | None = None
        self._max_failures = 3
        self._curriculum = Curriculum()

    @classmethod
    def create(cls, path: Path, run_id: str) -> Self:
        """A new pool file. Raises `UserError` when there is one already or the place cannot be written."""
        return cls._owned(Store.create(path, run_id))

    @classmethod
    def open(cls, path: Path) -> Self:
        """Take over an existing pool and settle what its last owner held: leased groups are READY again, running ones
        are deleted and their prompts put back, first in the queue. Raises `ResumeError` when there is no usable pool,
        and `UserError` while another process owns it.
        """
        return cls._owned(Store.open(path))

    @classmethod
    def _owned(cls, store: Store) -> Self:
        try:
            store.take_ownership()
            with store.transaction() as db:
                db.execute("UPDATE rollout_group SET state = 'ready' WHERE state = 'leased'")
                give_up_running(db)
        except BaseException:
            store.close()
            raise
        return cls(store)

    # ------------------------------------------------------------------ what is where

    @property
    def path(self) -> Path:
        """The database file."""
        return self._store.path

    @property
    def run_id(self) -> str:
        """The run this pool was created for."""
        return str(self._state("run_id"))

    @property
    def serial(self) -> int:
        """Batches trained: the trainer's serial."""
        return int(self._state("serial"))

    def _state(self, column: str) -> Any:
        with self._store.reading() as db:
            return db.execute("SELECT * FROM pool_state").fetchone()[column]

    def counts(self) -> PoolCounts:
        """Serial and group counts of one instant: a batch leaves LEASED and raises `serial` in one transaction."""
        with self._store.reading() as db:
            serial = db.execute("SELECT serial FROM pool_state").fetchone()[0]
            rows = db.execute(
                "SELECT state, COUNT(*), SUM(n_samples) FROM rollout_group"
                " WHERE state IN ('running', 'ready', 'leased') GROUP BY state"
            ).fetchall()
        found = {GroupState(state): (int(groups), int(rollouts)) for state, groups, rollouts in rows}
        live = (GroupState.RUNNING, GroupState.READY, GroupState.LEASED)
        groups, rollouts = zip(*(found.get(state, (0, 0)) for state in live), strict=True)
        return PoolCounts(serial, *groups, *rollouts)

    def disk_bytes(self) -> int:
        """Size on disk: the database, its write-ahead log and index."""
        names = (self.path, *(self.path.with_name(self.path.name + suffix) for suffix in ("-wal", "-shm")))
        return sum(name.stat().st_size for name in names if name.exists())

    # ------------------------------------------------------------------ the rollout loop's side

    def bind_prompts(
        self, prompts: PromptSource, *, max_failures: int = 3, curriculum: Curriculum | None = None
    ) -> None:
        """Say where `admit_next` draws from. A prompt whose groups failed `max_failures` times in a row is not drawn
        again; `curriculum` says which ones are passed over for a while.

        Raises `ResumeError` when the pool was begun with other prompts or another order.
        """
        with self._store.transaction() as db:
            known = db.execute("SELECT prompt_digest FROM pool_state").fetchone()[0]
            if known not in (None, prompts.digest):
                raise ResumeError(
                    f"the prompts of the task, or the seed of their order, differ from those that {self.path} was begun"
                    " with; a resume goes on with the same ones"
                )
            db.execute("UPDATE pool_state SET prompt_digest = ?", (prompts.digest,))
        self._prompts = prompts
        self._max_failures = max_failures
        self._curriculum = curriculum or Curriculum()

    def admit(self, prompt_id: str, lineage: int, serial: int) -> int:
        """Begin a group for a prompt of the caller's choice; returns its id, which no other group ever has."""
        with self._store.transaction() as db:
            return add_group(db, prompt_id, (lineage, serial))

    def admit_next(self, lineage: int, serial: int, draw: Draw = ANY) -> Admission:
        """Begin the group of the next prompt: one that was put back, else the next of the shuffled order that the
        curriculum does not pass over (if it passes over all of them, simply the next).

        Raises `RunError` when every prompt has failed too often.
        """
        with self._store.transaction() as db:
            owed = db.execute("SELECT * FROM put_back ORDER BY position LIMIT 1").fetchone()
            if owed is not None:
                db.execute("DELETE FROM put_back WHERE position = ?", (owed["position"],))
            prompt_id = owed["prompt_id"] if owed is not None else None
            if prompt_id is None:
                prompt_id = self._next_prompt(db, draw.batch)
            if owed is None:
                group_id, size = None, draw.samples(last_record(db, prompt_id, draw.batch))
            else:
                group_id, size = owed["group_id"], min(owed["n_samples"], draw.most)
            group_id = add_group(
                db, prompt_id, (lineage, serial), group_id, n_samples=size, batch=draw.batch, phase=draw.phase
            )
        return Admission(group_id, prompt_id, size, draw.batch)

    def _next_prompt(self, db: sqlite3.Connection, batch: int) -> str:
        if self._prompts is None:
            raise PoolError("no prompts are bound to the pool (bind_prompts)")
        start = db.execute("SELECT prompt_cursor FROM pool_state").fetchone()[0]
        first: int | None = None
        # two passes meet every prompt, whatever the cursor's place in the first
        for cursor in range(start, start + 2 * len(self._prompts)):
            prompt_id = self._prompts.at(cursor)
            if failures_in_a_row(db, prompt_id) >= self._max_failures:
                continue
            first = cursor if first is None else first
            if not self._is_passed_over(db, prompt_id, batch, cursor):
                break
        else:
            if first is None:
                text = f"every prompt failed {self._max_failures} times in a row; the last failure: {last_failure(db)}"
                raise RunError(text)
            cursor = first
        db.execute("UPDATE pool_state SET prompt_cursor = ?", (cursor + 1,))
        return self._prompts.at(cursor)

    def _is_passed_over(self, db: sqlite3.Connection, prompt_id: str, batch: int, cursor: int) -> bool:
        if self._prompts is None or not self._curriculum.is_on:
            return False
        if is_in_batch(db, prompt_id, batch):
            return True
        record = last_record(db, prompt_id, batch)
        return self._curriculum.skips(record, batch=batch, coin=self._prompts.coin(cursor))

    def commit(self, group: RolloutGroup, pass_rate: float | None = None) -> None:
        """Store a finished group: RUNNING → READY, with the share of right answers if it was measured. Tell others of
        it only after this returns.
        """
        check_group(group)
        with self._store.transaction() as db:
            store_rollouts(db, move_group(db, group.group_id, COMMIT), group, pass_rate)

    def reject(
        self,
        group: RolloutGroup,
        detail: str,
        reason: DropReason = DropReason.FAILED,
        pass_rate: float | None = None,
    ) -> bool:
        """Store a finished group that is not to be trained: RUNNING → DROPPED, its rollouts kept for reading. Returns
        whether the prompt was put back; one without spread is not, another takes its place.
        """
        check_group(group)
        with self._store.transaction() as db:
            store_rollouts(db, move_group(db, group.group_id, REJECT), group, pass_rate)
            return self._leave_dropped(db, group.group_id, group.prompt_id, reason, detail)

    def give_up_running(self) -> int:
        """Delete the running groups and put their prompts back, first in the queue, to be made again under the same
        ids; returns how many. For the end of a run; opening a pool does the same for an owner that died.
        """
        with self._store.transaction() as db:
            return give_up_running(db)

    # ------------------------------------------------------------------ the train loop's side

    def lease_batch(self, n_rollouts: int, trainer_serial: int, drop: Callable[[int], bool]) -> Lease:
        """Drop every READY group that is too old (`drop(min_serial)`), then lease groups of `n_rollouts` together,
        oldest admission first (`staleness.choose_batch`).

        With too few rollouts `Lease.groups` is empty and nothing is leased; the drops hold all the same. Deterministic:
        the same rows give the same batch. Raises `PoolError` when `trainer_serial` is not the pool's.
        """
        with self._store.transaction() as db:
            serial = db.execute("SELECT serial FROM pool_state").fetchone()[0]
            if serial != trainer_serial:
                raise PoolError(f"the trainer is at serial {trainer_serial}, the pool at {serial}")
            ready = db.execute(
                "SELECT group_id, min_serial, n_samples FROM rollout_group WHERE state = 'ready'"  # noqa: S608
                f" ORDER BY {_QUEUE_ORDER}"
            ).fetchall()
            dropped = tuple(row["group_id"] for row in ready if drop(row["min_serial"]))
            for group_id in dropped:
                row = move_group(db, group_id, DROP)
                self._leave_dropped(db, group_id, row["prompt_id"], DropReason.STALE, f"too old after batch {serial}")
            gone = set(dropped)
            young = [(row["group_id"], row["n_samples"]) for row in ready if row["group_id"] not in gone]
            places = choose_batch([size for _, size in young], n_rollouts, more_to_come=has_running(db))
            chosen = [young[place][0] for place in places]
            for group_id in chosen:
                move_group(db, group_id, LEASE)
            return Lease(tuple(load_group(db, group_id) for group_id in chosen), dropped)

    def mark_trained(self, group_ids: Sequence[int], serial: int) -> None:
        """LEASED → TRAINED for a whole batch, in this order. `serial` counts this batch too: exactly one more than the
        pool's, which moves with it.
        """
        with self._store.transaction() as db:
            before = db.execute("SELECT serial FROM pool_state").fetchone()[0]
            if not group_ids:
                raise PoolError(f"batch {serial} has no groups")
            if serial != before + 1:
                raise PoolError(f"batch {serial} cannot follow batch {before}: serials rise by one")
            # groups that a rewind put back still hold the places of their old batches
            db.executemany(
                "UPDATE rollout_group SET batch_serial = NULL, batch_position = NULL WHERE group_id = ?",
                [(group_id,) for group_id in group_ids],
            )
            for position, group_id in enumerate(group_ids):
                move_group(db, group_id, TRAIN)
                db.execute(
                    "UPDATE rollout_group SET batch_serial = ?, batch_position = ?, left_at_s = ? WHERE group_id = ?",
                    (serial, position, time.time(), group_id),
                )
            db.execute("UPDATE pool_state SET serial = ?", (serial,))

    def requeue(self, group_ids: Iterable[int]) -> None:
        """LEASED → READY: the batch was not trained; the groups keep their places in the queue."""
        with self._store.transaction() as db:
            for group_id in group_ids:
                move_group(db, group_id, REQUEUE)
                db.execute("UPDATE rollout_group SET requeues = requeues + 1 WHERE group_id = ?", (group_id,))

    def drop(self, group_ids: Iterable[int], reason: DropReason, detail: str = "") -> None:
        """RUNNING, READY or LEASED → DROPPED, and the prompts go to the end of the put-back queue with their groups'
        sizes; a prompt that has now failed too often in a row leaves the size alone, for another prompt.
        """
        with self._store.transaction() as db:
            for group_id in group_ids:
                row = move_group(db, group_id, DROP)
                self._leave_dropped(db, group_id, row["prompt_id"], reason, detail)

    def _leave_dropped(
        self, db: sqlite3.Connection, group_id: int, prompt_id: str, reason: DropReason, detail: str
    ) -> bool:
        db.execute(
            "UPDATE rollout_group SET reason = ?, detail = ?, left_at_s = ?, batch_serial = NULL, batch_position = NULL"
            " WHERE group_id = ?",
            (reason, detail, time.time(), group_id),
        )
        is_given_up = reason is DropReason.FAILED and failures_in_a_row(db, prompt_id) >= self._max_failures
        is_given_up = is_given_up or reason is DropReason.NO_SPREAD
        db.execute(
            "INSERT INTO put_back (prompt_id, n_samples) SELECT ?, n_samples FROM rollout_group WHERE group_id = ?",
            (None if is_given_up else prompt_id, group_id),
        )
        return not is_given_up

    # ------------------------------------------------------------------ checkpoints and retention

    def record_checkpoint(self, serial: int, directory: Path, state: Mapping[str, Any], *, keep: int = 2) -> None:
        """Name a checkpoint whose files are already durable; the `keep` newest stay recorded.

        `state` is whatever the loops need to go on, as JSON values (no NaN). `serial` must be the pool's own.
        """
        text = json.dumps(dict(state), allow_nan=False)
        folder = self.path.parent.absolute()
        place = directory.absolute()
        name = str(place.relative_to(folder)) if place.is_relative_to(folder) else str(place)
        with self._store.transaction() as db:
            current = db.execute("SELECT serial FROM pool_state").fetchone()[0]
            if serial != current:
                raise PoolError(f"a checkpoint of serial {serial} cannot be recorded at serial {current}")
            db.execute("INSERT OR REPLACE INTO checkpoint VALUES (?, ?, ?, ?)", (serial, name, text, time.time()))
            db.execute(
                "DELETE FROM checkpoint WHERE serial NOT IN"
                " (SELECT serial FROM checkpoint ORDER BY serial DESC LIMIT ?)",
                (max(1, keep),),
            )

    def checkpoints(self) -> list[Checkpoint]:
        """Recorded checkpoints, newest first."""
        with self._store.reading() as db:
            rows = db.execute("SELECT * FROM checkpoint ORDER BY serial DESC").fetchall()
        folder = self.path.parent
        return [Checkpoint(r["serial"], folder / r["directory"], json.loads(r["state"])) for r in rows]

    def latest_checkpoint(self) -> Checkpoint | None:
        """The newest recorded checkpoint, or None."""
        return next(iter(self.checkpoints()), None)

    def rewind_to_checkpoint(self, serial: int | None = None) -> Rewind:
        """Make the pool fit a checkpoint (the newest, or the recorded one of `serial`; without any, the beginning):
        groups trained after it are READY again in their batch order, later checkpoints are forgotten. To be called
        between opening the pool and starting the loops. Raises `ResumeError` when there is no such checkpoint.
        """
        recorded = self.checkpoints()
        chosen = next((c for c in recorded if serial in (None, c.serial)), None)
        if chosen is None and (recorded or serial not in (None, 0)):
            raise ResumeError(f"{self.path} records no checkpoint {serial}; it has {[c.serial for c in recorded]}")
        target = chosen.serial if chosen else 0
        with self._store.transaction() as db:
            replayed = db.execute(
                "UPDATE rollout_group SET state = 'ready', left_at_s = NULL"
                " WHERE state = 'trained' AND batch_serial > ?",
                (target,),
            ).rowcount
            db.execute("DELETE FROM checkpoint WHERE serial > ?", (target,))
            db.execute("UPDATE pool_state SET serial = ?", (target,))
        return Rewind(chosen, target, replayed)

    def prune_trained(self, keep_batches: int) -> int:
        """Strip the arrays of dropped groups and of those trained more than `keep_batches` ago; returns how many. Text
        and rewards stay, and so does all that a rewind to the oldest recorded checkpoint needs. The freed pages are
        used again.
        """
        with self._store.transaction() as db:
            oldest = db.execute("SELECT COALESCE(MIN(serial), 0) FROM checkpoint").fetchone()[0]
            last = min(db.execute("SELECT serial FROM pool_state").fetchone()[0] - keep_batches, oldest)
            strip = ", ".join(f"{name} = NULL" for name in (*ARRAY_DTYPES, "experts"))
            where = "(state = 'dropped' OR state = 'trained' AND batch_serial <= ?) AND prompt_tokens IS NOT NULL"
            in_groups = f"group_id IN (SELECT group_id FROM rollout_group WHERE {where})"  # noqa: S608 - own names
            db.execute(f"UPDATE rollout SET {strip} WHERE {in_groups}", (last,))  # noqa: S608
            return db.execute(f"UPDATE rollout_group SET prompt_tokens = NULL WHERE {where}", (last,)).rowcount  # noqa: S608

    def close(self) -> None:
        """Give up ownership. A second call does nothing."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
