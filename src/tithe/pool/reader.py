"""Read-only view of a pool, also while its owner writes."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tithe.errors import ResumeError
from tithe.pool.rows import load_group
from tithe.pool.states import GroupState
from tithe.pool.store import BUSY_TIMEOUT_S, check_identity, sqlite_errors
from tithe.types import RolloutGroup


class PoolReader:
    """Reads a pool with a connection that cannot write. Each call sees one consistent instant. For use by one thread.

    Raises `ResumeError` when there is no pool. A finished run on a read-only disk can be read as well.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ResumeError(f"there is no pool at {path}")
        self.path = path
        with sqlite_errors(path):
            self._db = _connect(path)
            try:
                check_identity(path, self._db)
            except BaseException:
                self._db.close()
                raise

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Rows of a statement, by column name; the views `groups` and `rollouts` hold everything but arrays."""
        with sqlite_errors(self.path):
            return [dict(row) for row in self._db.execute(sql, parameters)]

    def state_counts(self) -> dict[GroupState, int]:
        """Number of groups in every state."""
        rows = self.query("SELECT state, COUNT(*) AS n FROM rollout_group GROUP BY state")
        found = {GroupState(row["state"]): row["n"] for row in rows}
        return {state: found.get(state, 0) for state in GroupState}

    def groups(
        self, state: GroupState = GroupState.TRAINED, *, first_batch: int = 0, limit: int | None = None
    ) -> list[RolloutGroup]:
        """Groups of one state that still have their arrays, newest first; of trained ones those of batches
        ≥ `first_batch`.
        """
        with sqlite_errors(self.path):
            self._db.execute("BEGIN")  # the owner may prune while we read
            try:
                rows = self._db.execute(
                    "SELECT group_id FROM rollout_group WHERE state = ? AND prompt_tokens IS NOT NULL"
                    " AND COALESCE(batch_serial, ?) >= ? ORDER BY group_id DESC LIMIT ?",
                    (state, first_batch, first_batch, -1 if limit is None else limit),
                ).fetchall()
                return [load_group(self._db, row["group_id"]) for row in rows]
            finally:
                self._db.rollback()

    def close(self) -> None:
        """Release the file. A second call does nothing."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _connect(path: Path) -> sqlite3.Connection:
    uri = path.absolute().as_uri()
    try:
        db = _first_read(f"{uri}?mode=ro")
    except sqlite3.OperationalError:
        log = path.with_name(path.name + "-wal")
        if log.exists() and log.stat().st_size > 0:
            raise
        # WAL mode wants to create an index file beside the database, which a read-only disk refuses; without a log (an
        # earlier reader leaves an empty one) nobody is writing, so the file may be treated as one that does not change
        db = _first_read(f"{uri}?immutable=1")
    db.row_factory = sqlite3.Row
    return db


def _first_read(uri: str) -> sqlite3.Connection:
    db = sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S)
    try:
        db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
    except sqlite3.Error:
        db.close()
        raise
    return db
