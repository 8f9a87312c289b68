"""Rotary position settings in one form, as Hugging Face configs old and new give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tithe.arch.config_reader import ConfigReader
from tithe.arch.files import quote
from tithe.errors import ModelError

_ROPE_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
"""Supported rotary types with the numbers each needs. `dynamic` and `longrope` change the frequencies with the sequence
length, so that sampler and trainer would disagree about cached keys."""

_DEFAULT_THETA: Final[dict[str, float]] = {"mixtral": 1e6, "gpt_oss": 150_000.0, "minimax_m2": 5e6}
"""Where transformers' config class has another default than 10000."""

_DEFAULT_PARTIAL: Final[dict[str, float]] = {"glm4_moe": 0.5}

_GPT_OSS_ROPE: Final = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""What `GptOssConfig` assumes when a config gives no rotary settings."""


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings in one form: ``{"rope_type": …, "rope_theta": …, …}``.

    Read from `rope_parameters` or from the older `rope_theta`, `rope_scaling`, `partial_rotary_factor` and
    `rotary_dim`. `partial_rotary_factor` is there when a part of each head is not rotated. `ModelError` for a type
    that is not supported or a number that is missing.
    """
    model_type = str(config.get("model_type"))
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise ModelError(f"config: rope_parameters is {quote(str(given))}; an object is needed")
    rope = dict(given) or (dict(_GPT_OSS_ROPE) if model_type == "gpt_oss" else {})
    legacy_type = rope.pop("type", None)
    rope_type = rope.setdefault("rope_type", legacy_type or "default")
    if not isinstance(rope_type, str) or rope_type not in _ROPE_KEYS:
        raise ModelError(
            f"config: rope_type is {quote(str(rope_type))}; supported: {', '.join(_ROPE_KEYS)} "
            f"(frequencies that depend on the sequence length would differ between sampler and trainer)"
        )
    theta = config.get("rope_theta")
    rope.setdefault("rope_theta", _DEFAULT_THETA.get(model_type, 10_000.0) if theta is None else theta)
    read = ConfigReader(rope)
    rope["rope_theta"] = read.positive("rope_theta")
    for key in _ROPE_KEYS[rope_type]:
        read.positive(key)
    partial = _partial_factor(config, rope, model_type)
    if partial != 1:
        rope["partial_rotary_factor"] = partial
    return rope


def _partial_factor(config: Mapping[str, Any], rope: Mapping[str, Any], model_type: str) -> float:
    """The rotated share of each head, from wherever the config gives it."""
    if rope.get("partial_rotary_factor") is not None:
        return _share(rope)
    if config.get("partial_rotary_factor") is not None:
        return _share(config)
    if config.get("rotary_dim") is not None:  # MiniMax-M2
        read = ConfigReader(config)
        head_dim = read.size("head_dim")
        return read.size("rotary_dim", limit=head_dim) / head_dim
    return _DEFAULT_PARTIAL.get(model_type, 1.0)


def _share(values: Mapping[str, Any]) -> float:
    share = ConfigReader(values).positive("partial_rotary_factor")
    if share > 1:
        raise ModelError(f"config: partial_rotary_factor is {share}; a number above 0 and at most 1 is needed")
    return share
