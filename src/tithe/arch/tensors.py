"""From sizes to tensors: canonical names, shapes, groups, one family at a time.

Canonical names and shapes are those of the *published checkpoint*, not those of transformers' modules in memory:
transformers 5 fuses a layer's experts into 3-D parameters (``mlp.experts.gate_up_proj`` [E, 2·I, H]) and renames some
modules while it loads (`conversion_mapping.py`), but what lies on the hub keeps one matrix for every expert:

    deepseek_v3, kimi_k2, glm4_moe, qwen3_moe   mlp.experts.{e}.gate_proj|up_proj|down_proj.weight    [out, in]
    mixtral, minimax_m2                         block_sparse_moe.experts.{e}.w1|w3|w2.weight          [out, in]
    gpt_oss                                     mlp.experts.gate_up_proj [E, in, 2·out] (rows 0, 2, … gate, 1, 3, … up),
                                                mlp.experts.down_proj [E, in, out], biases [E, …]

gpt-oss is stacked on the hub too. Its MXFP4 files hold (E, out, in) in blocks along `in`, so `TensorFamily.matrix` is
what a storage format is asked about, `TensorFamily.shape` what an unquantized file holds.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from tithe.arch.described import OtherAttention
from tithe.arch.formats import TensorFormat
from tithe.arch.spec import ArchSpec

LAYER: Final = "{layer}"
EXPERT: Final = "{expert}"
_MIXTRAL_NAMES: Final = frozenset({"mixtral", "minimax_m2"})


class TensorGroup(enum.StrEnum):
    """What a tensor is for; the rows of every byte account."""

    EMBEDDING = "embedding"
    HEAD = "head"
    ATTENTION = "attention"
    DENSE_MLP = "dense_mlp"
    SHARED_EXPERT = "shared_expert"
    ROUTED_EXPERTS = "routed_experts"
    ROUTER = "router"
    NORMS = "norms"


@dataclass(frozen=True)
class TensorFamily:
    """Tensors that differ only in their layer and expert.

    Example: all gate matrices of Kimi-K2's routed experts are one family: ``name``
    "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight", ``shape`` (2048, 7168), 60 ``layers``, 384 experts.
    """

    name: str
    """With `LAYER` and `EXPERT` in place of numbers."""
    shape: tuple[int, ...]
    """Of one tensor in an unquantized checkpoint."""
    group: TensorGroup
    layers: tuple[int, ...] = ()
    """Layers that have it; empty for tensors of the whole model."""
    n_experts: int = 0
    """Experts of a layer: one tensor each, or slices along the first dimension when `is_stacked`."""
    is_stacked: bool = False
    is_linear: bool = False
    """True for a matrix that activations are multiplied by, the only kind that quantization packs; no router."""
    is_transposed: bool = False
    """True when the unquantized file has (…, in, out)."""
    format: TensorFormat = TensorFormat.BF16
    """What an unquantized checkpoint keeps it in."""

    @property
    def matrix(self) -> tuple[int, ...]:
        """The logical shape (…, out, in) that storage formats are about."""
        return (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.is_transposed else self.shape

    @property
    def one_expert(self) -> tuple[int, ...]:
        """Logical shape of one expert's share; `matrix` when experts have tensors of their own, or there are none."""
        return self.matrix[1:] if self.is_stacked else self.matrix

    @property
    def is_per_expert(self) -> bool:
        """True when every expert has a tensor of its own."""
        return self.n_experts > 0 and not self.is_stacked

    @property
    def tensors_per_layer(self) -> int:
        """Tensors that one layer (or the model, when there are no layers) has."""
        return self.n_experts if self.is_per_expert else 1

    @property
    def n_tensors(self) -> int:
        """Tensors in the whole model."""
        return self.tensors_per_layer * (len(self.layers) or 1)

    @property
    def n_parameters(self) -> int:
        """Elements in the whole model."""
        return math.prod(self.shape) * self.n_tensors

    def member(self, layer: int | None = None, expert: int | None = None) -> Tensor:
        """One tensor of the family."""
        name = self.name if layer is None else self.name.replace(LAYER, str(layer))
        return Tensor(name if expert is None else name.replace(EXPERT, str(expert)), self, layer, expert)


class Tensor(NamedTuple):
    """One tensor of a model: `expert` is its number, or `None` for what is no expert's own."""

    name: str
    family: TensorFamily
    layer: int | None
    expert: int | None

    @property
    def module(self) -> str:
        """The name that ignore lists of quantized checkpoints are about."""
        return self.name.removesuffix(".weight").removesuffix(".bias")


