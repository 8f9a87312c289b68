"""The writing connection: one owner per file, whole transactions only, SQLite's errors in words.

Ownership is held twice. A lock on ``<pool>.lock`` keeps a second process out while the first lives; it vanishes with
the process, also on kill -9. And each opening raises `owner_epoch`; a transaction of an owner that is no longer the
newest fails, so a writer that was thought dead cannot spoil the pool of its successor.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from tithe.errors import PoolError, ResumeError, UserError
from tithe.pool.schema import APPLICATION_ID, DDL, SCHEMA_VERSION

BUSY_TIMEOUT_S = 10.0

_REMEDIES = {
    sqlite3.SQLITE_FULL: "no space left on the device; free some, or choose another run.dir",
    sqlite3.SQLITE_READONLY: "the file or its folder is read-only; choose another run.dir",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened; does its folder exist and can it be written? (run.dir)",
    sqlite3.SQLITE_IOERR: "the device reported an input/output error; check the disk that holds run.dir",
    sqlite3.SQLITE_PERM: "permission denied; choose another run.dir",
}


@contextmanager
def sqlite_errors(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into the house's: a disk that is full or read-only is the user's to mend (`UserError`), a
    file that is no pool a `ResumeError`, anything else a broken contract (`PoolError`).
    """
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in _REMEDIES:
            raise UserError(f"the pool {path} cannot be used: {_REMEDIES[code]} ({error})") from error
        if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            raise ResumeError(f"{path} is damaged or is not an experience pool ({error})") from error
        raise PoolError(f"the pool {path} refused a change ({error})") from error


class Store:
    """One connection that writes. Safe to call from several threads: each transaction holds a lock."""

    def __init__(self, path: Path, connection: sqlite3.Connection, lock_file: int) -> None:
        self.path = path
        self._connection = connection
        self._lock_file = lock_file
        self._lock = threading.RLock()
        self._epoch: int | None = None

    @classmethod
    def create(cls, path: Path, run_id: str) -> Store:
        """A new, empty pool. Raises `UserError` when the file exists or cannot be written; nothing is left behind."""
        store = cls._connect(path, "rwc")
        try:
            with store.reading() as db:
                db.execute("PRAGMA journal_mode = WAL")
                db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            with store.transaction() as db:
                _create_tables(db, run_id)
        except BaseException:
            store.close()
            for suffix in ("", "-wal", "-shm", ".lock"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            raise
        return store

    @classmethod
    def open(cls, path: Path) -> Store:
        """An existing pool. Raises `ResumeError` when it is missing, foreign or of another schema version."""
        if not path.is_file():
            raise ResumeError(f"there is no pool at {path}")
        store = cls._connect(path, "rw")
        try:
            with store.reading() as db:
                check_identity(path, db)
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def _connect(cls, path: Path, mode: Literal["rw", "rwc"]) -> Store:
        lock_file = _take_lock(path)
        try:
            if mode == "rwc" and path.exists():
                raise UserError(f"{path} already holds the pool of a run; resume that run, or choose another run.dir")
            with sqlite_errors(path):
                connection = sqlite3.connect(
                    f"{path.absolute().as_uri()}?mode={mode}",
                    uri=True,
                    timeout=BUSY_TIMEOUT_S,
                    isolation_level=None,
                    check_same_thread=False,
                )
                connection.row_factory = sqlite3.Row
                connection.execute("PRAGMA synchronous = FULL")
                connection.execute("PRAGMA foreign_keys = ON")
        except BaseException:
            os.close(lock_file)
            raise
        return cls(path, connection, lock_file)

    def take_ownership(self) -> int:
        """Raise the owner epoch: what earlier owners held is theirs no more. Returns the epoch."""
        with self.transaction() as db:
            db.execute("UPDATE pool_state SET owner_epoch = owner_epoch + 1")
            self._epoch = int(db.execute("SELECT owner_epoch FROM pool_state").fetchone()[0])
        return self._epoch

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing. On return the changes are on the device. Any exception rolls back."""
        with self._lock, sqlite_errors(self.path):
            db = self._connection
            db.execute("BEGIN IMMEDIATE")
            try:
                self._check_owner(db)
                yield db
                db.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):  # a full disk may have rolled back already
                    db.execute("ROLLBACK")
                raise

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The connection, for statements that change nothing."""
        with self._lock, sqlite_errors(self.path):
            yield self._connection

    def _check_owner(self, db: sqlite3.Connection) -> None:
        if self._epoch is None:
            return
        newest = db.execute("SELECT owner_epoch FROM pool_state").fetchone()[0]
        if newest != self._epoch:
            raise PoolError(f"the pool {self.path} was taken over by a later owner; this one may no longer write")

    def close(self) -> None:
        """Release the file and the lock. A second call does nothing."""
        with self._lock:
            self._connection.close()
            if self._lock_file >= 0:
                os.close(self._lock_file)
                self._lock_file = -1


def check_identity(path: Path, connection: sqlite3.Connection) -> None:
    """Raise `ResumeError` for a SQLite file that is not a pool of this schema."""
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if application != APPLICATION_ID or version == 0:
        raise ResumeError(f"{path} is not an experience pool, or its creation was interrupted")
    if version != SCHEMA_VERSION:
        raise ResumeError(f"{path} has pool schema {version}; this version of Tithe reads {SCHEMA_VERSION}")


def _create_tables(db: sqlite3.Connection, run_id: str) -> None:
    for statement in DDL.split(";\n"):
        if statement.strip():
            db.execute(statement)
    db.execute("INSERT INTO pool_state VALUES (1, ?, 0, 0, 0, 0, NULL)", (run_id,))
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _take_lock(path: Path) -> int:
    # A POSIX record lock: unlike flock it is not inherited by forked reward workers, which may outlive a killed run.
    lock_path = path.with_name(path.name + ".lock")
    try:
        descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UserError(f"the pool {path} cannot be used: {error.strerror} (run.dir)") from error
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise UserError(f"the pool {path} is in use by another process; wait for it or stop it") from error
    return descriptor
