"""GGUF file → `Checkpoint`: config from metadata, canonical names, rotary row order, stacked experts taken apart."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tithe.arch.architectures import Architecture
from tithe.arch.checkpoint import Checkpoint, GenerationInfo, TensorEntry
from tithe.arch.files import quote
from tithe.arch.formats import StoredFormat, TensorFormat
from tithe.arch.gguf_file import GgufArray, GgufFile, GgufTensor, read_gguf
from tithe.arch.names import EXPERT_SLOT, ROPE_FACTORS, canonical_name
from tithe.arch.rope import rope_parameters
from tithe.errors import ModelError

_ARCHITECTURES: Final[dict[str, Architecture]] = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
}
_CONFIG_KEYS: Final[dict[str, str]] = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_MOE_KEYS: Final[dict[str, str]] = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_REFUSED_KEYS: Final[dict[str, str]] = {
    "attention.sliding_window": "sliding-window attention",
    "attention.scale": "a custom attention scale",
    "logit_scale": "scaled logits",
    "embedding_scale": "scaled embeddings",
    "residual_scale": "scaled residuals",
    "attn_logit_softcapping": "soft-capped attention",
    "final_logit_softcapping": "soft-capped logits",
    "expert_shared_count": "shared experts",
    "leading_dense_block_count": "leading dense layers",
}
_EOS_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
_UNUSED_TOKEN: Final = 5
_LLAMA3_FACTORS: Final = (8.0, 32.0)
"""Scaling factors of the released Llama 3.1 and 3.2 models."""


def read_gguf_checkpoint(path: Path) -> Checkpoint:
    """Read one GGUF file. Raises `ModelError`; touches no tensor byte except llama3's rotary factors."""
    gguf = read_gguf(path)
    metadata = gguf.metadata
    if metadata.get("split.count", 1) not in (0, 1):
        raise ModelError(f"{path} is one part of a split GGUF; join the parts first: llama-gguf-split --merge")
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        raise ModelError(
            f"{path}: general.architecture is {quote(str(name))}; supported in GGUF: {', '.join(_ARCHITECTURES)}"
        )
    config = _make_config(gguf, name)
    tensors = _make_entries(gguf, config)
    return Checkpoint(path, config, tensors, _generation(path, metadata), metadata)


def _make_config(gguf: GgufFile, name: str) -> dict[str, Any]:
    """Hugging Face's config keys from the metadata of architecture `name`; `ArchSpec` checks the values."""
    metadata, path = gguf.metadata, gguf.file.path
    for key, meaning in _REFUSED_KEYS.items():
        if metadata.get(f"{name}.{key}") not in (None, 0, 0.0):
            raise ModelError(f"{path}: {name}.{key} asks for {meaning}, which Tithe does not compute")
    architecture = _ARCHITECTURES[name]
    keys = _CONFIG_KEYS | (_MOE_KEYS if architecture == "qwen3_moe" else {})
    config: dict[str, Any] = {
        "model_type": architecture,
        "hidden_act": "silu",
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in gguf.tensors),
        "attention_bias": any(tensor.name.endswith("attn_output.bias") for tensor in gguf.tensors),
        "mlp_bias": any(tensor.name.endswith("ffn_down.bias") for tensor in gguf.tensors),
    }
    for key, target in keys.items():
        value = metadata.get(f"{name}.{key}")
        if isinstance(value, GgufArray):
            raise ModelError(f"{path}: {name}.{key} differs from layer to layer, which Tithe does not build")
        if value is not None:
            config[target] = value
    if architecture == "qwen3_moe":
        # llama.cpp always renormalises this architecture's top-k weights and its files do not say so
        config["norm_topk_prob"] = True
    elif metadata.get(f"{name}.expert_count"):
        raise ModelError(f"{path}: a {name} mixture of experts is not supported (of mixtures, qwen3moe is)")
    config["head_dim"] = _head_dim(gguf, name, config)
    config["rope_parameters"] = _rope(gguf, name, config.pop("rope_theta", 10_000.0))
    return config | _token_ids(metadata)


def _head_dim(gguf: GgufFile, name: str, config: Mapping[str, Any]) -> int:
    """Head size; refuses files whose keys, values and rotary parts differ in width."""
    get = gguf.metadata.get
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    derived = hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 else None
    rotary = get(f"{name}.rope.dimension_count")
    head_dim = get(f"{name}.attention.key_length", rotary or derived)
    widths = {head_dim, get(f"{name}.attention.value_length", head_dim), rotary or head_dim}
    if not isinstance(head_dim, int) or len(widths) != 1:
        raise ModelError(
            f"{gguf.file.path}: key, value and rotary widths must be one whole number, not {quote(str(widths))}"
        )
    return head_dim


def _rope(gguf: GgufFile, name: str, theta: float) -> dict[str, Any]:
    """`rope_parameters` from the scaling keys, or from the tensor of llama3 divisors."""
    get = gguf.metadata.get
    kind = get(f"{name}.rope.scaling.type", "none")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    factor = get(f"{name}.rope.scaling.factor", get(f"{name}.rope.scale_linear", 1.0))
    if kind not in ("none", "linear", "yarn"):
        raise ModelError(f"{gguf.file.path}: rotary scaling {quote(str(kind))}; supported: none, linear, yarn, llama3")
    if kind != "none" and factor not in (0, 1):
        rope |= {"rope_type": kind, "factor": factor}
        original = get(f"{name}.rope.scaling.original_context_length")
        if kind == "yarn" and original is not None:
            rope["original_max_position_embeddings"] = original
    tensor = next((tensor for tensor in gguf.tensors if tensor.name == ROPE_FACTORS), None)
    return rope if tensor is None else _llama3_rope(gguf, tensor, rope)


