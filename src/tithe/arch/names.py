"""GGUF tensor names ↔ canonical (Hugging Face) names of llama, qwen2, qwen3 and qwen3_moe."""

from __future__ import annotations

import re
from typing import Final

_GLOBAL: Final[dict[str, str]] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK: Final[dict[str, str]] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERTS: Final[dict[str, str]] = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
_BLOCK_NAME: Final = re.compile(r"blk\.(0|[1-9]\d{0,4})\.(\w+)\.(weight|bias)", re.ASCII)
EXPERT_SLOT: Final = "{expert}"

ROPE_FACTORS: Final = "rope_freqs.weight"
"""GGUF keeps llama3's rotary scaling as a tensor of divisors instead of as metadata."""


def canonical_name(gguf_name: str) -> str | None:
    """The Hugging Face name, or `None` when this tensor has no place in a supported architecture.

    A stacked expert tensor gives a name with `EXPERT_SLOT` in place of the expert's number.

    >>> canonical_name("blk.3.attn_q.weight")
    'model.layers.3.self_attn.q_proj.weight'
    >>> canonical_name("blk.3.ffn_up_exps.weight")
    'model.layers.3.mlp.experts.{expert}.up_proj.weight'
    """
    stem, _, kind = gguf_name.rpartition(".")
    if stem in _GLOBAL and kind == "weight":
        return f"{_GLOBAL[stem]}.weight"
    match = _BLOCK_NAME.fullmatch(gguf_name)
    if match is None:
        return None
    layer, part, kind = match.groups()
    if part in _BLOCK:
        return f"model.layers.{layer}.{_BLOCK[part]}.{kind}"
    if part in _EXPERTS:
        return f"model.layers.{layer}.mlp.experts.{EXPERT_SLOT}.{_EXPERTS[part]}.{kind}"
    return None
