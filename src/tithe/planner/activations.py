"""What training keeps of every token: counted tensor by tensor from the shapes, as the backward reads them.

The residual stream, norms, softmax and logits are float32, operands of products two bytes (docs/architecture.md).
Attention keeps no T × T matrix (FlashAttention, arXiv 2205.14135). With recomputation a layer keeps its input and
nothing else, and one layer at a time is expanded for its backward (arXiv 1604.06174); the gradients of an expanded
layer are as large as what it keeps. Counting follows arXiv 2205.05198, section 4, for gated MLPs and mixtures.
"""

from __future__ import annotations

from collections.abc import Iterator

from tithe.arch import ArchSpec

STREAM_BYTES = 4
"""Of one number of the residual stream."""
OPERAND_BYTES = 2
"""Of one number that a product reads."""


def layer_bytes_per_token(spec: ArchSpec, layer: int, lora_r: int, stream_bytes: int = STREAM_BYTES) -> int:
    """Everything one layer keeps of one token for its backward, its input included. `stream_bytes` of one number of
    the stream: 2 in trainers that keep it in BF16."""
    attention = _attention_elements(spec)
    mlp = _mixture_elements(spec) if layer in spec.moe_layers else _gated_elements(spec.intermediate_size)
    lora = 7 * lora_r
    stream = 2 * stream_bytes * spec.hidden_size  # before attention, and between attention and MLP
    log_sum_exp = 4 * spec.n_heads
    operands = 2 * spec.hidden_size + attention + mlp + lora  # both normed inputs
    return stream + log_sum_exp + OPERAND_BYTES * operands


def widest_layer_bytes_per_token(spec: ArchSpec, lora_r: int, stream_bytes: int = STREAM_BYTES) -> int:
    """Of the layer that keeps most: also what a forward that keeps nothing holds, one layer at a time."""
    return max(layer_bytes_per_token(spec, layer, lora_r, stream_bytes) for layer, _ in _kinds(spec))


def kept_bytes_per_token(spec: ArchSpec, lora_r: int, *, recompute: bool, stream_bytes: int = STREAM_BYTES) -> int:
    """What all layers keep of one token until their backward comes; with recomputation, their inputs alone."""
    if recompute:
        return spec.n_layers * stream_bytes * spec.hidden_size
    return sum(n * layer_bytes_per_token(spec, layer, lora_r, stream_bytes) for layer, n in _kinds(spec))


def training_bytes_per_token(spec: ArchSpec, lora_r: int, *, recompute: bool, stream_bytes: int = STREAM_BYTES) -> int:
    """At the worst moment: what is kept, one expanded layer (when it was not kept), and that layer's gradients."""
    widest = widest_layer_bytes_per_token(spec, lora_r, stream_bytes)
    kept = kept_bytes_per_token(spec, lora_r, recompute=recompute, stream_bytes=stream_bytes)
    return kept + (2 if recompute else 1) * widest


def _kinds(spec: ArchSpec) -> Iterator[tuple[int, int]]:
    """(first layer, layers) of the mixtures and of the dense ones, where there are any."""
    n_moe = len(spec.moe_layers)
    if n_moe:
        yield spec.moe_layers[0], n_moe
    dense = next((i for i in range(spec.n_layers) if i not in spec.moe_layers), None)
    if dense is not None:
        yield dense, spec.n_layers - n_moe


def _attention_elements(spec: ArchSpec) -> int:
    """Queries, keys, values and the heads' output."""
    latent = spec.latent
    if latent is None:
        return 2 * spec.q_size + 2 * spec.kv_size
    down = (latent.q_lora_rank or 0) + latent.cached_per_token
    return down + spec.q_size + spec.n_heads * (latent.kv_lora_rank + latent.v_head_dim)


def _gated_elements(width: int) -> int:
    """Gate, up, and their product."""
    return 3 * width


def _mixture_elements(spec: ArchSpec) -> int:
    """The rows of the chosen experts, gathered, expanded and given back; the shared expert; the router's scores."""
    stream = spec.mixture.latent_size or spec.hidden_size
    chosen = spec.n_experts_per_token * (2 * stream + _gated_elements(spec.moe_intermediate_size))
    return chosen + spec.mixture.n_shared * _gated_elements(spec.moe_intermediate_size) + 2 * spec.n_experts
