"""What a run that trains every parameter (`model.train: full`) is made of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tithe.build.base import Base
from tithe.config import RunConfig
from tithe.engines import CopiedEngine, Here
from tithe.trainer import FullTrainer, TrainerSettings


def full_trainer(cfg: RunConfig, base: Base, settings: TrainerSettings, given: Path | None) -> FullTrainer:
    """The trainer of a run's model, or of an earlier run's result."""
    dtype = torch.bfloat16 if cfg.model.base_dtype == "bf16" else torch.float32
    directory = base.path if given is None else given
    return FullTrainer(directory, base.n_tokens, settings, dtype=dtype, ranks=base.crew.ranks)


def copied_engine(cfg: RunConfig, base: Base, settings: Mapping[str, Any]) -> CopiedEngine:
    """The engine of published copies; `settings` are those of a copy's own engine."""
    ranks = base.crew.ranks
    return CopiedEngine(
        base.lane if ranks.size == 1 else Here(),
        base.options,
        origin=base.checksum,
        numeric_mode=base.numeric_mode,
        max_live_versions=cfg.engine.max_live_versions,
        settings=settings,
        ranks=ranks,
    )
