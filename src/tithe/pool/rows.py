"""Statements on groups, prompts and rollouts. Each runs inside a transaction that its caller opened."""

from __future__ import annotations

import sqlite3
import time

from tithe.errors import PoolError
from tithe.pool.codec import PROMPT_DTYPE, ROLLOUT_COLUMNS, encode_array, read_group, rollout_row
from tithe.pool.curriculum import PromptRecord
from tithe.pool.states import Move
from tithe.types import RolloutGroup


def load_group(db: sqlite3.Connection, group_id: int) -> RolloutGroup:
    """A committed group with all arrays."""
    group = db.execute("SELECT * FROM rollout_group WHERE group_id = ?", (group_id,)).fetchone()
    if group is None:
        raise PoolError(f"there is no group {group_id}")
    return read_group(
        group, db.execute("SELECT * FROM rollout WHERE group_id = ? ORDER BY sample", (group_id,)).fetchall()
    )


def give_up_running(db: sqlite3.Connection) -> int:
    """Delete running groups and put their prompts back, first in the queue; returns how many."""
    orphans = db.execute(
        "SELECT group_id, prompt_id, n_samples FROM rollout_group WHERE state = 'running' ORDER BY group_id"
    ).fetchall()
    first = db.execute("SELECT COALESCE(MIN(position), 0) FROM put_back").fetchone()[0] - len(orphans)
    for offset, row in enumerate(orphans):
        # A running group has no rollouts yet. Its prompt keeps the id, which addresses the random numbers, so that a
        # synchronous run samples the same tokens again in the same order.
        db.execute("INSERT INTO put_back VALUES (?, ?, ?, ?)", (first + offset, *row[1::-1], row["n_samples"]))
    db.execute("DELETE FROM rollout_group WHERE state = 'running'")
    return len(orphans)


def has_running(db: sqlite3.Connection) -> bool:
    """Whether any group runs."""
    return bool(db.execute("SELECT EXISTS (SELECT 1 FROM rollout_group WHERE state = 'running')").fetchone()[0])


def add_group(
    db: sqlite3.Connection,
    prompt_id: str,
    version: tuple[int, int],
    group_id: int | None = None,
    *,
    n_samples: int = 1,
    batch: int = 0,
    phase: str = "",
) -> int:
    """Insert a RUNNING group of a version (lineage, serial), under the given id or the next unused one; returns the
    id."""
    if group_id is None:
        group_id = int(db.execute("SELECT next_group_id FROM pool_state").fetchone()[0])
        db.execute("UPDATE pool_state SET next_group_id = next_group_id + 1")
    db.execute(
        "INSERT INTO rollout_group (group_id, prompt_id, lineage, admitted_serial, n_samples, admitted_batch, phase,"
        " state, admitted_at_s) VALUES (?, ?, ?, ?, ?, ?, ?, 'running', ?)",
        (group_id, prompt_id, *version, n_samples, batch, phase, time.time()),
    )
    return group_id


def move_group(db: sqlite3.Connection, group_id: int, move: Move) -> sqlite3.Row:
    """Change a group's state; returns the row as it was. Raises `PoolError` for an illegal move."""
    row = db.execute("SELECT * FROM rollout_group WHERE group_id = ?", (group_id,)).fetchone()
    if row is None:
        raise PoolError(f"there is no group {group_id}")
    if row["state"] not in move.sources:
        raise PoolError(f"group {group_id} is {row['state']} and cannot be {move.name}")
    db.execute("UPDATE rollout_group SET state = ? WHERE group_id = ?", (move.target, group_id))
    return row


def store_rollouts(db: sqlite3.Connection, row: sqlite3.Row, group: RolloutGroup, pass_rate: float | None) -> None:
    """Write a finished group beside `row`, its admission. Raises `PoolError` when the two do not belong together."""
    admitted = (row["prompt_id"], row["lineage"], row["admitted_serial"])
    given = (group.prompt_id, group.lineage, group.admitted_serial)
    if admitted != given:
        raise PoolError(f"group {group.group_id} was admitted as {admitted} and is committed as {given}")
    marks = ", ".join("?" * len(ROLLOUT_COLUMNS))
    db.executemany(
        f"INSERT INTO rollout ({', '.join(ROLLOUT_COLUMNS)}) VALUES ({marks})",  # noqa: S608 - own names
        (rollout_row(group.group_id, rollout) for rollout in group.rollouts),
    )
    newest = max((int(r.serials.max()) for r in group.rollouts if len(r.serials)), default=group.admitted_serial)
    prompt = encode_array(group.prompt_ids, PROMPT_DTYPE)
    db.execute(
        "UPDATE rollout_group SET prompt_tokens = ?, min_serial = ?, max_serial = ?, n_samples = ?, pass_rate = ?,"
        " finished_at_s = ? WHERE group_id = ?",
        (prompt, group.min_serial, newest, len(group.rollouts), pass_rate, time.time(), group.group_id),
    )


def failures_in_a_row(db: sqlite3.Connection, prompt_id: str) -> int:
    """Failed groups of a prompt since its last one that could be used."""
    return db.execute(
        "SELECT COUNT(*) FROM rollout_group WHERE prompt_id = :prompt AND reason = 'failed' AND group_id > COALESCE("
        "(SELECT MAX(group_id) FROM rollout_group WHERE prompt_id = :prompt AND finished_at_s IS NOT NULL"
        " AND reason IS NOT 'failed'), -1)",
        {"prompt": prompt_id},
    ).fetchone()[0]


def is_in_batch(db: sqlite3.Connection, prompt_id: str, batch: int) -> bool:
    """Whether a group of the prompt was admitted for the batch already."""
    query = "SELECT EXISTS (SELECT 1 FROM rollout_group WHERE prompt_id = ? AND admitted_batch = ?)"
    return bool(db.execute(query, (prompt_id, batch)).fetchone()[0])


def last_record(db: sqlite3.Connection, prompt_id: str, before_batch: int) -> PromptRecord | None:
    """What the newest measured group of a prompt gave, among those for batches before `before_batch`.

    Groups of the same batch count for nothing, finished or not: in a synchronous run the answer is then the same
    whatever finished first, also after a resume.
    """
    row = db.execute(
        "SELECT pass_rate, admitted_batch FROM rollout_group WHERE prompt_id = ? AND admitted_batch < ?"
        " AND pass_rate IS NOT NULL ORDER BY admitted_batch DESC, group_id DESC LIMIT 1",
        (prompt_id, before_batch),
    ).fetchone()
    return None if row is None else PromptRecord(row["pass_rate"], row["admitted_batch"])


def last_failure(db: sqlite3.Connection) -> str:
    """What the newest failed group said."""
    row = db.execute(
        "SELECT detail FROM rollout_group WHERE reason = 'failed' ORDER BY group_id DESC LIMIT 1"
    ).fetchone()
    return row["detail"] if row else "unknown"