def tensor_families(spec: ArchSpec) -> tuple[TensorFamily, ...]:
    """Every family of a complete checkpoint, in canonical order. A tied head is not listed."""
    hidden, vocab = spec.hidden_size, spec.vocab_size
    dense = tuple(sorted(set(range(spec.n_layers)).difference(spec.moe_layers)))
    every, own = tuple(range(spec.n_layers)), spec.own_attention
    families = [
        TensorFamily("model.embed_tokens.weight", (vocab, hidden), TensorGroup.EMBEDDING),
        _norm("input_layernorm", hidden, every),
        *(_latent_attention(spec, own) if spec.latent else _attention(spec, own)),
        *(family for other in spec.others for family in _other_attention(other)),
        *(_mlp(spec, "mlp", spec.intermediate_size, TensorGroup.DENSE_MLP, dense) if dense else ()),
        *(_experts(spec) if spec.is_moe else ()),
        *_qk_norms(spec, own),
        _norm("post_attention_layernorm", hidden, every),
        *(_router(spec) if spec.is_moe else ()),
        TensorFamily("model.norm.weight", (hidden,), TensorGroup.NORMS),
    ]
    if not spec.tie_word_embeddings:
        families.append(TensorFamily("lm_head.weight", (vocab, hidden), TensorGroup.HEAD, is_linear=True))
    return tuple(families)


def iter_tensors(spec: ArchSpec) -> Iterator[Tensor]:
    """Every tensor in canonical order, one by one: an untrusted config may claim more than fit in memory."""
    families = tensor_families(spec)
    inside = [(family, frozenset(family.layers)) for family in families if family.layers]
    yield families[0].member()
    for layer in range(spec.n_layers):
        yield from _iter_layer([family for family, layers in inside if layer in layers], layer)
    yield from (family.member() for family in families[1:] if not family.layers)


def _iter_layer(families: list[TensorFamily], layer: int) -> Iterator[Tensor]:
    """One layer's tensors; those of one expert stand together."""
    for is_per_expert, run in itertools.groupby(families, key=lambda family: family.is_per_expert):
        members = list(run)
        if not is_per_expert:
            yield from (family.member(layer) for family in members)
            continue
        for expert in range(members[0].n_experts):
            yield from (family.member(layer, expert) for family in members)


