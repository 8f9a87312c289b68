"""Streams a checkpoint, tensor by tensor, into packed matrices: nothing is held twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tithe.arch import Checkpoint, TensorEntry, TensorFormat, base_bytes
from tithe.errors import ModelError
from tithe.models.decoder import Decoder, Layer
from tithe.models.expert_adapter import EXPERT, expert_sites
from tithe.models.expert_bank import ExpertBank, ExpertBlock
from tithe.models.linear import Linear, Site, fuse
from tithe.models.options import ModelOptions
from tithe.models.rope import rope_tables
from tithe.models.routing import Router
from tithe.quant import PackedMatrix, pack_dense, pack_int4, pack_int8
from tithe.quant.grouped import GroupTable
from tithe.quant.reference import dequantize, quantize_int4, quantize_int8
from tithe.quant.repack import REPACKED, repack


def load_model(checkpoint: Checkpoint, options: ModelOptions) -> Decoder:
    """Load a base. Raises `ModelError` for widths that cannot be packed or contexts beyond the model's."""
    spec = checkpoint.spec
    if options.base_dtype == "fp32" and options.compute_dtype == "bf16":
        raise ModelError("model.compute_dtype bf16 would round an fp32 base: set model.base_dtype to bf16")
    if spec.head_dim % 16:
        raise ModelError(f"head_dim {spec.head_dim} is not a multiple of 16, which the attention kernels need")
    loader = _Loader(checkpoint, options)
    layers = tuple(loader.layer(i) for i in range(spec.n_layers))
    embedding = loader.matrix("model.embed_tokens")
    head = embedding if spec.tie_word_embeddings else loader.matrix("lm_head")
    positions = min(options.max_context, spec.max_position_embeddings)
    cos, sin = rope_tables(spec, checkpoint.config, positions)
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
        checksum=checkpoint.checksum(),
        file_bytes=base_bytes(checkpoint),
        base_max_abs_error=loader.max_abs_error,
    )


class _Loader:
    def __init__(self, checkpoint: Checkpoint, options: ModelOptions) -> None:
        self.checkpoint, self.options = checkpoint, options
        self.max_abs_error = 0.0

    def vector(self, name: str) -> Tensor:
        """A norm weight or bias as float32."""
        entry = self.checkpoint.tensors[name]
        return torch.from_numpy(dequantize(entry.read(), entry.format).reshape(-1).copy())

    def optional(self, *names: str) -> Tensor | None:
        """Biases that exist together, concatenated; None when there are none."""
        if names[0] not in self.checkpoint.tensors:
            return None
        return torch.cat([self.vector(name) for name in names])

    def matrix(self, *modules: str) -> PackedMatrix:
        """One matrix of the stacked weights of modules that share a format."""
        entries = [self.checkpoint.tensors[f"{m}.weight"] for m in modules]
        packed = self._pack(entries, is_linear=modules[0] not in ("model.embed_tokens", "lm_head"))
        return packed.dequantized() if self.options.compute == "dequantized" else packed

    def linear(self, *modules: str) -> Linear:
        """A fused linear; one matrix when the formats agree, else one each."""
        formats = {self.checkpoint.tensors[f"{m}.weight"].format for m in modules}
        if len(formats) > 1:
            return fuse([(m, self.matrix(m)) for m in modules])
        sites, start = [], 0
        for m in modules:
            rows = self.checkpoint.tensors[f"{m}.weight"].shape[0]
            sites.append(Site(m, start, start + rows))
            start += rows
        return Linear(tuple(sites), (self.matrix(*modules),))

    def layer(self, i: int) -> Layer:
        """Decoder block i."""
        spec, p = self.checkpoint.spec, f"model.layers.{i}"
        attention, mlp = f"{p}.self_attn", f"{p}.mlp"
        common: dict[str, Any] = {
            "input_norm": self.vector(f"{p}.input_layernorm.weight"),
            "post_norm": self.vector(f"{p}.post_attention_layernorm.weight"),
            "qkv": self.linear(*(f"{attention}.{n}_proj" for n in "qkv")),
            "o": self.linear(f"{attention}.o_proj"),
            "qkv_bias": self.optional(*(f"{attention}.{n}_proj.bias" for n in "qkv")),
            "o_bias": self.optional(f"{attention}.o_proj.bias"),
            "q_norm": self.optional(f"{attention}.q_norm.weight"),
            "k_norm": self.optional(f"{attention}.k_norm.weight"),
        }
        if i in spec.moe_layers:
            return Layer(**common, gate_up=None, down=None, experts=self.experts(mlp))
        return Layer(
            **common,
            gate_up=self.linear(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            down=self.linear(f"{mlp}.down_proj"),
            gate_up_bias=self.optional(f"{mlp}.gate_proj.bias", f"{mlp}.up_proj.bias"),
            down_bias=self.optional(f"{mlp}.down_proj.bias"),
        )

    def experts(self, mlp: str) -> ExpertBlock:
        """The expert block of a mixture layer."""
        spec = self.checkpoint.spec
        each = [f"{mlp}.experts.{e}" for e in range(spec.n_experts)]
        gate_up = [self.matrix(f"{e}.gate_proj", f"{e}.up_proj") for e in each]
        down = [self.matrix(f"{e}.down_proj") for e in each]
        sites = expert_sites(f"{mlp}.experts.{EXPERT}", down[0].columns, spec.hidden_size)
        bank = ExpertBank(GroupTable.of_matrices(gate_up), GroupTable.of_matrices(down), sites)
        return ExpertBlock(Router.of(spec), self.matrix(f"{mlp}.gate"), bank)

    def _pack(self, entries: Sequence[TensorEntry], *, is_linear: bool) -> PackedMatrix:
        kind, rounded, columns = entries[0].format, self.options.rounded, entries[0].shape[1]
        raw = [e.read() for e in entries]
        rows = np.concatenate(raw) if len(raw) > 1 else raw[0]
        if kind in REPACKED:
            packed = repack(rows, kind, rounded=rounded)
            self._note_error(packed, rows, kind)
            return packed
        exact = dequantize(rows, kind)
        wanted = self.options.quantize if is_linear else "none"
        if wanted == "none":
            packed = pack_dense(torch.from_numpy(np.ascontiguousarray(exact)), rounded=rounded)
        elif columns % 32:
            raise ModelError(
                f"{entries[0].name}: {columns} columns are no whole groups of 32; set model.quantize: none"
            )
        elif wanted == "int4":
            g = quantize_int4(exact)
            assert g.zero is not None
            packed = pack_int4(g.q, g.scale, g.zero, rounded=rounded)
        else:
            g = quantize_int8(exact)
            packed = pack_int8(g.q, g.scale, rounded=rounded)
        self._note_error(packed, rows, kind)
        return packed

    def _note_error(self, packed: PackedMatrix, raw: np.ndarray, kind: TensorFormat) -> None:
        """Keep max |W̃ − file|. Rounding is relative, so a bound from the largest scale lets most matrices be
        skipped."""
        if packed.scale is not None:
            zero = 0.0 if packed.zero is None else float(packed.zero.abs().max())
            largest = float(packed.scale.abs().max()) * (15 if packed.zero is not None else 128) + zero
            bound = largest * 2.0**-8 if packed.rounded else largest * 2.0**-23
            if kind.is_quantized and bound <= self.max_abs_error:
                return
        values = dequantize(raw, kind)
        difference = np.abs(packed.expand(torch.float32).numpy() - values)
        self.max_abs_error = max(self.max_abs_error, float(difference.max()))
