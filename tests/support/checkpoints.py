"""Tiny random checkpoints for every room's tests: Hugging Face directories and GGUF files.

    path = build_hf(tmp_path / "model", "qwen2")            # config.json, safetensors, tokenizer.json, template
    path = build_gguf(tmp_path / "model.gguf", "llama")     # Q4_1 linears, Q8_0 embedding, F32 norms

Both draw the same weights from one seed (`random_weights`), so a GGUF file is the quantized twin of the directory.
Keyword arguments beyond the named ones override fields of the real transformers config class.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from support.kquants import quantize_q4_k, quantize_q6_k
from tithe.arch import ArchSpec, tensor_shapes

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"]
EOS_ID, BOS_ID = 2, 1
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MERGES = ["t h", "h e", "i n", "a n", "e r", "o n", "r e", "a t", "Ġ a", "Ġ t", "th e", "Ġ =", "Ġ +", "an s", "w er"]

_CONFIG_CLASSES = {
    "llama": "LlamaConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "qwen3_moe": "Qwen3MoeConfig",
    "mistral": "MistralConfig",
    "mixtral": "MixtralConfig",
    "glm4_moe": "Glm4MoeConfig",
    "gpt_oss": "GptOssConfig",
    "minimax_m2": "MiniMaxM2Config",
    "deepseek_v3": "DeepseekV3Config",
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_DEEPSEEK_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
_OWN_SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "mistral": {"sliding_window": 20},
    "mixtral": _EXPERTS,
    "glm4_moe": _DEEPSEEK_EXPERTS | {"use_qk_norm": True, "attention_bias": True, "n_group": 1, "topk_group": 1},
    "gpt_oss": _EXPERTS | {"sliding_window": 20, "rope_parameters": None},
    "minimax_m2": _EXPERTS | {"rotary_dim": 16},
    "deepseek_v3": _DEEPSEEK_EXPERTS
    | {
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
    },
}
_GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
_GGUF_GLOBALS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def tokens() -> dict[str, int]:
    """The tiny byte-level vocabulary: 4 control tokens, printable ASCII with tab and newline, a few merges (116)."""
    characters = ["Ċ", "ĉ", "Ġ", *(chr(code) for code in range(33, 127))]
    merged = [merge.replace(" ", "") for merge in _MERGES]
    return {text: number for number, text in enumerate([*SPECIAL_TOKENS, *characters, *merged])}


def tiny_config(architecture: str = "llama", **overrides: Any) -> dict[str, Any]:
    """config.json of a 2-layer model of hidden size 64, made by the real config class."""
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "max_position_embeddings": 512,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": 0,
        "tie_word_embeddings": architecture == "llama",
    }
    if architecture not in ("qwen2", "deepseek_v3"):
        sizes["head_dim"] = 16 if architecture == "llama" else 32
    sizes |= _OWN_SIZES.get(architecture, {})
    config = getattr(transformers, _CONFIG_CLASSES[architecture])(**(sizes | overrides))
    class_name = _CONFIG_CLASSES[architecture].replace("Config", "ForCausalLM")
    return config.to_dict() | {"architectures": [class_name]}


def random_weights(spec: ArchSpec, seed: int = 0) -> dict[str, np.ndarray]:
    """float32 tensors by canonical name, of a scale that gives logits of about unit size; nothing is 0 or 1."""
    rng = np.random.default_rng(seed)
    weights: dict[str, np.ndarray] = {}
    for name, shape in tensor_shapes(spec).items():
        values = rng.standard_normal(shape, dtype=np.float32)
        if len(shape) > 1:  # gpt-oss keeps experts as [E, in, out]
            width = shape[1]
            weights[name] = values * np.float32(1.0 if "embed" in name else width**-0.5)
        else:
            weights[name] = values * np.float32(0.1) + np.float32(0.0 if name.endswith("bias") else 1.0)
    return weights


def build_hf(
    directory: Path,
    architecture: str = "llama",
    *,
    seed: int = 0,
    dtype: str = "bfloat16",
    shards: int = 1,
    tokenizer: bool = True,
    **overrides: Any,
) -> Path:
    """Write a complete Hugging Face directory and return it. `dtype`: bfloat16, float16 or float32."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    config = tiny_config(architecture, **overrides) | {"dtype": dtype}
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    weights = random_weights(ArchSpec.from_config(config), seed)
    tensors = {name: torch.from_numpy(values).to(getattr(torch, dtype)) for name, values in weights.items()}
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    else:
        _save_shards(directory, tensors, shards)
    if tokenizer:
        write_tokenizer(directory)
    return directory


def _save_shards(directory: Path, tensors: Mapping[str, Any], shards: int) -> None:
    from safetensors.torch import save_file

    weight_map = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        part = {name: tensor for name, tensor in tensors.items() if weight_map[name] == file}
        save_file(part, directory / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def write_tokenizer(directory: Path) -> None:
    """tokenizer.json, tokenizer_config.json (ChatML template) and generation_config.json of the tiny vocabulary."""
    directory.mkdir(parents=True, exist_ok=True)
    vocab = tokens()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": vocab[text], "content": text, **flags} for text in SPECIAL_TOKENS],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocab,
            "merges": [merge.split(" ") for merge in _MERGES],
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<unk>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
    }
    generation = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": 0}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "generation_config.json").write_text(json.dumps(generation))


