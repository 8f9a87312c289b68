"""Tables of others: Parquet files, and folders as the Hugging Face library `datasets` keeps them. Needs pyarrow, and
nothing of `datasets` itself: no code that comes with a dataset is run, and nothing is fetched."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tithe.errors import ConfigError, DataError

BATCH_ROWS = 1024


def is_table(source: str) -> bool:
    """Whether a source is a Parquet file or a folder."""
    return source.endswith(".parquet") or Path(source).is_dir()


def read_table(path: Path, key: str) -> Iterator[dict[str, Any]]:
    """Rows of a Parquet file; of a folder that `save_to_disk` wrote (of several splits, `train`); or of a folder of
    Parquet files as hubs lay them out (those whose names begin with `train`, where there are any).

    Raises `ConfigError` for `key` without pyarrow, `DataError` when the folder holds no table or a file is broken.
    """
    try:
        arrow, ipc, parquet = map(importlib.import_module, ("pyarrow", "pyarrow.ipc", "pyarrow.parquet"))
    except ImportError as error:
        raise ConfigError(
            f"{key}: {path} needs the package pyarrow (pip install -e '.[data]'): {error}", key
        ) from error
    try:
        for file in _files(path):
            if file.suffix == ".parquet":
                with parquet.ParquetFile(file) as table:
                    for batch in table.iter_batches(BATCH_ROWS):
                        yield from batch.to_pylist()
            else:
                with arrow.OSFile(str(file)) as opened, ipc.open_stream(opened) as stream:
                    for batch in stream:
                        yield from batch.to_pylist()
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"cannot be read as a table: {error}", where=str(path)) from error


def _files(path: Path) -> list[Path]:
    """The files of one split, in order."""
    if not path.is_dir():
        return [path]
    splits = path / "dataset_dict.json"
    if splits.is_file():
        names = _texts(splits, "splits", _read_index(splits, "splits"))
        if "train" not in names:
            raise DataError(
                f"has the splits {', '.join(names)} and none called train; name one of their folders", str(path)
            )
        return _files(path / "train")
    state = path / "state.json"
    if state.is_file():
        entries = _read_index(state, "_data_files")
        named = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
        return [path / name for name in _texts(state, "_data_files", named)]
    found = sorted(path.rglob("*.parquet")) or sorted(path.rglob("*.arrow"))
    train = [file for file in found if file.name.startswith("train")]
    if not found:
        raise DataError("holds no Parquet or Arrow file, and is no folder that `datasets` wrote", where=str(path))
    return train or found


def _texts(path: Path, key: str, names: list[Any]) -> list[str]:
    """The names that an index gives, when every one is text. Raises `DataError` that names the first other."""
    for at, name in enumerate(names):
        if not isinstance(name, str) or not name:
            raise DataError(f"entry {at} of {key!r} names no file or split; save the dataset again", where=str(path))
    return names


def _read_index(path: Path, key: str) -> list[Any]:
    """A list in one of `datasets`' own JSON files. Raises `DataError` when it is not there."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))[key]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"holds no {key!r} ({error!r}); save the dataset again", where=str(path)) from error
    if not isinstance(found, list):
        raise DataError(f"{key!r} is no list; save the dataset again", where=str(path))
    return found
