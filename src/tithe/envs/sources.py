"""Where questions come from: built-in arithmetic, reasoning_gym, a JSONL or Parquet file, a dataset's folder, a
function."""

from __future__ import annotations

import difflib
import itertools
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from tithe.envs.rows import Columns, ReadRows, read_jsonl, read_objects
from tithe.envs.tables import is_table, read_table
from tithe.errors import ConfigError, DataError, FailureCause, boundary
from tithe.rewards import load_function
from tithe.rewards.gym import import_gym

MAX_BUILT_IN: Final = 20_000
"""Most questions a built-in source gives; with large operands they are a random choice."""

LARGEST_OPERAND: Final = 12
"""Of `sums` and `products` that name none; operands start at 0."""

GYM_ROWS: Final = 1024
"""Rows taken from a reasoning_gym dataset, besides twice the held-out ones."""

_GYM: Final = "reasoning_gym:"
_SIGNS: Final = {"sums": "+", "products": "*"}


def read_source(source: str, columns: Columns, *, key: str, seed: int, eval_size: int) -> ReadRows:
    """All rows of one source, in its own order. `key` names the configuration key in messages.

    Raises `ConfigError` when the source cannot be used, `DataError` when it has no usable row.
    """
    kind, _, largest = source.partition(":")
    if kind in _SIGNS and (largest.isdecimal() or not largest):
        operands = int(largest or LARGEST_OPERAND)
        return read_objects(_arithmetic(_SIGNS[kind], operands, seed), _built_in(columns), source)
    if source.startswith(_GYM):
        rows = _gym_rows(source.removeprefix(_GYM), GYM_ROWS + 2 * eval_size, seed, key)
        return read_objects(rows, _built_in(columns), source)
    if source.endswith(".jsonl"):
        return read_jsonl(Path(source), columns)
    if is_table(source):
        return read_objects(read_table(Path(source), key), columns, source)
    if source.endswith("/"):
        raise DataError("there is no such folder", where=source)
    return read_objects(_function_rows(source, key), columns, source)


def _built_in(columns: Columns) -> Columns:
    """Built-in rows have columns of their own."""
    return Columns(needs_answer=columns.needs_answer, instruction=columns.instruction)


def _arithmetic(sign: str, max_operand: int, seed: int) -> Iterator[dict[str, Any]]:
    """Every ordered pair of operands when there are few enough, else a random choice of pairs in both orders."""
    for a, b in _operand_pairs(max_operand, seed):
        answer = a + b if sign == "+" else a * b
        yield {"prompt": f"What is {a} {sign} {b}?", "answer": answer, "operands": [a, b]}


def _operand_pairs(max_operand: int, seed: int) -> Iterator[tuple[int, int]]:
    if (max_operand + 1) ** 2 <= MAX_BUILT_IN:
        operands = range(max_operand + 1)
        yield from itertools.product(operands, operands)
        return
    draw = random.Random(seed)
    drawn: set[tuple[int, int]] = set()
    while len(drawn) < MAX_BUILT_IN // 2:
        a, b = sorted((draw.randint(0, max_operand), draw.randint(0, max_operand)))
        if (a, b) not in drawn:
            drawn.add((a, b))
            yield a, b
            if a != b:
                yield b, a


def _gym_rows(name: str, n_rows: int, seed: int, key: str) -> Iterator[dict[str, Any]]:
    try:
        reasoning_gym = import_gym()
    except ImportError as error:
        raise ConfigError(
            f"{key}: reasoning_gym:{name} needs the package reasoning-gym (pip install -e '.[tasks]'): {error}", key
        ) from error
    known = sorted(reasoning_gym.factory.DATASETS)
    if name not in known:
        near = difflib.get_close_matches(name, known, 3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ConfigError(f"{key}: reasoning_gym has no dataset {name!r}{hint}", key)
    dataset = reasoning_gym.create_dataset(name, seed=seed, size=n_rows)
    for number in range(n_rows):
        entry = dataset[number]
        metadata = json.loads(json.dumps(entry.get("metadata", {}), default=str))
        yield {"prompt": entry["question"], "answer": entry["answer"], "metadata": metadata}


def _function_rows(reference: str, key: str) -> list[Any]:
    """What the user's function returns. It is called once, without arguments, in this process."""
    function = load_function(reference, key)
    rows: Any = None
    with boundary(FailureCause.ENVIRONMENT) as slot:
        rows = function()
        if isinstance(rows, Iterable) and not isinstance(rows, str | bytes | dict):
            rows = list(itertools.islice(rows, 5_000_001))
    if slot.failure is not None:
        raise ConfigError(f"{key}: {reference} failed: {slot.failure.message}", key)
    if not isinstance(rows, list):
        raise DataError(f"returned {type(rows).__name__}; an iterable of rows is needed", where=reference)
    return rows
