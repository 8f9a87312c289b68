"""Whole tiny models of the architectures of large open models: transformers' logits and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.decoders import (
    BF16,
    FP32,
    Walk,
    hang_adapter,
    random_adapter,
    random_ids,
    tiny_decoder,
    transformers_twin,
)
from support.training import Trainee, autograd, random_batch, relative_error
from tithe.lora import LoraSpec
from tithe.models.decoder import Decoder
from tithe.packing import plan_micro_batches

YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 16, "rope_theta": 10_000.0}
GPT_OSS_YARN = YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
DEEPSEEK_YARN = YARN | {"mscale": 0.707, "mscale_all_dim": 1.0}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 2}),
    ("qwen3", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 17}),
    ("mixtral", {}),
    ("mixtral", {"sliding_window": 16, "num_key_value_heads": 1}),
    ("glm4_moe", {}),
    ("glm4_moe", {"use_qk_norm": False, "attention_bias": False, "partial_rotary_factor": 0.25}),
    ("gpt_oss", {"rope_parameters": GPT_OSS_YARN}),
    ("gpt_oss", {"rope_parameters": GPT_OSS_YARN, "sliding_window": 33, "attention_bias": False}),
    ("minimax_m2", {}),
    ("minimax_m2", {"rotary_dim": 32, "num_attention_heads": 6}),
    ("deepseek_v3", {"rope_parameters": DEEPSEEK_YARN}),
    ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True}),
    ("deepseek_v3", {"q_lora_rank": 24, "rope_interleave": False, "num_attention_heads": 6, "num_key_value_heads": 6}),
    ("deepseek_v3", {"v_head_dim": 24, "qk_nope_head_dim": 40, "attention_bias": True, "n_group": 1, "topk_group": 1}),
]
IDS = [f"{architecture}-{number}" for number, (architecture, _) in enumerate(MODELS)]
each_model = pytest.mark.parametrize(("architecture", "config"), MODELS, ids=IDS)
TOKENS = random_ids(50)
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
ATTENTION = LoraSpec(r=4, alpha=8, target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))
BATCH = random_batch()
(WHOLE,) = plan_micro_batches(BATCH, 10_000)
CUT = plan_micro_batches(BATCH, 70)


def spec_for(architecture: str, config: dict[str, Any]) -> LoraSpec:
    """An adapter on every linear of attention."""
    if architecture != "deepseek_v3":
        return ATTENTION
    has_bottleneck = config.get("q_lora_rank", 1) is not None
    return LoraSpec(r=4, alpha=8, target_modules=LATENT if has_bottleneck else ("q_proj", *LATENT[2:]))


def logits(decoder: Decoder) -> Tensor:
    walk = Walk(decoder)
    return walk.logits(walk.prefill(0, TOKENS))


def expected(path: Path) -> Tensor:
    with torch.no_grad():
        return transformers_twin(path)(torch.from_numpy(TOKENS).long()[None]).logits[0]


@each_model
def test_logits_are_transformers_own(tmp_path: Path, architecture: str, config: dict[str, Any]) -> None:
    """Relative to their size, which is about 1. Measured: at most 2.3e-6."""
    mine, theirs = logits(tiny_decoder(tmp_path / "m", architecture, FP32, **config)), expected(tmp_path / "m")
    assert theirs.std() > 0.5
    assert (mine - theirs).norm() / theirs.norm() < 1e-5
    torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-5)


@each_model
def test_gradients_are_autograds(tmp_path: Path, architecture: str, config: dict[str, Any]) -> None:
    """Measured: at most 3e-6."""
    decoder, spec = tiny_decoder(tmp_path / "m", architecture, FP32, **config), spec_for(architecture, config)
    tensors = random_adapter(decoder, spec, seed=5)
    mine, cut = (Trainee(decoder, spec, tensors).train(micros) for micros in ([WHOLE], CUT))
    model = transformers_twin(tmp_path / "m")
    parameters = {name: t.clone().requires_grad_() for name, t in tensors.items()}
    hang_adapter(model, parameters, spec)
    theirs = autograd(model, parameters, BATCH, [WHOLE], decoder.n_tokens)
    assert relative_error(mine.grads, theirs.grads) < 1e-5
    assert relative_error(cut.grads, theirs.grads) < 1e-5
    np.testing.assert_allclose(mine.logp, theirs.logp, rtol=3e-6, atol=0)


@pytest.mark.parametrize("architecture", ["mistral", "gpt_oss", "minimax_m2", "deepseek_v3"])
def test_bf16_gradients_are_near_the_exact_ones(tmp_path: Path, architecture: str) -> None:
    spec = spec_for(architecture, {})
    decoders = [tiny_decoder(tmp_path / "m", architecture, options) for options in (BF16, FP32)]
    tensors = random_adapter(decoders[0], spec, seed=5)
    rounded, exact = (Trainee(decoder, spec, tensors).train([WHOLE]).grads for decoder in decoders)
    assert 1e-3 < relative_error(rounded, exact) < 0.05
