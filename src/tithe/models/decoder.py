"""The frozen decoder: norms, fused linears, rotary tables, embedding and head, over packed matrices.

The blocks mean what transformers' Llama, Qwen2, Qwen3 and Qwen3-MoE blocks mean (tests compare logits); they are fused
because norm, rotary, attention and MLP in separate operations cost more than the products at decode sizes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tithe.arch import ArchSpec
from tithe.errors import AdapterError
from tithe.lora import LoraSpec, module_of
from tithe.models.expert_adapter import EXPERT, ExpertAdapter, stack_experts
from tithe.models.expert_bank import BlockAdapter, ExpertBank, ExpertBlock
from tithe.models.latent import LatentLayer
from tithe.models.latent_kernels import HEAD_CHUNK
from tithe.models.linear import Linear, LinearAdapter, build_adapter
from tithe.models.options import ModelOptions
from tithe.models.rope import score_scale
from tithe.quant import PackedMatrix

EXPERT_NUMBER = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True, eq=False)
class Layer:
    """One decoder block. Norms and biases are float32; `experts` replaces gate_up and down in a mixture layer."""

    input_norm: Tensor
    post_norm: Tensor
    qkv: Linear
    o: Linear
    gate_up: Linear | None
    down: Linear | None
    experts: ExpertBlock | None = None
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    sinks: Tensor | None = None
    latent: LatentLayer | None = None
    """Latent attention; `qkv` then makes query bottleneck (or queries), latent and rotated key."""

    def linears(self) -> dict[str, Linear]:
        """The linears that can carry an adapter, by their place in the block."""
        places = {"qkv": self.qkv, "o": self.o, "gate_up": self.gate_up, "down": self.down}
        if self.latent is not None:
            places |= {"q_b": self.latent.q_b, "kv_b": self.latent.kv_b}
        return {name: linear for name, linear in places.items() if linear is not None}


@dataclass(frozen=True, eq=False)
class ModelAdapter:
    """One immutable adapter version in kernel layout: per layer, per place, a `LinearAdapter`, and what sits on the
    layer's experts."""

    layers: tuple[Mapping[str, LinearAdapter], ...]
    experts: tuple[BlockAdapter | None, ...]
    widest: int
    """Largest Σr of any fused linear; at least 2."""
    n_bytes: int