def build_gguf(
    path: Path,
    architecture: str = "llama",
    *,
    seed: int = 0,
    linear: str = "Q4_1",
    embedding: str = "Q8_0",
    tokenizer: bool = True,
    metadata: Mapping[str, int | float | str] | None = None,
    parts: Mapping[str, str] | None = None,
    **overrides: Any,
) -> Path:
    """Write a GGUF file as llama.cpp's converter does and return its path.

    `linear` and `embedding` are any of Q4_0, Q4_1, Q8_0, Q4_K, Q6_K, Q5_0, F16, BF16, F32; `parts` says otherwise for
    some parts, as {"ffn_down": "Q6_K"}; `metadata` adds keys (ints as uint32).
    """
    import gguf

    config = tiny_config(architecture, **overrides)
    spec = ArchSpec.from_config(config)
    writer = gguf.GGUFWriter(path, architecture.replace("_", ""))
    _write_metadata(writer, spec)
    for key, value in (metadata or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    if tokenizer:
        _write_gguf_tokenizer(writer, spec.vocab_size)
    for name, (values, usual) in gguf_tensors(spec, random_weights(spec, seed), linear, embedding).items():
        kind = next((other for part, other in (parts or {}).items() if f".{part}" in f".{name}"), usual)
        qtype = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, _gguf_bytes(values, kind), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_bytes(values: np.ndarray, kind: str) -> np.ndarray:
    import gguf

    own = {"Q4_K": quantize_q4_k, "Q6_K": quantize_q6_k}.get(kind)
    if own is None:
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    raw = own(values.reshape(-1, values.shape[-1]))
    return raw.reshape(*values.shape[:-1], -1)


def gguf_tensors(
    spec: ArchSpec, weights: Mapping[str, np.ndarray], linear: str, embedding: str
) -> dict[str, tuple[np.ndarray, str]]:
    """GGUF name → (values in llama.cpp's row order, format): q and k of llama interleaved, experts stacked."""
    result: dict[str, tuple[np.ndarray, str]] = {}
    for name, values in weights.items():
        if ".mlp.experts." in name:
            continue
        stem, _, suffix = name.rpartition(".")
        ordered = values
        if spec.architecture == "llama" and stem.endswith(("q_proj", "k_proj")):
            ordered = interleave(values, spec.n_heads if stem.endswith("q_proj") else spec.n_kv_heads)
        is_float = values.ndim == 1 or stem.endswith("mlp.gate")
        kind = "F32" if is_float else embedding if stem in _GGUF_GLOBALS else linear
        result[f"{_gguf_stem(stem)}.{suffix}"] = (ordered, kind)
    for layer in spec.moe_layers:
        for part in ("gate", "up", "down"):
            names = [f"model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight" for e in range(spec.n_experts)]
            result[f"blk.{layer}.ffn_{part}_exps.weight"] = (np.stack([weights[name] for name in names]), linear)
    return result


def interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's converter: the two halves of every head's rows become pairs."""
    shape = (heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(values.reshape(shape).swapaxes(1, 2).reshape(values.shape))


def _gguf_stem(stem: str) -> str:
    if stem in _GGUF_GLOBALS:
        return _GGUF_GLOBALS[stem]
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_GGUF_PARTS[part]}"


def _write_metadata(writer: Any, spec: ArchSpec) -> None:
    writer.add_context_length(spec.max_position_embeddings)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.n_layers)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.n_heads)
    writer.add_head_count_kv(spec.n_kv_heads)
    writer.add_layer_norm_rms_eps(spec.rms_norm_eps)
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_vocab_size(spec.vocab_size)
    if spec.architecture == "llama":
        writer.add_rope_dimension_count(spec.head_dim)
    if spec.architecture in ("qwen3", "qwen3_moe"):
        writer.add_key_length(spec.head_dim)
        writer.add_value_length(spec.head_dim)
    if spec.is_moe:
        writer.add_expert_count(spec.n_experts)
        writer.add_expert_used_count(spec.n_experts_per_token)
        writer.add_expert_feed_forward_length(spec.moe_intermediate_size)


def _write_gguf_tokenizer(writer: Any, vocab_size: int) -> None:
    """The tiny vocabulary; llama.cpp's converter fills padded rows with [PAD…] tokens of type UNUSED."""
    import gguf

    vocab = list(tokens())
    padding = [f"[PAD{number}]" for number in range(len(vocab), vocab_size)]
    kinds = [gguf.TokenType.CONTROL] * len(SPECIAL_TOKENS)
    kinds += [gguf.TokenType.NORMAL] * (len(vocab) - len(kinds)) + [gguf.TokenType.UNUSED] * len(padding)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*vocab, *padding])
    writer.add_token_types(kinds)
    writer.add_token_merges(_MERGES)
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
