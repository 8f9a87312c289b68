"""Attention beyond plain grouped queries: latent attention, windows, which layers have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tithe.arch.architectures import Architecture
from tithe.arch.config_reader import ConfigReader
from tithe.arch.files import quote
from tithe.errors import ModelError

_DEFAULT_WINDOW: Final[dict[Architecture, int]] = {
    "mistral": 4096,
    "qwen2": 4096,
    "qwen3": 4096,
    "qwen3_moe": 4096,
    "gpt_oss": 128,
}
"""What transformers' config classes assume when `sliding_window` is absent; null means none."""


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: keys and values are kept as one small latent and one rotated key per token.

    DeepSeek-V2, https://arxiv.org/abs/2405.04434. `kv_a_proj_with_mqa` gives latent and rotated key, `kv_b_proj` turns
    the latent into every head's key and value; the query passes a bottleneck too unless `q_lora_rank` is `None`.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool = True
    """True when rotated pairs lie side by side in the weights' rows, as in all released models."""

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head, the rotated part included."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cached_per_token(self) -> int:
        """Numbers that one token keeps in the cache of one layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim


def read_latent(read: ConfigReader) -> LatentAttention:
    """The latent attention of a DeepSeek-V3 config."""
    return LatentAttention(
        q_lora_rank=read.optional_size("q_lora_rank"),
        kv_lora_rank=read.size("kv_lora_rank"),
        qk_nope_head_dim=read.size("qk_nope_head_dim"),
        qk_rope_head_dim=read.size("qk_rope_head_dim"),
        v_head_dim=read.size("v_head_dim"),
        rope_interleave=read.flag("rope_interleave", default=True),
    )


@dataclass(frozen=True)
class Window:
    """Attention to the last `size` tokens only, in some layers; no layers when all see everything."""

    size: int = 0
    layers: tuple[int, ...] = ()


def read_window(read: ConfigReader, architecture: Architecture, n_layers: int) -> Window:
    """The sliding window of a config, as transformers' config class of that architecture understands it."""
    size = read.config.get("sliding_window", _DEFAULT_WINDOW.get(architecture))
    layers = _window_layers(read, architecture, n_layers)
    if size is None or not layers:
        return Window()
    return Window(read.size("sliding_window", _DEFAULT_WINDOW.get(architecture)), layers)


def _window_layers(read: ConfigReader, architecture: Architecture, n_layers: int) -> tuple[int, ...]:
    """The layers that would look through a window if there is one."""
    types = read.texts("layer_types")
    if types is not None and architecture != "mistral":  # MistralModel does not read it
        known = {"full_attention", "sliding_attention"}
        if len(types) != n_layers or not known.issuperset(types):
            raise ModelError(
                f"config: layer_types is {quote(str(list(types)))}; one of {', '.join(sorted(known))} for each of the "
                f"{n_layers} layers is needed"
            )
        return tuple(layer for layer, kind in enumerate(types) if kind == "sliding_attention")
    if architecture == "gpt_oss":
        return tuple(range(0, n_layers, 2))
    if architecture in ("mistral", "mixtral") or (architecture == "qwen3_moe" and read.flag("use_sliding_window")):
        return tuple(range(n_layers))
    if architecture in ("qwen2", "qwen3") and read.flag("use_sliding_window"):
        return tuple(range(read.count("max_window_layers", 28), n_layers))
    return ()
