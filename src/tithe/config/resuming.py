"""What a resume may change."""

from __future__ import annotations

from tithe.config.fields import iter_fields
from tithe.config.schema import RunConfig
from tithe.errors import ConfigError

RESUME_MUTABLE: frozenset[str] = frozenset(
    {
        "model.path",  # the file may have moved; the base's checksum is compared
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
        "monitor.failure_batches_alarm",
        "monitor.dropped_batches_alarm",
        "monitor.zero_reward_batches_alarm",
        "run.dir",
        "run.max_steps",
        "run.max_minutes",
        "run.eval_every",
        "run.patience",
        "run.checkpoint_every",
        "run.keep_checkpoints",
        "run.keep_pool_batches",
        "run.threads",
    }
)
"""Keys that change how long, how often, how fast or where a run goes on, and not what it computes; the one exception is
`run.max_steps`, which also stretches a falling learning rate."""


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
