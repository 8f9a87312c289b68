"""What a resume may change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tithe.config.base import absolute_path
from tithe.config.fields import iter_fields
from tithe.config.loading import load_config
from tithe.config.schema import RunConfig
from tithe.errors import ConfigError, ResumeError

CONFIG_FILE = "config.yaml"
"""Name of the resolved configuration inside a run directory."""

RESUME_MUTABLE: frozenset[str] = frozenset(
    {
        "model.path",  # the file may have moved; the base's checksum is compared
        "rl.max_policy_update_lag",
        "rl.max_sample_age",
        "rl.sync_every",
        "rl.rollout_buffer_size",
        "reward.timeout_s",
        "reward.workers",
        "reward.memory_mib",
        "engine.max_running",
        "engine.kv_memory_mib",
        "engine.max_live_versions",
        "engine.prefill_tokens_per_tick",
        "monitor.progress",
        "monitor.tensorboard",
        "monitor.report",
        "monitor.alarm_after",
        "run.dir",
        "run.max_steps",
        "run.max_minutes",
        "run.eval_every",
        "run.patience",
        "run.checkpoint_every",
        "run.keep_checkpoints",
        "run.ranks",
        "run.threads",
    }
)
"""Keys that change how long, how often, how fast or where a run goes on, and not what it computes, with two exceptions:
`run.max_steps` also stretches a falling learning rate, and the bounds of staleness decide how old a sample may be.
(Another number of ranks or threads may change the last bits of sums.)"""


def check_resume(old: RunConfig, new: RunConfig) -> None:
    """Raise `ConfigError` naming every changed key that is not in `RESUME_MUTABLE`."""
    refused: list[tuple[str, str]] = []
    for key, _ in iter_fields():
        section, _, leaf = key.partition(".")
        before, after = getattr(getattr(old, section), leaf), getattr(getattr(new, section), leaf)
        if before != after and key not in RESUME_MUTABLE:
            refused.append((key, f"{key}: a resume cannot change it from {before!r} to {after!r}"))
    if refused:
        lines = [line for _, line in refused]
        lines.append("Start a new run for that; lora.init_from=RUN_DIR/adapter continues from this run's policy.")
        raise ConfigError("\n".join(lines), key=refused[0][0])


def load_run(run_dir: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration that a run directory was made with, overrides applied; `run.dir` is where the directory lies
    now.

    Raises `ResumeError` when the directory or its configuration is missing, `ConfigError` when a value is wrong.
    """
    try:
        directory = Path(absolute_path(str(run_dir)))
    except ValueError as error:
        raise ResumeError(f"{run_dir} is no run directory: it {error}") from error
    if not directory.is_dir():
        raise ResumeError(f"{directory} is no run directory: it does not exist")
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise ResumeError(f"{directory} is no run directory: it has no {CONFIG_FILE}")
    cfg = load_config(path, overrides)
    return cfg.model_copy(update={"run": cfg.run.model_copy(update={"dir": str(directory)})})


def load_resumed(run_dir: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """As `load_run`, and refuses overrides of keys that a resume must not change."""
    new = load_run(run_dir, overrides)
    check_resume(load_run(run_dir), new)
    return new
