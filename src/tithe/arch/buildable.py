"""What `tithe.models` can run today, among all that is described."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from tithe.arch.described import DESCRIBED
from tithe.arch.files import quote
from tithe.arch.formats import TensorFormat
from tithe.arch.quantization import read_quantization
from tithe.arch.spec import ArchSpec
from tithe.errors import ModelError

_GROUPS_OF_32: Final = frozenset({TensorFormat.INT4_PACKED, TensorFormat.GPTQ, TensorFormat.AWQ})
_PARTIAL_ROTARY: Final = frozenset({"glm4_moe", "minimax_m2"})


def build_obstacles(config: Mapping[str, Any]) -> Iterator[str]:
    """Why a model of this config cannot be loaded and run, one sentence each; nothing when it can.

    Each is a feature that would be computed wrongly if it were ignored. `ModelError` when the config itself is broken.
    """
    spec = ArchSpec.from_config(config)
    if config.get("model_type") in DESCRIBED:
        yield f"model_type {quote(str(config.get('model_type')))} is described for plans and not run"
    if spec.activation != "silu":
        yield f"hidden_act is {quote(spec.activation)}; only silu is supported"
    yield from _packing_obstacles(config)
    if spec.latent is None and spec.rotary_dim != spec.head_dim and spec.architecture not in _PARTIAL_ROTARY:
        rotated = f"{spec.rotary_dim} of {spec.head_dim} dimensions of a head are rotated"
        yield f"partial_rotary_factor: {rotated}, which transformers' {spec.architecture} does not do; set it to 1"


def _packing_obstacles(config: Mapping[str, Any]) -> Iterator[str]:
    """Why packed tensors of this config cannot be multiplied as they are."""
    try:
        quantization = read_quantization(config)
    except ModelError as error:
        yield str(error).removeprefix("config: ")
        return
    for stored in quantization.formats if quantization else ():
        if stored.act_order:
            yield (
                "quantization_config desc_act: GPTQ with inputs sorted by importance is described and not run; use a "
                "release with desc_act: false"
            )
        if stored.kind is TensorFormat.FP8_BLOCK and stored.group is not None:
            side = f"[{stored.group}, {stored.group}]"
            yield f"quantization_config weight_block_size {side} is described and not run; [128, 128] is"
        if stored.kind in _GROUPS_OF_32 and (stored.group or 32) % 32:
            yield f"quantization_config group_size {stored.group} is described and not run; multiples of 32 are"


def check_buildable(config: Mapping[str, Any]) -> None:
    """`ModelError` with the first obstacle and its remedy, when a run could not load a model of this config."""
    for obstacle in build_obstacles(config):
        raise ModelError(f"config: {obstacle}")
