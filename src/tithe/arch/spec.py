"""What an architecture consists of: sizes, tensor names and shapes, KV bytes. Plain Python, also for the planner."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

from tithe.arch.files import quote
from tithe.errors import ModelError

Architecture = Literal["llama", "qwen2", "qwen3", "qwen3_moe"]
ARCHITECTURES: Final[tuple[Architecture, ...]] = get_args(Architecture)

_ROPE_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
"""Supported rotary types with the numbers each needs. `dynamic` and `longrope` change the frequencies with the sequence
length, so that sampler and trainer would disagree about cached keys."""

_MAX_LAYERS: Final = 4096
_MAX_SIZE: Final = 2**31


@dataclass(frozen=True)
class ArchSpec:
    """The sizes of one decoder. All counts are per model unless a name says otherwise.

    Example: SmolLM2-135M is ``ArchSpec("llama", n_layers=30, hidden_size=576, n_heads=9, n_kv_heads=3, head_dim=64,
    intermediate_size=1536, vocab_size=49152, tie_word_embeddings=True, …)``.
    """

    architecture: Architecture
    n_layers: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int
    """Width of a dense MLP; in qwen3_moe of the layers that are not mixtures."""
    vocab_size: int
    """Rows of the embedding."""
    rms_norm_eps: float
    max_position_embeddings: int
    """Context length in tokens."""
    rope_type: str
    rope_theta: float
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    n_experts: int = 0
    n_experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    moe_layers: tuple[int, ...] = ()
    """Layers whose MLP is a mixture of experts, ascending."""

    @property
    def is_moe(self) -> bool:
        """True when at least one layer is a mixture of experts."""
        return bool(self.moe_layers)

    @property
    def q_size(self) -> int:
        """Outputs of q_proj."""
        return self.n_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Outputs of k_proj, and of v_proj."""
        return self.n_kv_heads * self.head_dim

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ArchSpec:
        """Read a Hugging Face config. `ModelError` names the key that is missing, impossible or unsupported."""
        read = _Reader(config)
        architecture = check_architecture(config.get("model_type"))
        _refuse_unsupported(config)
        heads = read.size("num_attention_heads")
        hidden = read.size("hidden_size")
        layers = read.size("num_hidden_layers", limit=_MAX_LAYERS)
        kv_heads = read.size("num_key_value_heads", heads if architecture == "llama" else None)
        if heads % kv_heads:
            raise ModelError(f"config: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        rope = rope_parameters(config)
        attention_bias = read.flag("attention_bias")
        spec = cls(
            architecture=architecture,
            n_layers=layers,
            hidden_size=hidden,
            n_heads=heads,
            n_kv_heads=kv_heads,
            head_dim=read.size("head_dim", _default_head_dim(architecture, hidden, heads)),
            intermediate_size=read.size("intermediate_size"),
            vocab_size=read.size("vocab_size"),
            rms_norm_eps=read.positive("rms_norm_eps", 1e-6),
            max_position_embeddings=read.size("max_position_embeddings"),
            rope_type=rope["rope_type"],
            rope_theta=rope["rope_theta"],
            tie_word_embeddings=read.flag("tie_word_embeddings"),
            qkv_bias=architecture == "qwen2" or attention_bias,
            o_bias=architecture != "qwen2" and attention_bias,
            mlp_bias=architecture == "llama" and read.flag("mlp_bias"),
            qk_norm=architecture in ("qwen3", "qwen3_moe"),
        )
        return _with_experts(spec, read) if architecture == "qwen3_moe" else spec


class _Reader:
    """Typed access to a config with messages that name the key."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def get(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        if value is None:
            if default is None:
                raise ModelError(f"config: {key} is missing; a complete config.json is needed")
            return default
        return value

    def size(self, key: str, default: int | None = None, *, limit: int = _MAX_SIZE) -> int:
        value = self.get(key, default)
        if type(value) is not int or not 1 <= value <= limit:
            raise ModelError(f"config: {key} is {quote(str(value))}; a whole number from 1 to {limit} is needed")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise ModelError(f"config: {key} is {quote(str(value))}; a finite number above 0 is needed")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.get(key, default=False)
        if type(value) is not bool:
            raise ModelError(f"config: {key} is {quote(str(value))}; true or false is needed")
        return value


def check_architecture(model_type: object) -> Architecture:
    """The architecture with this `model_type`, or `ModelError` naming those that are supported."""
    for architecture in ARCHITECTURES:
        if model_type == architecture:
            return architecture
    raise ModelError(
        f"config: model_type is {quote(str(model_type))}, which Tithe does not build; "
        f"supported: {', '.join(ARCHITECTURES)}. Choose a model of one of these types"
    )


def _default_head_dim(architecture: Architecture, hidden: int, heads: int) -> int | None:
    """What transformers assumes when `head_dim` is absent; `None` when it must be given."""
    if architecture == "qwen3":
        return 128
    return hidden // heads if hidden % heads == 0 else None


def _with_experts(spec: ArchSpec, read: _Reader) -> ArchSpec:
    """The spec with its mixture fields: every `decoder_sparse_step`-th layer, except those in `mlp_only_layers`."""
    step = read.size("decoder_sparse_step", 1)
    dense = read.get("mlp_only_layers", [])
    if not isinstance(dense, list):
        raise ModelError(f"config: mlp_only_layers is {quote(str(dense))}; a list of layer numbers is needed")
    n_experts = read.size("num_experts" if "num_experts" in read.config else "num_local_experts")
    return replace(
        spec,
        n_experts=n_experts,
        n_experts_per_token=read.size("num_experts_per_tok", limit=n_experts),
        moe_intermediate_size=read.size("moe_intermediate_size"),
        norm_topk_prob=read.flag("norm_topk_prob"),
        moe_layers=tuple(n for n in range(spec.n_layers) if n not in dense and (n + 1) % step == 0),
    )


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    """`ModelError` for features that would be computed wrongly if they were ignored."""
    window = "set use_sliding_window to false only if the model was trained without it, or choose another model"
    if config.get("use_sliding_window"):
        raise ModelError(f"config: use_sliding_window: attention over the full context only is supported; {window}")
    layer_types = config.get("layer_types")
    if layer_types and (not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types)):
        raise ModelError(f"config: layer_types is {quote(str(layer_types))}; only full_attention is supported")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"config: hidden_act is {quote(str(activation))}; only silu is supported")
    if config.get("quantization_config"):
        method = config["quantization_config"]
        name = method.get("quant_method") if isinstance(method, Mapping) else method
        raise ModelError(
            f"config: quantization_config {quote(str(name))} is not read; use the model's BF16 safetensors with "
            f"model.quantize: int4, or a GGUF file with Q4_0, Q4_1 or Q8_0 tensors"
        )
    if config.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
        raise ModelError("config: partial_rotary_factor other than 1 is not supported")
    if (config.get("pretraining_tp") or 1) != 1:
        raise ModelError("config: pretraining_tp above 1 is not supported; set it to 1 (the result is the same)")


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings in one form: ``{"rope_type": …, "rope_theta": …, …}``.

    Read from `rope_parameters` or from the older `rope_theta` and `rope_scaling`. `ModelError` for a type that is not
    supported or a number that is missing.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise ModelError(f"config: rope_parameters is {quote(str(given))}; an object is needed")
    rope = dict(given)
    legacy_type = rope.pop("type", None)
    rope_type = rope.setdefault("rope_type", legacy_type or "default")
    if not isinstance(rope_type, str) or rope_type not in _ROPE_KEYS:
        raise ModelError(
            f"config: rope_type is {quote(str(rope_type))}; supported: {', '.join(_ROPE_KEYS)} "
            f"(frequencies that depend on the sequence length would differ between sampler and trainer)"
        )
    theta = config.get("rope_theta")
    rope.setdefault("rope_theta", 10_000.0 if theta is None else theta)
    read = _Reader(rope)
    rope["rope_theta"] = read.positive("rope_theta")
    for key in _ROPE_KEYS[rope_type]:
        read.positive(key)
    partial = rope.get("partial_rotary_factor", 1.0)
    if partial not in (None, 1, 1.0):
        raise ModelError("config: partial_rotary_factor other than 1 is not supported")
    return rope


def linear_shapes(spec: ArchSpec) -> dict[str, tuple[int, int]]:
    """(out, in) of every linear of the decoder layers by module name, in layer order; what LoRA can target.

    Experts are listed one by one; the router and the head are no targets and are left out.
    """
    return {
        f"model.layers.{layer}.{module}": shape
        for layer in range(spec.n_layers)
        for module, shape in _layer_linears(spec, is_mixture=layer in spec.moe_layers)
    }


def tensor_shapes(spec: ArchSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor a complete checkpoint of this architecture has, by canonical name. A tied head is not listed."""
    return dict(iter_tensor_shapes(spec))


def iter_tensor_shapes(spec: ArchSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """As `tensor_shapes`, one by one: an untrusted config may claim more tensors than fit in memory."""
    yield "model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size)
    for layer in range(spec.n_layers):
        prefix = f"model.layers.{layer}"
        is_mixture = layer in spec.moe_layers
        yield f"{prefix}.input_layernorm.weight", (spec.hidden_size,)
        for module, shape in _layer_linears(spec, is_mixture=is_mixture):
            yield f"{prefix}.{module}.weight", shape
            if _has_bias(spec, module):
                yield f"{prefix}.{module}.bias", (shape[0],)
        if spec.qk_norm:
            yield f"{prefix}.self_attn.q_norm.weight", (spec.head_dim,)
            yield f"{prefix}.self_attn.k_norm.weight", (spec.head_dim,)
        yield f"{prefix}.post_attention_layernorm.weight", (spec.hidden_size,)
        if is_mixture:
            yield f"{prefix}.mlp.gate.weight", (spec.n_experts, spec.hidden_size)
    yield "model.norm.weight", (spec.hidden_size,)
    if not spec.tie_word_embeddings:
        yield "lm_head.weight", (spec.vocab_size, spec.hidden_size)


def _layer_linears(spec: ArchSpec, *, is_mixture: bool) -> Iterator[tuple[str, tuple[int, int]]]:
    """Name within its layer and (out, in) of every linear of one layer, the router left out."""
    yield "self_attn.q_proj", (spec.q_size, spec.hidden_size)
    yield "self_attn.k_proj", (spec.kv_size, spec.hidden_size)
    yield "self_attn.v_proj", (spec.kv_size, spec.hidden_size)
    yield "self_attn.o_proj", (spec.hidden_size, spec.q_size)
    width = spec.moe_intermediate_size if is_mixture else spec.intermediate_size
    mlps = (f"mlp.experts.{expert}" for expert in range(spec.n_experts)) if is_mixture else ("mlp",)
    for mlp in mlps:
        yield f"{mlp}.gate_proj", (width, spec.hidden_size)
        yield f"{mlp}.up_proj", (width, spec.hidden_size)
        yield f"{mlp}.down_proj", (spec.hidden_size, width)


def _has_bias(spec: ArchSpec, module: str) -> bool:
    if not module.startswith("self_attn."):
        return spec.mlp_bias
    return spec.o_bias if module.endswith("o_proj") else spec.qkv_bias


def kv_bytes_per_token(spec: ArchSpec, bytes_per_element: int) -> int:
    """Bytes of keys and values that one token keeps in the cache, over all layers.

    28 layers, 2 KV heads of size 128 in BF16 take 2 · 28 · 2 · 128 · 2 = 28672 bytes.
    """
    return 2 * spec.n_layers * spec.kv_size * bytes_per_element