def iter_tensor_shapes(spec: ArchSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and unquantized shape of every tensor, in canonical order."""
    return ((tensor.name, tensor.family.shape) for tensor in iter_tensors(spec))


def tensor_shapes(spec: ArchSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor a complete checkpoint of this architecture has, by canonical name. A tied head is not listed."""
    return dict(iter_tensor_shapes(spec))


def linear_shapes(spec: ArchSpec) -> dict[str, tuple[int, int]]:
    """(out, in) of every linear of the decoder layers by module name, in layer order; what LoRA can target.

    Experts are listed one by one; the router and the head are no targets and are left out, and so are experts that
    lie stacked in one tensor (gpt-oss).
    """
    return {
        tensor.module: (tensor.family.matrix[0], tensor.family.matrix[1])
        for tensor in iter_tensors(spec)
        if tensor.layer is not None and tensor.family.is_linear and not tensor.family.is_stacked
    }


def kv_bytes_per_token(spec: ArchSpec, bytes_per_element: int) -> int:
    """Bytes of keys and values that one token keeps in the cache, over all layers.

    28 layers, 2 KV heads of size 128 in BF16 take 2 · 28 · 2 · 128 · 2 = 28672 bytes. Latent attention keeps the
    latent and one rotated key: Kimi-K2 takes 61 · (512 + 64) · 2 = 70272. A layer with a sliding window keeps as much
    for each token: it reads only its window, but a page holds all layers.
    """
    per_layer = spec.latent.cached_per_token if spec.latent else 2 * spec.kv_size
    elements = len(spec.own_attention) * per_layer
    elements += sum(len(other.layers) * other.cached_per_token for other in spec.others)
    return elements * bytes_per_element


def sequence_bytes(spec: ArchSpec, n_tokens: int, bytes_per_element: int, *, is_windowed: bool = False) -> int:
    """Bytes that one sequence of `n_tokens` keeps: keys and values, an indexer's keys, and states of linear attention.

    `is_windowed`: layers with a sliding window keep that many tokens and no more, as engines with a cache for each kind
    of layer do; Tithe's own pages hold all layers.
    """
    n_bytes = n_tokens * kv_bytes_per_token(spec, bytes_per_element)
    if is_windowed:
        per_layer = 2 * spec.kv_size * bytes_per_element
        n_bytes -= len(spec.window.layers) * per_layer * max(0, n_tokens - (spec.window.size or n_tokens))
        for other in spec.others:
            beyond = max(0, n_tokens - (other.window or n_tokens))
            n_bytes -= len(other.layers) * other.cached_per_token * bytes_per_element * beyond
    for other in spec.others:
        n_bytes += len(other.layers) * (n_tokens * other.index_bytes_per_token + 4 * other.state_elements)
    return n_bytes


def attended_bytes(spec: ArchSpec, n_tokens: int, bytes_per_element: int) -> int:
    """Bytes of the cache that the next token of a sequence of `n_tokens` reads, however much its pages hold.

    Layers with a window read no more than it, layers with an indexer the tokens that it picks beside all of its keys,
    linear attention its state.
    """
    n_bytes = sequence_bytes(spec, n_tokens, bytes_per_element, is_windowed=True)
    per_layer = spec.latent.cached_per_token if spec.latent else 2 * spec.kv_size
    for other in spec.others:
        unread = max(0, n_tokens - (other.picked or n_tokens))
        n_bytes -= len(other.layers) * per_layer * bytes_per_element * unread
    return n_bytes


def _norm(module: str, width: int, layers: tuple[int, ...]) -> TensorFamily:
    return TensorFamily(f"model.layers.{LAYER}.{module}.weight", (width,), TensorGroup.NORMS, layers)


def _linear(
    module: str,
    shape: tuple[int, int],
    group: TensorGroup,
    layers: tuple[int, ...],
    *,
    has_bias: bool = False,
    n_experts: int = 0,
) -> list[TensorFamily]:
    """A linear's weight [out, in], and its bias when it has one."""
    name = f"model.layers.{LAYER}.{module}"
    weight = TensorFamily(f"{name}.weight", shape, group, layers, n_experts, is_linear=True)
    return [weight, TensorFamily(f"{name}.bias", shape[:1], group, layers)] if has_bias else [weight]


def _attention(spec: ArchSpec, layers: tuple[int, ...]) -> list[TensorFamily]:
    """Grouped-query attention."""
    families: list[TensorFamily] = []
    for part, out, width, has_bias in (
        ("q", spec.q_size, spec.hidden_size, spec.qkv_bias),
        ("k", spec.kv_size, spec.hidden_size, spec.qkv_bias),
        ("v", spec.kv_size, spec.hidden_size, spec.qkv_bias),
        ("o", spec.hidden_size, spec.q_size, spec.o_bias),
    ):
        families += _linear(f"self_attn.{part}_proj", (out, width), TensorGroup.ATTENTION, layers, has_bias=has_bias)
    if spec.has_sinks:
        name = f"model.layers.{LAYER}.self_attn.sinks"
        families.append(TensorFamily(name, (spec.n_heads,), TensorGroup.ATTENTION, layers))
    return families


def _latent_attention(spec: ArchSpec, layers: tuple[int, ...]) -> list[TensorFamily]:
    """DeepSeek-V3's attention; without a query bottleneck it has `q_proj` instead of `q_a_proj` and `q_b_proj`."""
    latent = spec.latent
    assert latent is not None
    hidden, heads, group = spec.hidden_size, spec.n_heads, TensorGroup.ATTENTION
    families: list[TensorFamily] = []
    if latent.q_lora_rank is None:
        families += _linear("self_attn.q_proj", (spec.q_size, hidden), group, layers)
    else:
        rank = latent.q_lora_rank
        families += _linear("self_attn.q_a_proj", (rank, hidden), group, layers, has_bias=spec.qkv_bias)
        families.append(_norm("self_attn.q_a_layernorm", rank, layers))
        families += _linear("self_attn.q_b_proj", (spec.q_size, rank), group, layers)
    down = (latent.kv_lora_rank + latent.qk_rope_head_dim, hidden)
    up = (heads * (latent.qk_nope_head_dim + latent.v_head_dim), latent.kv_lora_rank)
    families += _linear("self_attn.kv_a_proj_with_mqa", down, group, layers, has_bias=spec.qkv_bias)
    families.append(_norm("self_attn.kv_a_layernorm", latent.kv_lora_rank, layers))
    families += _linear("self_attn.kv_b_proj", up, group, layers)
    out = (hidden, heads * latent.v_head_dim)
    return families + _linear("self_attn.o_proj", out, group, layers, has_bias=spec.o_bias)


def _other_attention(other: OtherAttention) -> list[TensorFamily]:
    families = [
        family
        for module, out, width in other.linears
        for family in _linear(f"self_attn.{module}", (out, width), TensorGroup.ATTENTION, other.layers)
    ]
    for module, shape in other.vectors:
        name = f"model.layers.{LAYER}.self_attn.{module}"
        families.append(TensorFamily(name, shape, TensorGroup.ATTENTION, other.layers))
    return families


def _qk_norms(spec: ArchSpec, layers: tuple[int, ...]) -> list[TensorFamily]:
    if spec.norms_qk == "none":
        return []
    widths = (spec.q_size, spec.kv_size) if spec.norms_qk == "full" else (spec.head_dim, spec.head_dim)
    return [_norm(f"self_attn.{part}_norm", width, layers) for part, width in zip("qk", widths, strict=True)]


def _mlp(spec: ArchSpec, module: str, width: int, group: TensorGroup, layers: tuple[int, ...]) -> list[TensorFamily]:
    """Gate, up and down of one MLP."""
    hidden, has_bias = spec.hidden_size, spec.mlp_bias
    return [
        *_linear(f"{module}.gate_proj", (width, hidden), group, layers, has_bias=has_bias),
        *_linear(f"{module}.up_proj", (width, hidden), group, layers, has_bias=has_bias),
        *_linear(f"{module}.down_proj", (hidden, width), group, layers, has_bias=has_bias),
    ]


def _experts(spec: ArchSpec) -> list[TensorFamily]:
    """Routed experts, then the shared one."""
    if spec.architecture == "gpt_oss":
        return _stacked_experts(spec)
    width, group = spec.moe_intermediate_size, TensorGroup.ROUTED_EXPERTS
    hidden = spec.mixture.latent_size or spec.hidden_size
    families: list[TensorFamily] = []
    if spec.mixture.latent_size:
        for part, shape in (("down", (hidden, spec.hidden_size)), ("up", (spec.hidden_size, hidden))):
            families += _linear(f"mlp.latent_{part}_proj", shape, TensorGroup.SHARED_EXPERT, spec.moe_layers)
    for part, shape in zip(_expert_parts(spec), ((width, hidden), (width, hidden), (hidden, width)), strict=True):
        module = f"{_block(spec)}.experts.{EXPERT}.{part}"
        families += _linear(module, shape, group, spec.moe_layers, n_experts=spec.n_experts)
    shared = spec.mixture.n_shared * width
    if shared:
        families += _mlp(spec, "mlp.shared_experts", shared, TensorGroup.SHARED_EXPERT, spec.moe_layers)
    return families


def _stacked_experts(spec: ArchSpec) -> list[TensorFamily]:
    """gpt-oss: gate and up interleaved in one transposed tensor, with biases."""
    experts, hidden, width = spec.n_experts, spec.hidden_size, spec.moe_intermediate_size
    families: list[TensorFamily] = []
    for part, size_in, size_out in (("gate_up_proj", hidden, 2 * width), ("down_proj", width, hidden)):
        name = f"model.layers.{LAYER}.mlp.experts.{part}"
        group, layers = TensorGroup.ROUTED_EXPERTS, spec.moe_layers
        weight = TensorFamily(
            name, (experts, size_in, size_out), group, layers, experts, is_stacked=True, is_linear=True,
            is_transposed=True,
        )  # fmt: skip
        bias = TensorFamily(f"{name}_bias", (experts, size_out), group, layers, experts, is_stacked=True)
        families += [weight, bias]
    return families


def _router(spec: ArchSpec) -> list[TensorFamily]:
    """The router's matrix [E, H], and the bias that its kind has."""
    block, experts, layers = _block(spec), spec.n_experts, spec.moe_layers
    gate = f"model.layers.{LAYER}.{block}.{'router' if spec.architecture == 'gpt_oss' else 'gate'}"
    families = [TensorFamily(f"{gate}.weight", (experts, spec.hidden_size), TensorGroup.ROUTER, layers)]
    if spec.mixture.has_shared_gate:
        name = f"model.layers.{LAYER}.mlp.shared_expert_gate.weight"
        families.append(TensorFamily(name, (1, spec.hidden_size), TensorGroup.ROUTER, layers))
    if spec.architecture == "gpt_oss":
        families.append(TensorFamily(f"{gate}.bias", (experts,), TensorGroup.ROUTER, layers))
    if spec.routing.has_correction_bias:
        owner = f"model.layers.{LAYER}.{block}" if spec.architecture == "minimax_m2" else gate
        name = f"{owner}.e_score_correction_bias"
        families.append(TensorFamily(name, (experts,), TensorGroup.ROUTER, layers, format=TensorFormat.F32))
    return families


def _block(spec: ArchSpec) -> str:
    return "block_sparse_moe" if spec.architecture in _MIXTRAL_NAMES else "mlp"


def _expert_parts(spec: ArchSpec) -> tuple[str, str, str]:
    """Names of gate, up and down."""
    return ("w1", "w3", "w2") if spec.architecture in _MIXTRAL_NAMES else ("gate_proj", "up_proj", "down_proj")
