"""Rotary tables [positions, pairs] and the scale of scores, the same numbers for sampler and trainer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tithe.arch import ArchSpec
from tithe.arch.rope import rope_parameters

_REACH = ("max_position_embeddings", "original_max_position_embeddings")


def rope_tables(spec: ArchSpec, config: Mapping[str, Any], positions: int) -> tuple[Tensor, Tensor]:
    """(cos, sin), float32 [positions, rotary_dim/2]. Scaled types (linear, llama3, yarn) take transformers' own
    frequencies; yarn's attention factor is in both tables."""
    width = spec.rotary_dim
    if spec.rope_type == "default":
        steps = torch.arange(0, width, 2, dtype=torch.int64).float()
        inverse, factor = 1.0 / (spec.rope_theta ** (steps / width)), 1.0
    else:
        # Heavy third-party import, needed by few checkpoints.
        from transformers import PreTrainedConfig  # noqa: PLC0415
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415

        # What is rotated is given as a whole head: configs say its width in several ways.
        rope = {k: v for k, v in rope_parameters(config).items() if k != "partial_rotary_factor"}
        given: dict[str, Any] = {"head_dim": width, "hidden_size": width, "num_attention_heads": 1}
        given |= {key: config[key] for key in _REACH if config.get(key) is not None}
        given["rope_parameters"] = rope
        make: Any = PreTrainedConfig
        hf = make(**given)
        inverse, factor = ROPE_INIT_FUNCTIONS[spec.rope_type](hf, torch.device("cpu"))
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * inverse[None, :].float()
    return (angles.cos() * factor).contiguous(), (angles.sin() * factor).contiguous()


def score_scale(spec: ArchSpec, config: Mapping[str, Any]) -> float:
    """What scores are multiplied by: 1/√(head width), in latent attention times yarn's mscale² (DeepSeek-V3)."""
    scale = 1.0 / math.sqrt(spec.head_dim)
    rope = rope_parameters(config)
    reach = rope.get("mscale_all_dim") or 0.0
    if spec.latent is None or rope["rope_type"] == "default" or not reach or rope["factor"] <= 1:
        return scale
    return scale * (0.1 * float(reach) * math.log(rope["factor"]) + 1.0) ** 2
