"""Tiny decoders for tests: loaded from random checkpoints, walked row by row, set beside transformers.

decoder = tiny_decoder(tmp_path / "m", "qwen3", FP32)
walk = Walk(decoder)
x = walk.prefill(0, ids)            # residual rows [n, H] of sequence 0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from support.checkpoints import build_hf
from tithe.arch import read_checkpoint
from tithe.lora import LoraSpec, init_tensors, tensor_names
from tithe.models.decoder import Decoder, ModelAdapter
from tithe.models.forward import ForwardPlan
from tithe.models.head import Head
from tithe.models.kv import PAGE, KVPages
from tithe.models.loader import load_model
from tithe.models.options import ModelOptions

FP32 = ModelOptions(base_dtype="fp32", compute_dtype="fp32")
BF16 = ModelOptions()
WIDE = ModelOptions(compute_dtype="fp32")
"""A bf16 base under float32 operands."""


def tiny_decoder(path: Path, architecture: str = "llama", options: ModelOptions = BF16, **build: Any) -> Decoder:
    """Write a random Hugging Face directory (see `build_hf`) and load it."""
    return load_model(read_checkpoint(build_hf(path, architecture, **build)), options)


def random_ids(n: int, seed: int = 0, *, vocabulary: int = 100) -> np.ndarray:
    """n token ids (int32) that are no control tokens."""
    return np.random.default_rng(seed).integers(4, vocabulary, n).astype(np.int32)


def random_adapter(decoder: Decoder, spec: LoraSpec, seed: int = 0, size: float = 0.05) -> dict[str, Tensor]:
    """Adapter tensors whose B is not zero, so that they change something."""
    tensors = init_tensors(spec, decoder.linear_shapes(), seed)
    generator = torch.Generator().manual_seed(seed + 1)
    return {
        name: t if name.endswith("lora_A.weight") else torch.randn(t.shape, generator=generator) * size
        for name, t in tensors.items()
    }


class Walk:
    """A `ForwardPlan` over pages of its own. Sequence s has its own pages unless `table` is written."""

    def __init__(self, decoder: Decoder, *, sequences: int = 8, positions: int = 64, rows: int = 160) -> None:
        self.decoder = decoder
        self.per_sequence = -(-positions // PAGE)
        self.pages = KVPages(decoder.spec, sequences * self.per_sequence, decoder.options.operand_dtype)
        self.plan = ForwardPlan(decoder, self.pages, max_rows=rows, sequences=sequences, max_positions=positions)
        self.head = Head(decoder)
        order = torch.randperm(sequences * self.per_sequence, generator=torch.Generator().manual_seed(0))
        self.table = self.plan.buffers.table
        self.table[:] = order.reshape(sequences, -1)

    def run(
        self,
        rows: Sequence[tuple[int, int, int]],
        segments: Sequence[tuple[int, int, ModelAdapter | None]] | None = None,
    ) -> Tensor:
        """Residual rows [n, H] (a copy) of (sequence, position, token) rows."""
        n = len(rows)
        columns = torch.tensor(rows, dtype=torch.int32).reshape(n, 3)
        b = self.plan.buffers
        b.sequence[:n], b.position[:n] = columns[:, 0], columns[:, 1]
        return self.plan.run(columns[:, 2].contiguous(), segments or [(0, n, None)]).clone()

    def prefill(
        self, sequence: int, ids: Sequence[int] | np.ndarray, first: int = 0, adapter: ModelAdapter | None = None
    ) -> Tensor:
        """Residual rows of tokens at positions first, first + 1, …"""
        rows = [(sequence, first + i, int(token)) for i, token in enumerate(ids)]
        return self.run(rows, [(0, len(rows), adapter)])

    def logits(self, x: Tensor) -> Tensor:
        """float32 [n, V] (a copy) of residual rows."""
        return self.head.logits(self.head.normed(x)).clone()


def transformers_twin(path: Path, **options: Any) -> Any:
    """transformers' own model of a checkpoint in float32 with eager attention, frozen."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", **options
    ).eval()
    return model.requires_grad_(requires_grad=False)


def hang_adapter(model: Any, tensors: Mapping[str, Tensor], spec: LoraSpec) -> None:
    """Make a transformers model compute y + scale·(x·Aᵀ)·Bᵀ in every linear that `tensors` name."""

    def hang(linear: Any, a: Tensor, b: Tensor, scale: float) -> None:
        def forward(x: Tensor) -> Tensor:
            return torch.nn.functional.linear(x, linear.weight, linear.bias) + scale * (x @ a.T) @ b.T

        linear.forward = forward

    for module, linear in model.named_modules():
        name_a, name_b = tensor_names(module)
        if name_a in tensors:
            hang(linear, tensors[name_a], tensors[name_b], spec.scale(module))
        elif tensor_names(f"{module}.0.down_proj")[0] in tensors or tensor_names(f"{module}.0.up_proj")[0] in tensors:
            _merge_into_experts(linear, module, tensors, spec)


def _merge_into_experts(experts: Any, module: str, tensors: Mapping[str, Tensor], spec: LoraSpec) -> None:
    """transformers keeps a layer's experts in 3-D parameters: add scale·B·A to them, so that gradients flow."""

    def delta(expert: int, part: str, like: Tensor) -> Tensor:
        path = f"{module}.{expert}.{part}"
        name_a, name_b = tensor_names(path)
        return spec.scale(path) * tensors[name_b] @ tensors[name_a] if name_a in tensors else torch.zeros_like(like)

    gate_up, down = experts.gate_up_proj.detach(), experts.down_proj.detach()
    half = gate_up.shape[1] // 2
    count = range(len(down))
    parts = [torch.cat([delta(e, n, gate_up[0, :half]) for n in ("gate_proj", "up_proj")]) for e in count]
    del experts.gate_up_proj, experts.down_proj
    experts.gate_up_proj = gate_up + torch.stack(parts)
    experts.down_proj = down + torch.stack([delta(e, "down_proj", down[0]) for e in count])
