"""Streams a checkpoint, block by block, into packed matrices: nothing is held twice.

Published formats stay as they are where kernels read them (`tithe.quant.kinds`); the rest is expanded, or quantized
when the options ask for it. Linears that share an input become one matrix when their formats agree, else one each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tithe.arch import ArchSpec, Checkpoint, Shard, checkpoint_base, iter_held
from tithe.errors import ModelError
from tithe.models.attention_kernels import MOST_QUERIES
from tithe.models.decoder import Decoder, Layer
from tithe.models.latent import LatentLayer
from tithe.models.linear import Linear, Site, fuse
from tithe.models.loader_experts import load_experts, vector
from tithe.models.loader_pack import Packer
from tithe.models.loader_rows import Piece, Rows, can_stack
from tithe.models.options import ModelOptions
from tithe.models.rope import rope_tables
from tithe.quant import PackedMatrix


def load_model(checkpoint: Checkpoint, options: ModelOptions, shard: Shard | None = None) -> Decoder:
    """Load a base, or what one rank keeps of it: all but the routed experts of other ranks, whose bytes are not read.

    A rank's `checksum` is empty, because nobody has read all: see `Checkpoint.digests`. Raises `ModelError` for widths
    that cannot be packed, damaged tensors, or contexts beyond the model's.
    """
    spec = checkpoint.spec
    if options.base_dtype == "fp32" and options.compute_dtype == "bf16":
        raise ModelError("model.compute_dtype bf16 would round an fp32 base: set model.base_dtype to bf16")
    _check_widths(spec)
    loader = _Loader(checkpoint, options, shard)
    layers = tuple(loader.layer(i) for i in range(spec.n_layers))
    embedding = loader.matrix("model.embed_tokens", is_linear=False)
    head = embedding if spec.tie_word_embeddings else loader.matrix("lm_head", is_linear=False)
    positions = min(options.max_context, spec.max_position_embeddings)
    cos, sin = rope_tables(spec, checkpoint.config, positions)
    held = iter_held(spec, checkpoint_base(checkpoint), shard or Shard(0, 1))
    return Decoder(
        spec=spec,
        options=options,
        config=checkpoint.config,
        embedding=embedding,
        head=head,
        final_norm=loader.vector("model.norm.weight"),
        layers=layers,
        cos=cos,
        sin=sin,
        n_tokens=checkpoint.padded_vocab.start,
        checksum=checkpoint.checksum() if shard is None or shard.n_ranks == 1 else "",
        file_bytes=sum(tensor.n_bytes for tensor in held),
        base_max_abs_error=loader.packer.max_abs_error,
    )


def _check_widths(spec: ArchSpec) -> None:
    """`ModelError` for attention that the kernels cannot compute."""
    latent = spec.latent
    if latent is not None:
        sizes = {"kv_lora_rank": latent.kv_lora_rank, "qk_rope_head_dim": latent.qk_rope_head_dim}
        for key, width in sizes.items():
            if width % 16:
                raise ModelError(f"{key} {width} is not a multiple of 16, which the attention kernels need")
        for key, width in {"qk_nope_head_dim": latent.qk_nope_head_dim, "v_head_dim": latent.v_head_dim}.items():
            if width % 2:
                raise ModelError(f"{key} {width} is odd, which the products by head cannot read")
        return
    if spec.head_dim % 16:
        raise ModelError(f"head_dim {spec.head_dim} is not a multiple of 16, which the attention kernels need")
    if spec.rotary_dim % 2:
        raise ModelError(f"{spec.rotary_dim} dimensions of a head are rotated, an odd number: change rotary_dim")
    if spec.n_heads // spec.n_kv_heads > MOST_QUERIES:
        raise ModelError(f"{spec.n_heads // spec.n_kv_heads} query heads share a key; at most {MOST_QUERIES} can")


class _Loader:
    def __init__(self, checkpoint: Checkpoint, options: ModelOptions, shard: Shard | None) -> None:
        self.checkpoint, self.shard = checkpoint, shard
        self.packer = Packer(options)

    def vector(self, name: str) -> Tensor:
        """A norm weight or bias as float32."""
        return vector(self.checkpoint, name)

    def optional(self, *names: str) -> Tensor | None:
        """Biases that exist together, concatenated; None when there are none."""
        if names[0] not in self.checkpoint.tensors:
            return None
        return torch.cat([self.vector(name) for name in names])

    def piece(self, module: str) -> Piece:
        """The stored weight of a module."""
        return Piece(self.checkpoint.tensors[f"{module}.weight"])

    def matrix(self, module: str, *, is_linear: bool = True) -> PackedMatrix:
        """The weight of one module."""
        return self.packer.matrix(Rows((self.piece(module),)), is_linear=is_linear)

    def linear(self, *modules: str) -> Linear:
        """A fused linear; one matrix when the formats agree, else one each."""
        pieces = tuple(self.piece(m) for m in modules)
        if not can_stack(pieces):
            return fuse([(m, self.matrix(m)) for m in modules])
        sites, start = [], 0
        for m, piece in zip(modules, pieces, strict=True):
            sites.append(Site(m, start, start + piece.shape[0]))
            start += piece.shape[0]
        return Linear(tuple(sites), (self.packer.matrix(Rows(pieces)),))

    def layer(self, i: int) -> Layer:
        """Decoder block i."""
        spec, p = self.checkpoint.spec, f"model.layers.{i}"
        attention, mlp = f"{p}.self_attn", f"{p}.mlp"
        common: dict[str, Any] = {
            "input_norm": self.vector(f"{p}.input_layernorm.weight"),
            "post_norm": self.vector(f"{p}.post_attention_layernorm.weight"),
            "o": self.linear(f"{attention}.o_proj"),
            "o_bias": self.optional(f"{attention}.o_proj.bias"),
            **(self.latent(attention) if spec.latent is not None else self.grouped(attention)),
        }
        if i in spec.moe_layers:
            experts = load_experts(self.checkpoint, i, self.packer, self.shard)
            return Layer(**common, gate_up=None, down=None, experts=experts)
        return Layer(
            **common,
            gate_up=self.linear(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            down=self.linear(f"{mlp}.down_proj"),
            gate_up_bias=self.optional(f"{mlp}.gate_proj.bias", f"{mlp}.up_proj.bias"),
            down_bias=self.optional(f"{mlp}.down_proj.bias"),
        )

    def grouped(self, attention: str) -> dict[str, Any]:
        """Grouped-query attention's own fields of a layer."""
        return {
            "qkv": self.linear(*(f"{attention}.{n}_proj" for n in "qkv")),
            "qkv_bias": self.optional(*(f"{attention}.{n}_proj.bias" for n in "qkv")),
            "q_norm": self.optional(f"{attention}.q_norm.weight"),
            "k_norm": self.optional(f"{attention}.k_norm.weight"),
            "sinks": self.optional(f"{attention}.sinks"),
        }

    def latent(self, attention: str) -> dict[str, Any]:
        """Latent attention's own fields of a layer. Only projections into bottlenecks have biases."""
        spec = self.checkpoint.spec
        assert spec.latent is not None
        has_bottleneck = spec.latent.q_lora_rank is not None
        first, down = f"{attention}.{'q_a_proj' if has_bottleneck else 'q_proj'}", f"{attention}.kv_a_proj_with_mqa"
        bias = self.optional(f"{down}.bias")
        if bias is not None:
            own = self.optional(f"{first}.bias")
            bias = torch.cat([torch.zeros(spec.q_size) if own is None else own, bias])
        latent = LatentLayer(
            sizes=spec.latent,
            heads=spec.n_heads,
            q_norm=self.vector(f"{attention}.q_a_layernorm.weight") if has_bottleneck else None,
            q_b=self.linear(f"{attention}.q_b_proj") if has_bottleneck else None,
            kv_norm=self.vector(f"{attention}.kv_a_layernorm.weight"),
            kv_b=self.linear(f"{attention}.kv_b_proj"),
        )
        return {"qkv": self.linear(first, down), "qkv_bias": bias, "latent": latent}
