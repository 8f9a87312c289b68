"""Which directory a new run gets. Looks at the disk, writes nothing."""

from __future__ import annotations

import itertools
from pathlib import Path

from tithe.config.schema import RunConfig
from tithe.errors import ConfigError


def choose_run_dir(cfg: RunConfig) -> RunConfig:
    """`cfg` with a `run.dir` that no run has used yet.

    A derived `run.dir` that is taken becomes the next free `NAME-2`, `NAME-3`, …; one that was given and holds files
    raises `ConfigError`, because two runs in one directory would mix.
    """
    wanted = Path(cfg.run.dir)
    if _is_free(wanted):
        return cfg
    if "dir" in cfg.run.model_fields_set:
        what = "holds files already" if wanted.is_dir() else "is a file"
        remedy = f"continue that run with `tithe resume {wanted}`, or give another directory"
        raise ConfigError(f"run.dir = {str(wanted)!r} {what}: {remedy}", key="run.dir")
    numbered = (wanted.with_name(f"{wanted.name}-{number}") for number in itertools.count(2))
    free = next(path for path in numbered if _is_free(path))
    return cfg.model_copy(update={"run": cfg.run.model_copy(update={"dir": str(free)})})


def _is_free(path: Path) -> bool:
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))
