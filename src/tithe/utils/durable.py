"""Files and directories that appear complete or not at all, also when the process is killed.

A directory is filled under a hidden name beside its target (same file system), every file and the directory itself
are flushed to the device, and one rename makes it visible. Whatever a killed process leaves behind begins with
`HIDDEN_PREFIX` and is removed by `sweep`. One process writes into a parent directory at a time; readers need no lock.

All functions raise plain `OSError`; `explain` turns one into words.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HIDDEN_PREFIX = ".tmp-"

_REMEDIES = {
    errno.ENOSPC: "no space left on the device; free some and try again",
    errno.EDQUOT: "the disk quota is used up; free some space and try again",
    errno.EFBIG: "the file is larger than the system allows",
    errno.EROFS: "the file system is read-only; choose another directory",
    errno.EACCES: "permission denied; choose a directory that can be written",
    errno.EPERM: "permission denied; choose a directory that can be written",
    errno.ENAMETOOLONG: "the name is longer than the system allows; choose a shorter one",
    errno.ENOTDIR: "a part of the path is a file, not a directory",
    errno.EISDIR: "is a directory; name a file",
}


def explain(error: OSError) -> str:
    """What went wrong and, where there is one, the remedy.

    >>> explain(OSError(errno.ENOSPC, "No space left on device"))
    'no space left on the device; free some and try again'
    """
    return _REMEDIES.get(error.errno or 0) or error.strerror or str(error)


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def complete_directory(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a hidden directory to fill; when the block ends well, it becomes `target`, complete and durable.

    Plain writes will do inside: everything is flushed here, once.

    When the block raises, the hidden directory is removed and nothing has changed. A `target` that exists and is not
    empty raises `FileExistsError` before the block runs, unless `replace`: it is then moved aside after the new one
    is durable (a kill exactly between the two renames leaves neither visible) and removed.
    """
    _refuse_taken(target, replace)
    with hidden_directory(target.parent) as hidden:
        yield hidden
        make_visible(hidden, target, replace=replace)


@contextmanager
def hidden_directory(parent: Path) -> Iterator[Path]:
    """Yield a hidden directory in `parent` to fill, for a target whose name depends on what is written.

    Give it to `make_visible` before the block ends; otherwise it is removed and nothing has changed.
    """
    _make_folder(parent)
    hidden = _hidden_name(parent / "new")
    hidden.mkdir()
    try:
        yield hidden
    finally:
        if hidden.exists():
            shutil.rmtree(hidden, ignore_errors=True)


def make_visible(hidden: Path, target: Path, *, replace: bool = False) -> None:
    """Flush a hidden directory and rename it to `target`, beside it; see `complete_directory`."""
    _refuse_taken(target, replace)
    _flush_tree(hidden)
    retired = _retire(target) if target.exists() else None
    try:
        hidden.rename(target)
    except OSError:
        if retired is not None:
            retired.rename(target)
        raise
    _flush_directory(target.parent)
    if retired is not None:
        shutil.rmtree(retired)


def _refuse_taken(target: Path, replace: bool) -> None:
    if not replace and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(errno.EEXIST, "already exists", str(target))


def remove_directory(path: Path) -> None:
    """Remove a directory so that no reader ever sees it half empty: hide it by a rename first."""
    shutil.rmtree(_retire(path))


def sweep(parent: Path) -> list[str]:
    """Remove what killed writers left in `parent`; returns the names. Only for the one process that writes there."""
    if not parent.is_dir():
        return []
    leftovers = sorted(p for p in parent.iterdir() if p.name.startswith(HIDDEN_PREFIX))
    for path in leftovers:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    return [p.name for p in leftovers]


def _hidden_name(path: Path) -> Path:
    return path.parent / f"{HIDDEN_PREFIX}{path.name}-{uuid.uuid4().hex[:8]}"


def _retire(path: Path) -> Path:
    hidden = _hidden_name(path)
    path.rename(hidden)
    return hidden


def _make_folder(path: Path) -> None:
    """Like `mkdir -p`, and each new name is on the device before anything is put inside."""
    if path.is_dir():
        return
    if path.exists():
        raise NotADirectoryError(errno.ENOTDIR, "is a file", str(path))
    _make_folder(path.parent)
    path.mkdir(exist_ok=True)
    _flush_directory(path.parent)


def _flush_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flush_tree(root: Path) -> None:
    """Flush every file and directory below `root`, then `root`. A flush is of the file, whoever wrote it."""
    for folder, _, files in os.walk(root, topdown=False):
        for name in files:
            descriptor = os.open(Path(folder, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        _flush_directory(Path(folder))


def write_text(path: Path, text: str) -> None:
    """Replace or create a text file (UTF-8); readers see the old one or the new one, whole."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a directory", str(path))
    _make_folder(path.parent)
    hidden = _hidden_name(path)
    try:
        with hidden.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        hidden.rename(path)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise
    _flush_directory(path.parent)
