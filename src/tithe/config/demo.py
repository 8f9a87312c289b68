"""What `tithe demo` runs: the defaults, plus the few keys that fit it into ten minutes of a two-core laptop."""

from __future__ import annotations

from collections.abc import Sequence

from tithe.config.loading import load_config
from tithe.config.schema import RunConfig

DEMO_OVERRIDES: tuple[str, ...] = (
    "run.name=demo",
    "run.max_steps=30",
    "run.max_minutes=7",
    "run.eval_every=15",
    "run.checkpoint_every=10",
    "task.source=products",
    "model.compute=packed",
    "rollout.max_new_tokens=32",
    "rollout.max_prompt_tokens=128",
    "model.max_context=256",
    "optimizer.lr=3e-4",
    "rl.kl_coef=0.01",
    "engine.kv_memory_mib=256",
)
"""Applied before the user's own overrides, which win."""


def demo_config(overrides: Sequence[str] = ()) -> RunConfig:
    """The demo's configuration. Raises `ConfigError` as `load_config` does."""
    return load_config(None, [*DEMO_OVERRIDES, *overrides])
