"""The frozen decoder: norms, fused linears, rotary tables, embedding and head, over packed matrices.

The blocks mean what transformers' Llama, Qwen2, Qwen3 and Qwen3-MoE blocks mean (tests compare logits); they are fused
because norm, rotary, attention and MLP in separate operations cost more than the products at decode sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tithe.arch import ArchSpec
from tithe.errors import AdapterError
from tithe.lora import LoraSpec, module_of
from tithe.models.experts import Experts
from tithe.models.linear import Linear, LinearAdapter, build_adapter
from tithe.models.options import ModelOptions
from tithe.quant import PackedMatrix


@dataclass(frozen=True, eq=False)
class Layer:
    """One decoder block. Norms and biases are float32; `experts` replaces gate_up and down in a mixture layer."""

    input_norm: Tensor
    post_norm: Tensor
    qkv: Linear
    o: Linear
    gate_up: Linear | None
    down: Linear | None
    experts: Experts | None = None
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None

    def linears(self) -> dict[str, Linear]:
        """The linears that can carry an adapter, by their place in the block."""
        places = {"qkv": self.qkv, "o": self.o, "gate_up": self.gate_up, "down": self.down}
        return {name: linear for name, linear in places.items() if linear is not None}


@dataclass(frozen=True, eq=False)
class ModelAdapter:
    """One immutable adapter version in kernel layout: per layer, per place, a `LinearAdapter`."""

    layers: tuple[Mapping[str, LinearAdapter], ...]
    widest: int
    """Largest Σr of any fused linear."""
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

    def linears(self) -> Iterator[Linear]:
        """All adaptable linears, layer by layer."""
        for layer in self.layers:
            yield from layer.linears().values()

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Module path → (out, in) of every adaptable linear."""
        return {
            site.module: (site.stop - site.start, linear.columns) for linear in self.linears() for site in linear.sites
        }

    def resident_bytes(self) -> int:
        """Bytes of the unique storages that hold base data."""
        tensors = [t for linear in self.linears() for t in linear.storages()]
        tensors += self.embedding.storages() + self.head.storages() + [self.final_norm]
        for layer in self.layers:
            tensors += [layer.input_norm, layer.post_norm]
            tensors += [t for t in (layer.qkv_bias, layer.o_bias, layer.q_norm, layer.k_norm) if t is not None]
            tensors += [t for t in (layer.gate_up_bias, layer.down_bias) if t is not None]
            tensors += layer.experts.storages() if layer.experts is not None else []
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())

    def build_adapter(self, tensors: Mapping[str, Tensor], spec: LoraSpec) -> ModelAdapter:
        """Kernel layout of an adapter in the published cast; `AdapterError` names tensors that fit no linear."""
        known = self.linear_shapes()
        unknown = sorted({name for name in tensors if module_of(name) not in known})
        if unknown:
            raise AdapterError(f"the adapter has tensors that fit no linear of this model: {', '.join(unknown[:6])}")
        dtype = self.options.operand_dtype
        layers: list[dict[str, LinearAdapter]] = []
        for layer in self.layers:
            built = {name: build_adapter(linear, tensors, spec, dtype) for name, linear in layer.linears().items()}
            layers.append({name: adapter for name, adapter in built.items() if adapter is not None})
        everything = [adapter for layer in layers for adapter in layer.values()]
        if not everything:
            raise AdapterError("the adapter has no tensors for this model; nothing would be learned or served")
        n_bytes = sum(a.a.n_bytes + sum(s.b.n_bytes for s in a.sites) for a in everything)
        return ModelAdapter(tuple(layers), max(a.width for a in everything), n_bytes)

    def embed(self, ids: Tensor, out: Tensor) -> None:
        """out [R, H] float32 ← W̃[ids], int32 ids."""
        out.copy_(self.embedding.gather(ids))


def scratch_floats(spec: ArchSpec, longest: int) -> int:
    """float32 scratch per thread that any forward kernel needs for sequences of `longest` positions."""
    group = spec.n_heads // spec.n_kv_heads
    attention = group * (longest + spec.head_dim)
    return max(attention, spec.hidden_size, spec.intermediate_size, 64)


def padded(positions: int) -> int:
    """Positions rounded up to whole pages."""
    return -(-positions // 16) * 16


__all__ = ["Decoder", "Layer", "ModelAdapter", "padded", "scratch_floats"]
