"""Attention of models that Tithe plans for and does not run: what it weighs and what it keeps of every token.

    model_type                    attention                                                         sizes from
    ───────────────────────────   ───────────────────────────────────────────────────────────────   ──────────────────
    deepseek_v32, glm_moe_dsa     latent, with an indexer that picks `index_topk` tokens            DeepSeek-V3.2, GLM-5
    kimi_linear                   every fourth layer latent with an output gate, others delta rule  arXiv 2510.26692
    longcat_flash                 latent, two of them and two dense MLPs beside each mixture        LongCat-Flash
    minimax_m1                    every eighth layer grouped, the others lightning                  arXiv 2501.08313
    mimo_v2_flash                 grouped, through a window of 128 in five layers of six            MiMo-V2-Flash
    qwen3_5_moe                   every fourth layer grouped with an output gate, others delta rule  Qwen3-Next

`mimo` and `bailing_moe_v2` are here too: their tensors are those of qwen2 and glm4_moe under another name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tithe.arch.config_reader import ConfigReader
from tithe.arch.files import quote
from tithe.errors import ModelError

DESCRIBED: Final[Mapping[str, str]] = {
    "deepseek_v32": "deepseek_v3",
    "glm_moe_dsa": "deepseek_v3",
    "kimi_linear": "deepseek_v3",
    "longcat_flash": "deepseek_v3",
    "mimo": "qwen2",
    "bailing_moe_v2": "glm4_moe",
    "minimax_m1": "mixtral",
    "mimo_v2_flash": "glm4_moe",
    "qwen3_5_moe": "qwen3_moe",
    "qwen3_5_moe_text": "qwen3_moe",
}
"""Model type → the architecture whose other sizes, norms, MLPs and mixture it shares."""

_MAX_BLOCKS: Final = 2048
"""Of LongCat: two layers each."""


def canonical(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config under the names of the architecture that describes it; all but LongCat's are so already.

    A block of LongCat-Flash (transformers, models/longcat_flash) has two attentions with a dense MLP each, and one
    mixture whose shortcut spans both: here two layers, the first a mixture whose shared expert is the dense MLP. Some
    of its experts compute nothing; a token takes as many real ones as even routing gives it on average.
    """
    if config.get("model_type") != "longcat_flash":
        return config
    read = ConfigReader(config)
    blocks, dense = read.size("num_layers", limit=_MAX_BLOCKS), read.size("ffn_hidden_size")
    width, chosen = read.size("expert_ffn_hidden_size"), read.size("moe_topk")
    real = read.size("n_routed_experts")
    if dense % width:
        raise ModelError(f"config: ffn_hidden_size {dense} is not a multiple of expert_ffn_hidden_size {width}")
    return {
        **config,
        "num_hidden_layers": 2 * blocks,
        "moe_layer_freq": [1, 0] * blocks,
        "intermediate_size": dense,
        "moe_intermediate_size": width,
        "n_shared_experts": dense // width,
        "num_experts_per_tok": max(1, round(chosen * real / (real + read.count("zero_expert_num")))),
    }


@dataclass(frozen=True)
class OtherAttention:
    """Attention of some layers that is not the architecture's own, or comes on top of it.

    Example: GLM-5's indexer is ``OtherAttention(layers=(0, …, 77), linears=(("indexer.wq_b", 4096, 2048), …),
    is_extra=True, index_bytes_per_token=132, picked=2048)``.
    """

    layers: tuple[int, ...]
    linears: tuple[tuple[str, int, int], ...]
    """Name below ``self_attn``, outputs, inputs."""
    vectors: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Name below ``self_attn`` and shape of what no activation is multiplied by as a matrix."""
    is_extra: bool = False
    """True when the architecture's own attention stays beside it."""
    cached_per_token: int = 0
    """Numbers that one token keeps in the cache of one of these layers."""
    state_elements: int = 0
    """float32 numbers that one sequence keeps in one of these layers, whatever its length."""
    index_bytes_per_token: int = 0
    """Bytes that an indexer keeps of one token in one of these layers."""
    picked: int = 0
    """Tokens that an indexer picks for the layers' own attention; 0: it sees all."""
    window: int = 0
    """Tokens that these layers look back to; 0: all."""


def read_others(config: Mapping[str, Any], n_layers: int) -> tuple[OtherAttention, ...]:
    """What a config's attention has besides its architecture's. `ModelError` names the key that is missing or odd."""
    reader = _READERS.get(str(config.get("model_type")))
    return reader(ConfigReader(config), n_layers) if reader is not None else ()


def _indexer(read: ConfigReader, n_layers: int) -> tuple[OtherAttention, ...]:
    """One query of `index_n_heads` heads, one key; the key is kept in FP8 with a float32 scale."""
    heads, width, hidden = read.size("index_n_heads"), read.size("index_head_dim"), read.size("hidden_size")
    linears = (
        ("indexer.wq_b", heads * width, read.size("q_lora_rank")),
        ("indexer.wk", width, hidden),
        ("indexer.weights_proj", heads, hidden),
    )
    norm = (("indexer.k_norm.weight", (width,)), ("indexer.k_norm.bias", (width,)))
    picked = read.size("index_topk", 2048)
    return (
        OtherAttention(
            tuple(range(n_layers)), linears, norm, is_extra=True, index_bytes_per_token=width + 4, picked=picked
        ),
    )