def _llama3_rope(gguf: GgufFile, tensor: GgufTensor, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Recognise the released models' llama3 parameters from the divisors; refuse any other divisors."""
    message = f"{gguf.file.path}: {ROPE_FACTORS} holds rotary factors other than Llama 3's, which Tithe does not read"
    if tensor.format is not TensorFormat.F32 or rope["rope_type"] != "default":
        raise ModelError(message)
    rope_parameters({"rope_parameters": rope})
    count = tensor.n_bytes // 4
    stored = struct.unpack_from(f"<{count}f", gguf.file.buffer, tensor.offset)
    if all(value == 1.0 for value in stored):
        return dict(rope)
    for factor in _LLAMA3_FACTORS:
        found = {
            **rope,
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        if all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(stored, _llama3_divisors(found, count), strict=True)):
            return found
    raise ModelError(message)


def _llama3_divisors(rope: Mapping[str, Any], count: int) -> list[float]:
    """What each rotary frequency is divided by under llama3 scaling, as llama.cpp's converter computes it."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original = rope["original_max_position_embeddings"]
    divisors: list[float] = []
    for index in range(count):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (index / count)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return divisors


def _make_entries(gguf: GgufFile, config: Mapping[str, Any]) -> dict[str, TensorEntry]:
    """Canonical entries of all tensors; `ModelError` names those that have no place."""
    entries: dict[str, TensorEntry] = {}
    for tensor in gguf.tensors:
        if tensor.name == ROPE_FACTORS:
            continue
        name = canonical_name(tensor.name)
        if name is None:
            raise ModelError(
                f"{gguf.file.path}: tensor {quote(tensor.name)} has no place in a {config['model_type']} model"
            )
        if EXPERT_SLOT in name:
            entries |= _split_experts(gguf, tensor, name, config.get("num_experts"))
        else:
            entries[name] = _entry(gguf, tensor, name, config)
    return entries


def _entry(gguf: GgufFile, tensor: GgufTensor, name: str, config: Mapping[str, Any]) -> TensorEntry:
    """One entry; llama's q and k rows are interleaved by llama.cpp's converter, other architectures' are not."""
    heads = 0
    if config["model_type"] == "llama":
        key = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2], "")
        heads = config.get(key, config.get("num_attention_heads", 0)) if key else 0
        if heads and (type(heads) is not int or heads < 0 or tensor.shape[0] % (2 * heads)):
            raise ModelError(f"{gguf.file.path}: {name} has {tensor.shape[0]} rows, which {heads} heads do not divide")
    return TensorEntry(name, tensor.shape, StoredFormat(tensor.format), tensor.n_bytes, gguf.file, tensor.offset, heads)


def _split_experts(gguf: GgufFile, tensor: GgufTensor, name: str, n_experts: object) -> dict[str, TensorEntry]:
    """One entry per expert of a stacked tensor [experts, out, in]; the experts lie one after the other."""
    if len(tensor.shape) != 3 or tensor.shape[0] != n_experts:
        raise ModelError(
            f"{gguf.file.path}: {quote(tensor.name)} has shape {tensor.shape}; "
            f"[experts, out, in] with {n_experts} experts is needed"
        )
    count, *shape = tensor.shape
    size = tensor.n_bytes // count
    names = [name.replace(EXPERT_SLOT, str(expert)) for expert in range(count)]
    return {
        one: TensorEntry(one, tuple(shape), StoredFormat(tensor.format), size, gguf.file, tensor.offset + expert * size)
        for expert, one in enumerate(names)
    }


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """`bos_token_id`, `eos_token_id` and `pad_token_id` where the file has them."""
    names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}
    found = {target: metadata.get(f"tokenizer.ggml.{key}") for key, target in names.items()}
    return {target: value for target, value in found.items() if type(value) is int}


def _generation(path: Path, metadata: Mapping[str, Any]) -> GenerationInfo:
    """End ids, chat template and tokenizer size from the `tokenizer.*` keys."""
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str) and not template.isascii() and any("\ud800" <= mark <= "\udfff" for mark in template):
        raise ModelError(f"{path}: the chat template is not UTF-8 text: damaged file")
    ends = (metadata.get(f"tokenizer.ggml.{key}") for key in _EOS_KEYS)
    return GenerationInfo(
        eos_token_ids=frozenset(token for token in ends if type(token) is int),
        bos_token_id=_token_ids(metadata).get("bos_token_id"),
        chat_template=template if isinstance(template, str) else None,
        tokenizer_path=path,
        tokenizer_size=_tokenizer_size(metadata),
    )


def _tokenizer_size(metadata: Mapping[str, Any]) -> int | None:
    """Number of tokens, without the unused ones at the end that the converter adds for padded embedding rows."""
    tokens, kinds = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, GgufArray):
        return None
    size = len(tokens)
    if isinstance(kinds, GgufArray) and len(kinds) == size:
        types = kinds.values()
        while size and types[size - 1] == _UNUSED_TOKEN:
            size -= 1
    return size
