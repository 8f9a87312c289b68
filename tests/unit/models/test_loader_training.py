"""Adapters learn on every published format as on its numbers: gradients against autograd, storage against storage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from support.checkpoints_packed import METHODS, build_packed, values_of
from support.decoders import BF16, FP32, hang_adapter, random_adapter, transformers_twin
from support.training import Trainee, autograd, random_batch, relative_error
from tithe.arch import read_checkpoint
from tithe.lora import LoraSpec
from tithe.models.expert_adapter import split_experts
from tithe.models.loader import load_model
from tithe.packing import plan_micro_batches

SPEC = LoraSpec(r=4, alpha=8)
BATCH = random_batch()
(WHOLE,) = plan_micro_batches(BATCH, 10_000)


@pytest.mark.parametrize(
    ("architecture", "method"),
    [
        *(("llama", method) for method in ("int4", "fp8", "nvfp4", "gptq", "awq")),
        ("qwen3_moe", "mxfp4"),
        ("qwen3_moe", "fp8"),
    ],
)
def test_gradients_through_a_packed_base_are_autograds(tmp_path: Path, architecture: str, method: str) -> None:
    """Adapters on every linear, experts included; float32."""
    path = build_packed(tmp_path / "m", architecture, method)
    decoder = load_model(read_checkpoint(path), FP32)
    tensors = random_adapter(decoder, SPEC, seed=5)
    mine = Trainee(decoder, SPEC, tensors).train([WHOLE])
    model = transformers_twin(values_of(path))
    parameters = {name: t.clone().requires_grad_() for name, t in tensors.items()}
    hang_adapter(model, parameters, SPEC)
    theirs = autograd(model, parameters, BATCH, [WHOLE], decoder.n_tokens)
    used = {name for name, gradient in theirs.grads.items() if gradient.any()}
    assert len(used) > len(tensors) / 2
    grads = split_experts(mine.grads)
    assert relative_error({n: grads[n] for n in used}, {n: theirs.grads[n] for n in used}) < 1e-5
    np.testing.assert_allclose(mine.logp, theirs.logp, rtol=3e-6, atol=0)


@pytest.mark.parametrize("method", METHODS)
def test_gradients_do_not_depend_on_the_storage(tmp_path: Path, method: str) -> None:
    """Packed and dequantized, bf16 operands, bit for bit."""
    checkpoint = read_checkpoint(build_packed(tmp_path / "m", "qwen3_moe", method))
    packed, dense = load_model(checkpoint, BF16), load_model(checkpoint, replace(BF16, compute="dequantized"))
    tensors = random_adapter(packed, SPEC, seed=5)
    mine, theirs = (Trainee(d, SPEC, tensors).train([WHOLE]) for d in (packed, dense))
    np.testing.assert_array_equal(mine.logp, theirs.logp)
    assert all(torch.equal(mine.grads[name], theirs.grads[name]) for name in theirs.grads)