def _kimi_linear(read: ConfigReader, n_layers: int) -> tuple[OtherAttention, ...]:
    """Layers are counted from 1. An output gate on latent layers; five full matrices on the delta-rule layers."""
    linear = read.sub("linear_attn_config")
    latent = _layers(linear, "full_attn_layers", n_layers, first=1)
    delta = _layers(linear, "kda_layers", n_layers, first=1)
    hidden, width = read.size("hidden_size"), linear.size("num_heads") * linear.size("head_dim")
    gate = (("g_proj", read.size("num_attention_heads") * read.size("v_head_dim"), hidden),)
    inner = tuple((f"{part}_proj", width, hidden) for part in ("q", "k", "v", "g"))
    state = linear.size("num_heads") * linear.size("head_dim") ** 2
    return (
        OtherAttention(latent, gate, is_extra=True),
        OtherAttention(delta, (*inner, ("o_proj", hidden, width)), state_elements=state),
    )


def _minimax_m1(read: ConfigReader, n_layers: int) -> tuple[OtherAttention, ...]:
    """`attn_type_list` has 0 for lightning: full-width queries, keys and values, an output gate, a norm."""
    kinds = _numbers(read, "attn_type_list", n_layers)
    hidden, heads, width = read.size("hidden_size"), read.size("num_attention_heads"), read.size("head_dim")
    inner = heads * width
    linears = (("qkv_proj", 3 * inner, hidden), ("output_gate", inner, hidden), ("out_proj", hidden, inner))
    layers = tuple(i for i, kind in enumerate(kinds) if kind == 0)
    return (OtherAttention(layers, linears, (("norm.weight", (inner,)),), state_elements=heads * width**2),)


def _mimo_v2(read: ConfigReader, n_layers: int) -> tuple[OtherAttention, ...]:
    """Keys and values of different widths; `hybrid_layer_pattern` has 1 for a layer with a window."""
    kinds = _numbers(read, "hybrid_layer_pattern", n_layers)
    hidden, found = read.size("hidden_size"), []
    for kind, prefix in ((0, ""), (1, "swa_")):
        heads, kv_heads = read.size(f"{prefix}num_attention_heads"), read.size(f"{prefix}num_key_value_heads")
        width, v_width = read.size(f"{prefix}head_dim"), read.size(f"{prefix}v_head_dim")
        linears = (
            ("q_proj", heads * width, hidden),
            ("k_proj", kv_heads * width, hidden),
            ("v_proj", kv_heads * v_width, hidden),
            ("o_proj", hidden, heads * v_width),
        )
        layers = tuple(i for i, layer_kind in enumerate(kinds) if layer_kind == kind)
        window = read.size("sliding_window") if kind else 0
        found.append(OtherAttention(layers, linears, cached_per_token=kv_heads * (width + v_width), window=window))
    return tuple(found)


def _qwen3_5(read: ConfigReader, n_layers: int) -> tuple[OtherAttention, ...]:
    """Three delta-rule layers, then one of grouped attention whose `q_proj` also gives the output gate."""
    interval, hidden = read.size("full_attention_interval", 4), read.size("hidden_size")
    k_heads, v_heads = read.size("linear_num_key_heads"), read.size("linear_num_value_heads")
    k_width, v_width = read.size("linear_key_head_dim"), read.size("linear_value_head_dim")
    keys, values = k_heads * k_width, v_heads * v_width
    kernel = read.size("linear_conv_kernel_dim", 4)
    linears = (
        ("in_proj_qkv", 2 * keys + values, hidden),
        ("in_proj_z", values, hidden),
        ("in_proj_b", v_heads, hidden),
        ("in_proj_a", v_heads, hidden),
        ("out_proj", hidden, values),
    )
    vectors = (
        ("conv1d.weight", (2 * keys + values, 1, kernel)),
        ("dt_bias", (v_heads,)),
        ("A_log", (v_heads,)),
        ("norm.weight", (v_width,)),
    )
    full = tuple(i for i in range(n_layers) if (i + 1) % interval == 0)
    delta = tuple(i for i in range(n_layers) if (i + 1) % interval)
    gate = (("q_gate_proj", read.size("num_attention_heads") * read.size("head_dim"), hidden),)
    return (
        OtherAttention(full, gate, is_extra=True),
        OtherAttention(delta, linears, vectors, state_elements=v_heads * k_width * v_width),
    )


_READERS: Final[dict[str, Callable[[ConfigReader, int], tuple[OtherAttention, ...]]]] = {
    "deepseek_v32": _indexer,
    "glm_moe_dsa": _indexer,
    "kimi_linear": _kimi_linear,
    "minimax_m1": _minimax_m1,
    "mimo_v2_flash": _mimo_v2,
    "qwen3_5_moe": _qwen3_5,
    "qwen3_5_moe_text": _qwen3_5,
}


def _numbers(read: ConfigReader, key: str, n_layers: int) -> list[int]:
    """A list with 0 or 1 for every layer."""
    value = read.get(key, None)
    if not isinstance(value, list) or len(value) != n_layers or not {0, 1}.issuperset(value):
        raise ModelError(f"config: {key} is {quote(str(value))}; 0 or 1 for each of the {n_layers} layers is needed")
    return value


def _layers(read: ConfigReader, key: str, n_layers: int, *, first: int) -> tuple[int, ...]:
    """A list of different layer numbers, counted from `first`, as numbers from 0."""
    value = read.get(key, None)
    bounds = range(first, first + n_layers)
    is_list = isinstance(value, list) and all(type(item) is int and item in bounds for item in value)
    if not is_list or len(set(value)) < len(value):
        raise ModelError(f"config: {key} is {quote(str(value))}; layer numbers from {first} to {bounds[-1]} are needed")
    return tuple(item - first for item in value)
