"""The architectures that Tithe knows: described by `tithe.arch`, computed by `tithe.models`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

from tithe.arch.described import DESCRIBED
from tithe.arch.files import quote
from tithe.errors import ModelError

Architecture = Literal[
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "minimax_m2",
]
ARCHITECTURES: Final[tuple[Architecture, ...]] = get_args(Architecture)
"""What a config may ask for besides says `check_buildable`."""

_ALIASES: Final[Mapping[str, str]] = {"kimi_k2": "deepseek_v3"}
"""Model types that are another's architecture under their own name."""


def check_architecture(model_type: object) -> Architecture:
    """The architecture with this `model_type`, or `ModelError` naming those that are known."""
    name = ({**_ALIASES, **DESCRIBED}).get(model_type, model_type) if isinstance(model_type, str) else None
    for architecture in ARCHITECTURES:
        if name == architecture:
            return architecture
    raise ModelError(
        f"config: model_type is {quote(str(model_type))}, which Tithe does not know; "
        f"supported: {', '.join([*ARCHITECTURES, *_ALIASES])}. Choose a model of one of these types"
    )


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """`check_architecture` of a config's `model_type`."""
    return check_architecture(config.get("model_type"))