@dataclass(eq=False)
class Decoder:
    """One frozen base in one physical copy. Everything that computes on it reads these same tensors."""

    spec: ArchSpec
    options: ModelOptions
    config: Mapping[str, Any]
    embedding: PackedMatrix
    head: PackedMatrix
    final_norm: Tensor
    layers: tuple[Layer, ...]
    cos: Tensor
    sin: Tensor
    n_tokens: int
    """Ids below this can be sampled: the tokenizer's size, not the padded rows of the file."""
    checksum: str = ""
    file_bytes: int = 0
    base_max_abs_error: float = 0.0
    """Largest |W̃ − exact value of the file| over all matrices."""

    @property
    def max_context(self) -> int:
        """Positions the rotary tables cover."""
        return self.cos.shape[0]

    @property
    def dense_width(self) -> int:
        """Width of the dense MLPs; 0 where every layer is a mixture."""
        return max((layer.down.columns for layer in self.layers if layer.down is not None), default=0)

    @property
    def score_scale(self) -> float:
        """What scores are multiplied by."""
        return score_scale(self.spec, self.config)

    def window(self, layer: int) -> int:
        """Tokens that a layer sees; 0: all."""
        return self.spec.window.size if layer in self.spec.window.layers else 0

    def linears(self) -> Iterator[Linear]:
        """All adaptable linears, layer by layer."""
        for layer in self.layers:
            yield from layer.linears().values()

    def blocks(self) -> list[ExpertBlock]:
        """The expert blocks of mixture layers, in order."""
        return [layer.experts for layer in self.layers if layer.experts is not None]

    @property
    def n_experts(self) -> int:
        """Routed experts of a mixture layer; 0 in a dense model."""
        return max((block.router.n_experts for block in self.blocks()), default=0)

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Module path → (out, in) of every adaptable linear, experts one by one, those of other ranks too."""
        shapes: dict[str, tuple[int, int]] = {}
        for layer in self.layers:
            for linear in layer.linears().values():
                shapes |= {site.module: (site.stop - site.start, linear.columns) for site in linear.sites}
            block = layer.experts
            for bank in block.banks() if block is not None else ():
                shapes |= _expert_shapes(bank, self.n_experts if bank.sites[0].is_numbered else len(bank))
        return shapes

    def resident_bytes(self) -> int:
        """Bytes of the unique storages that hold base data."""
        tensors = [t for linear in self.linears() for t in linear.storages()]
        tensors += self.embedding.storages() + self.head.storages() + [self.final_norm]
        for layer in self.layers:
            tensors += [layer.input_norm, layer.post_norm]
            tensors += [
                t for t in (layer.qkv_bias, layer.o_bias, layer.q_norm, layer.k_norm, layer.sinks) if t is not None
            ]
            tensors += [t for t in (layer.gate_up_bias, layer.down_bias) if t is not None]
            tensors += layer.experts.storages() if layer.experts is not None else []
            tensors += layer.latent.storages() if layer.latent is not None else []
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())

    def build_adapter(self, tensors: Mapping[str, Tensor], spec: LoraSpec) -> ModelAdapter:
        """Kernel layout of an adapter in the published cast; `AdapterError` names tensors that fit no linear.

        Experts may come one by one, as published, or stacked, as trained.
        """
        tensors = stack_experts(tensors, share=True)
        known = {EXPERT_NUMBER.sub(".experts.", module) for module in self.linear_shapes()}
        unknown = sorted({name for name in tensors if _unnumbered(module_of(name)) not in known})
        if unknown:
            raise AdapterError(f"the adapter has tensors that fit no linear of this model: {', '.join(unknown[:6])}")
        dtype = self.options.operand_dtype
        layers: list[dict[str, LinearAdapter]] = []
        for layer in self.layers:
            built = {name: build_adapter(linear, tensors, spec, dtype) for name, linear in layer.linears().items()}
            layers.append({name: adapter for name, adapter in built.items() if adapter is not None})
        blocks = tuple(_block_adapter(layer.experts, tensors, spec, dtype) for layer in self.layers)
        everything = [adapter for layer in layers for adapter in layer.values()]
        on_experts = [part for block in blocks if block is not None for part in block.parts()]
        if not everything and not on_experts:
            raise AdapterError("the adapter has no tensors for this model; nothing would be learned or served")
        n_bytes = sum(a.a.n_bytes + sum(s.b.n_bytes for s in a.sites) for a in everything)
        n_bytes += sum(part.n_bytes for part in on_experts)
        return ModelAdapter(tuple(layers), blocks, max((a.width for a in everything), default=2), n_bytes)

    def embed(self, ids: Tensor, out: Tensor) -> None:
        """out [R, H] float32 ← W̃[ids], int32 ids."""
        out.copy_(self.embedding.gather(ids))


def _expert_shapes(bank: ExpertBank, experts: int) -> dict[str, tuple[int, int]]:
    columns = {"gate_up": bank.hidden, "down": bank.width}
    return {
        module: (site.stop - site.start, columns[site.place]) for site in bank.sites for module in site.modules(experts)
    }


def _unnumbered(module: str | None) -> str | None:
    """A path in which experts are not told apart, whether numbered, stacked or shared."""
    return None if module is None else EXPERT_NUMBER.sub(".experts.", module).replace(f".{EXPERT}.", ".")


def _block_adapter(
    block: ExpertBlock | None, tensors: Mapping[str, Tensor], spec: LoraSpec, dtype: torch.dtype
) -> BlockAdapter | None:
    """The adapter on one block; None when none of its experts is adapted."""
    if block is None:
        return None
    built: list[ExpertAdapter | None] = [
        None if bank is None else ExpertAdapter.build(bank.sites, len(bank), tensors, spec, dtype, bank.first)
        for bank in (block.routed, block.shared)
    ]
    return BlockAdapter(*built) if any(part is not None for part in built) else None


def scratch_floats(spec: ArchSpec, longest: int) -> int:
    """float32 scratch per thread that any forward kernel needs for sequences of `longest` positions."""
    if spec.latent is not None:
        latent, width, heads = spec.latent.kv_lora_rank, spec.latent.cached_per_token, min(HEAD_CHUNK, spec.n_heads)
        attention = max(heads * (longest + latent) + 16 * width, spec.q_size + width)
    else:
        attention = spec.n_heads // spec.n_kv_heads * (longest + spec.head_dim)
    return max(attention, spec.hidden_size, spec.intermediate_size, 64)


def padded(positions: int) -> int:
    """Positions rounded up to whole pages."""
    return -(-positions // 16) * 16


__all__ = ["Decoder", "Layer", "ModelAdapter", "padded", "scratch_floats"]
