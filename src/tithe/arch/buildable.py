"""What `tithe.models` can run today, among all that is described."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tithe.arch.architectures import BUILDABLE
from tithe.arch.files import quote
from tithe.arch.spec import ArchSpec
from tithe.errors import ModelError


def build_obstacles(config: Mapping[str, Any]) -> Iterator[str]:
    """Why a model of this config cannot be loaded and run, one sentence each; nothing when it can.

    Each is a feature that would be computed wrongly if it were ignored. `ModelError` when the config itself is broken.
    """
    spec = ArchSpec.from_config(config)
    if spec.architecture not in BUILDABLE:
        yield (
            f"model_type is {quote(str(config.get('model_type')))}, which `tithe inspect` describes and no run loads "
            f"yet; supported: {', '.join(BUILDABLE)}. Choose a model of one of these types"
        )
    if spec.window.layers:
        key = "sliding_window"
        key = "use_sliding_window" if config.get("use_sliding_window") else key
        key = "layer_types" if config.get("layer_types") else key
        yield (
            f"{key}: {len(spec.window.layers)} of {spec.n_layers} layers see {spec.window.size} tokens only; attention "
            f"over the full context is supported. Set {key} to null only if the model was trained without it, or "
            f"choose another model"
        )
    if spec.activation != "silu":
        yield f"hidden_act is {quote(spec.activation)}; only silu is supported"
    if config.get("quantization_config"):
        method = config["quantization_config"]
        name = method.get("quant_method") if isinstance(method, Mapping) else method
        yield (
            f"quantization_config {quote(str(name))} is not run; use the model's BF16 safetensors with "
            f"model.quantize: int4, or a GGUF file with Q4_0, Q4_1 or Q8_0 tensors"
        )
    if spec.latent is None and spec.rotary_dim != spec.head_dim:
        rotated = f"{spec.rotary_dim} of {spec.head_dim} dimensions of a head are rotated"
        yield f"partial_rotary_factor: {rotated}; only all of them is supported"


def check_buildable(config: Mapping[str, Any]) -> None:
    """`ModelError` with the first obstacle and its remedy, when a run could not load a model of this config."""
    for obstacle in build_obstacles(config):
        raise ModelError(f"config: {obstacle}")
