"""What the report needs from the pool: counts and a few rollouts, by plain SQL on its public views, read-only."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

_BUSY_S = 5.0

_SAMPLE_QUERY = (
    "SELECT group_id, sample, prompt_id, batch_serial, reward, reward_parts, finish, n_tokens, min_serial, text "
    "FROM rollouts WHERE group_id = ? AND sample = ?"
)


@dataclass(frozen=True)
class PoolSample:
    """One rollout as shown. `pick` is best, worst or random; `text` is what the model wrote: untrusted.

    >>> PoolSample("best", 3, 0, "sum-3-4", 1, 1.0, "{}", "stop", 4, 0, "7").pick
    'best'
    """

    pick: str
    group_id: int
    sample: int
    prompt_id: str
    batch_serial: int
    reward: float | None
    reward_parts: str
    finish: str
    n_tokens: int
    min_serial: int | None
    text: str


@dataclass(frozen=True)
class PoolView:
    """`first` and `last` hold rollouts of the first and the last trained batch that the pool still has; `last` is empty
    when they are the same batch. `problem` says why there is nothing.

    >>> PoolView(problem="pool.sqlite is missing").groups_by_state
    {}
    """

    groups_by_state: Mapping[str, int] = field(default_factory=dict[str, int])
    drops_by_reason: Mapping[str, int] = field(default_factory=dict[str, int])
    failures_by_cause: Mapping[str, int] = field(default_factory=dict[str, int])
    trained_rollouts: int = 0
    trained_tokens: int = 0
    first: tuple[PoolSample, ...] = ()
    last: tuple[PoolSample, ...] = ()
    problem: str = ""


def read_pool(path: Path, seed: str) -> PoolView:
    """Read the pool at one instant, also while a run writes it. `seed` fixes the random pick. Raises nothing."""
    if not path.is_file():
        return PoolView(problem="pool.sqlite is missing: no rollout has been stored yet.")
    try:
        uri = f"{path.resolve().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None)) as connection:
            connection.text_factory = lambda data: data.decode("utf-8", "replace")
            connection.execute("BEGIN")
            return _read(connection, seed)
    except sqlite3.Error as error:
        return PoolView(problem=f"pool.sqlite cannot be read: {error}.")


def _read(connection: sqlite3.Connection, seed: str) -> PoolView:
    def counts(query: str) -> dict[str, int]:
        return {str(name): count for name, count in connection.execute(query)}

    (rollouts, tokens), (first, last) = (
        connection.execute(query).fetchone()
        for query in (
            "SELECT COUNT(*), COALESCE(SUM(n_tokens), 0) FROM rollouts WHERE state = 'trained'",
            "SELECT MIN(batch_serial), MAX(batch_serial) FROM groups WHERE state = 'trained'",
        )
    )
    return PoolView(
        groups_by_state=counts("SELECT state, COUNT(*) FROM groups GROUP BY state ORDER BY state"),
        drops_by_reason=counts(
            "SELECT COALESCE(reason, 'unknown'), COUNT(*) FROM groups WHERE state = 'dropped' "
            "GROUP BY 1 ORDER BY 2 DESC"
        ),
        failures_by_cause=counts(
            "SELECT cause, COUNT(*) FROM rollouts WHERE cause IS NOT NULL GROUP BY cause ORDER BY 2 DESC"
        ),
        trained_rollouts=rollouts,
        trained_tokens=tokens,
        first=() if first is None else _pick(connection, first, seed),
        last=() if last is None or last == first else _pick(connection, last, seed),
    )


def _pick(connection: sqlite3.Connection, batch_serial: int, seed: str) -> tuple[PoolSample, ...]:
    """The best, the worst and a random scored rollout of one batch, all different."""
    keys: list[tuple[int, int]] = connection.execute(
        "SELECT group_id, sample FROM rollouts WHERE state = 'trained' AND batch_serial = ? AND reward IS NOT NULL "
        "ORDER BY reward DESC, group_id, sample",
        (batch_serial,),
    ).fetchall()
    chosen: list[tuple[str, tuple[int, int]]] = []
    if keys:
        chosen.append(("best", keys[0]))
    if len(keys) > 1:
        chosen.append(("worst", keys[-1]))
    if len(keys) > 2:
        chosen.append(("random", random.Random(f"{seed}/{batch_serial}").choice(keys[1:-1])))
    return tuple(
        PoolSample(
            pick,
            *connection.execute(_SAMPLE_QUERY, key).fetchone(),
        )
        for pick, key in chosen
    )
