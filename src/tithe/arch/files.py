"""Untrusted checkpoint files: a memory map opened at first use, and a strict reader of small JSON files."""

from __future__ import annotations

import json
import mmap
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from tithe.errors import ModelError

if TYPE_CHECKING:
    import numpy as np

MAX_JSON_BYTES: Final = 256 * 2**20
"""Largest config, tokenizer or index file that is read. The largest tokenizers in use have about 30 MB."""

_WINDOW: Final = 2 * 2**20
"""Linux maps the neighbours of a missing page too: 64 KiB of them, or all that the page cache keeps in one piece."""


def quote(text: str, limit: int = 80) -> str:
    """A name from an untrusted file, escaped and shortened for a message."""
    shown = repr(text)
    return shown if len(shown) <= limit else f"{shown[:limit]}…"


class MappedFile:
    """One checkpoint file as bytes. The map is private and shared with other processes through the page cache.

    The pages are copy-on-write rather than read-only, because torch warns about every read-only array; a write would
    stay in this process and never reach the file. Shortening the file while it is mapped kills the process (SIGBUS):
    published files are replaced by rename, never edited.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.size = path.stat().st_size
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}") from error
        if self.size == 0:
            raise ModelError(f"{path} is empty: the download or copy was not finished; fetch the file again")

    @cached_property
    def buffer(self) -> mmap.mmap:
        """The whole file. Raises `ModelError` when it cannot be opened."""
        try:
            with self.path.open("rb") as file:
                return mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot map {self.path}: {error}") from error

    def head(self, n_bytes: int) -> bytes:
        """The first bytes, read without mapping the file: headers can be looked at where the weights would not fit."""
        try:
            with self.path.open("rb") as file:
                return file.read(n_bytes)
        except OSError as error:
            raise ModelError(f"cannot read {self.path}: {error.strerror}") from error

    def bytes_view(self, offset: int, n_bytes: int) -> memoryview:
        """The bytes of one range, no copy and no numpy."""
        return memoryview(self.buffer)[offset : offset + n_bytes]

    def view(self, offset: int, n_bytes: int) -> np.ndarray:
        """uint8 [n_bytes]: a view into the map, no copy."""
        import numpy as np  # noqa: PLC0415  the planner's core install stays free of numpy

        return np.frombuffer(self.buffer, dtype=np.uint8, count=n_bytes, offset=offset)

    def release(self, offset: int, n_bytes: int) -> None:
        """Let the pages of one range go from this process; whoever reads them again gets them from the file.

        A map's pages count as the process's memory once they were read. Nothing happens where the system has no such
        advice.
        """
        advice = getattr(mmap, "MADV_DONTNEED", None)
        if advice is not None and n_bytes:
            begin = offset // _WINDOW * _WINDOW
            end = min(-(-(offset + n_bytes) // _WINDOW) * _WINDOW, self.size)
            self.buffer.madvise(advice, begin, end - begin)


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object; NaN, infinities, duplicate keys and deep nesting are `ModelError`s that name the file."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"{path} is larger than {MAX_JSON_BYTES} bytes and is not read")
        return parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """As `read_json`, for bytes already in memory; `where` names them in messages."""

    def refuse_constant(text: str) -> NoReturn:
        raise ModelError(f"{where} holds {text}, which is not a number a model can be built from; correct that value")

    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise ModelError(f"{where} has the key {quote(twice)} twice")
        return result

    try:
        value = json.loads(data, parse_constant=refuse_constant, object_pairs_hook=refuse_duplicates)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{where} is not valid JSON ({error}); the file may be cut short: fetch it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{where} should be a JSON object, not {type(value).__name__}")
    return value
