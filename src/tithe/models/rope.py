"""Rotary tables [positions, D/2], the same numbers for sampler and trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tithe.arch import ArchSpec


def rope_tables(spec: ArchSpec, config: Mapping[str, Any], positions: int) -> tuple[Tensor, Tensor]:
    """(cos, sin), float32 [positions, D/2]. Scaled types (linear, llama3, yarn) take transformers' own frequencies."""
    if spec.rope_type == "default":
        steps = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float()
        inverse, factor = 1.0 / (spec.rope_theta ** (steps / spec.head_dim)), 1.0
    else:
        # Heavy third-party import, needed by few checkpoints.
        from transformers import PreTrainedConfig  # noqa: PLC0415
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415

        hf = PreTrainedConfig(**{k: v for k, v in config.items() if k != "model_type"})
        inverse, factor = ROPE_INIT_FUNCTIONS[spec.rope_type](hf, torch.device("cpu"))
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * inverse[None, :].float()
    return (angles.cos() * factor).contiguous(), (angles.sin() * factor).contiguous()
