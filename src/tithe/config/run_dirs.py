"""Which directory a new run gets. Looks at the disk, writes nothing."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path

from tithe.config.schema import RunConfig
from tithe.errors import ConfigError
from tithe.utils.durable import explain


def choose_run_dir(cfg: RunConfig) -> RunConfig:
    """`cfg` with a `run.dir` that no run has used yet.

    A derived `run.dir` that is taken becomes the next free `NAME-2`, `NAME-3`, …; one that was given and holds files
    raises `ConfigError`, because two runs in one directory would mix.
    """
    wanted = Path(cfg.run.dir)
    try:
        is_free = _is_free(wanted)
        if is_free:
            _check_place(wanted)
    except OSError as error:  # a name that the system cannot hold, or a folder that may not be looked into
        raise ConfigError(
            f"run.dir = {_quoted(cfg.run.dir)} cannot be used: {explain(error)}", key="run.dir"
        ) from error
    if is_free:
        return cfg
    if "dir" in cfg.run.model_fields_set:
        what = "holds files already" if wanted.is_dir() else "is a file"
        remedy = f"continue that run with `tithe resume {wanted}`, or give another directory"
        raise ConfigError(f"run.dir = {str(wanted)!r} {what}: {remedy}", key="run.dir")
    numbered = (wanted.with_name(f"{wanted.name}-{number}") for number in itertools.count(2))
    free = next(path for path in numbered if _is_free(path))
    return cfg.model_copy(update={"run": cfg.run.model_copy(update={"dir": str(free)})})


def _check_place(path: Path) -> None:
    """Raise `OSError` where no directory of this name can be made, before anything heavy is done for it."""
    place = next(parent for parent in (path, *path.parents) if parent.exists())
    if not place.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "is a file", str(place))
    if not os.access(place, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "cannot be written", str(place))


def _is_free(path: Path) -> bool:
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def _quoted(path: str) -> str:
    """A path for a message, its middle left out when it is long."""
    return repr(path if len(path) <= 80 else f"{path[:38]}…{path[-38:]}")
