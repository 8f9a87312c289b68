"""Gradients by hand are autograd's, and do not depend on how a batch is cut, packed, recomputed or threaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.checkpoints import build_gguf
from support.decoders import (
    BF16,
    FP32,
    WIDE,
    hang_adapter,
    random_adapter,
    tiny_decoder,
    transformers_twin,
)
from support.training import Result, Trainee, autograd, random_batch, relative_error
from tithe.arch import read_checkpoint
from tithe.lora import LoraSpec
from tithe.models.decoder import Decoder
from tithe.models.loader import load_model
from tithe.models.options import ModelOptions
from tithe.models.train_adapter import AdapterGradients, TrainAdapter
from tithe.models.training import Capacity
from tithe.packing import pad_rows, plan_micro_batches
from tithe.quant import set_threads

MODES = {"bf16": BF16, "fp32": FP32, "wide": WIDE}
SPEC = LoraSpec(r=4, alpha=8)
BATCH = random_batch()
(WHOLE,) = plan_micro_batches(BATCH, 10_000)
CUT = plan_micro_batches(BATCH, 70)


def trainee(decoder: Decoder, spec: LoraSpec = SPEC, **options: Any) -> Trainee:
    return Trainee(decoder, spec, random_adapter(decoder, spec, seed=5), **options)


def reference(path: Path, decoder: Decoder, spec: LoraSpec = SPEC, **options: Any) -> Result:
    """transformers' autograd for the adapter of `trainee`."""
    model = transformers_twin(path, **options)
    parameters = {n: t.requires_grad_() for n, t in random_adapter(decoder, spec, seed=5).items()}
    hang_adapter(model, parameters, spec)
    return autograd(model, parameters, BATCH, [WHOLE], decoder.n_tokens)


def assert_equal(a: Result, b: Result) -> None:
    assert a.grads.keys() == b.grads.keys()
    assert all(torch.equal(a.grads[name], b.grads[name]) for name in a.grads)
    np.testing.assert_array_equal(a.logp, b.logp)


# ------------------------------------------------------------------ against autograd


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
        ("qwen2", {"num_key_value_heads": 1}),
        ("qwen3", {}),
        ("qwen3", {"attention_bias": True, "num_attention_heads": 6}),
    ],
)
def test_gradients_are_autograds(tmp_path: Path, architecture: str, config: dict[str, Any]) -> None:
    decoder = tiny_decoder(tmp_path / "m", architecture, FP32, **config)
    mine, theirs = trainee(decoder).train([WHOLE]), reference(tmp_path / "m", decoder)
    assert len(mine.grads) == 28
    assert relative_error(mine.grads, theirs.grads) < 1e-5
    np.testing.assert_allclose(mine.logp, theirs.logp, rtol=2e-6, atol=0)
    np.testing.assert_allclose(mine.entropy, theirs.entropy, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "spec",
    [
        LoraSpec(r=3, alpha=8, target_modules=("q_proj", "v_proj", "down_proj")),
        LoraSpec(r=5, alpha=2, target_modules=("k_proj", "up_proj", "o_proj"), use_rslora=True),
        LoraSpec(r=4, alpha=8, rank_pattern={"layers.0.self_attn.q_proj": 9, "mlp.up_proj": 1}),
        LoraSpec(r=2, alpha=8, target_modules=("model.layers.1.self_attn.v_proj",)),
        LoraSpec(r=2, alpha=8, target_modules=("model.layers.0.mlp.gate_proj",)),
    ],
    ids=["odd-rank", "rslora", "rank-pattern", "last-layer", "first-layer"],
)
def test_any_selection_of_linears_has_autograds_gradients(tmp_path: Path, spec: LoraSpec) -> None:
    decoder = tiny_decoder(tmp_path / "m", "llama", FP32)
    mine, theirs = trainee(decoder, spec).train([WHOLE]), reference(tmp_path / "m", decoder, spec)
    assert relative_error(mine.grads, theirs.grads) < 1e-5


@pytest.mark.parametrize("linear", ["Q4_1", "Q8_0"])
def test_a_quantized_base_passes_gradients_through(tmp_path: Path, linear: str) -> None:
    decoder = load_model(read_checkpoint(build_gguf(tmp_path / "m.gguf", "llama", linear=linear)), FP32)
    mine, theirs = trainee(decoder).train([WHOLE]), reference(tmp_path, decoder, gguf_file="m.gguf")
    assert relative_error(mine.grads, theirs.grads) < 1e-5


def test_linears_of_different_formats_pass_gradients_through(tmp_path: Path) -> None:
    """qkv kept as two matrices, against the same weights kept as one."""
    mixed = read_checkpoint(build_gguf(tmp_path / "m.gguf", "qwen2", linear="F32"))
    other = read_checkpoint(build_gguf(tmp_path / "n.gguf", "qwen2", linear="Q8_0"))
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.v_proj.weight"
        mixed.tensors[name] = other.tensors[name]
    decoder = load_model(mixed, FP32)
    dense = load_model(mixed, ModelOptions(compute="dequantized", base_dtype="fp32", compute_dtype="fp32"))
    assert len(decoder.layers[0].qkv.parts) == 3
    assert relative_error(trainee(decoder).train([WHOLE]).grads, trainee(dense).train([WHOLE]).grads) < 1e-6


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_bf16_gradients_are_near_the_exact_ones(tmp_path: Path, architecture: str) -> None:
    """Measured: 0.8 to 1.0 %. Operands are rounded to 8 bits, sums are float32."""
    decoder = tiny_decoder(tmp_path / "m", architecture, BF16)
    error = relative_error(trainee(decoder).train([WHOLE]).grads, reference(tmp_path / "m", decoder).grads)
    assert 1e-3 < error < 0.02


# ------------------------------------------------------------------ what a gradient does not depend on


@pytest.mark.parametrize("mode", MODES)
def test_cutting_and_packing_a_batch_keeps_its_gradient(tmp_path: Path, mode: str) -> None:
    """One micro-batch with shared prompts, several, and every rollout alone with its own copy of the prompt.

    In bf16 the gradient that a shared prompt gets is rounded once instead of once a rollout (measured: 0.2 to 0.4 %).
    """
    decoder = tiny_decoder(tmp_path / "m", "qwen3", MODES[mode])
    singly = plan_micro_batches(BATCH, 1)
    assert (len(CUT), len(singly)) == (3, 7)
    together = trainee(decoder).train([WHOLE])
    for micros in (CUT, singly):
        apart = trainee(decoder).train(micros)
        assert sorted(apart.logp.tolist()) == sorted(together.logp.tolist()), "the forward keeps its bits"
        assert relative_error(apart.grads, together.grads) < (0.01 if mode == "bf16" else 3e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_recomputed_activations_give_identical_gradients(
    tmp_path: Path, architecture: str, mode: str, dropout: float
) -> None:
    decoder = tiny_decoder(tmp_path / "m", architecture, MODES[mode])
    kept, recomputed = (trainee(decoder, checkpointing=c, dropout=dropout) for c in (False, True))
    seed = 3 if dropout else None
    assert_equal(kept.train(CUT, dropout_seed=seed), recomputed.train(CUT, dropout_seed=seed))


@pytest.mark.parametrize("mode", MODES)
def test_padding_rows_change_no_bit(tmp_path: Path, mode: str) -> None:
    """Padding has no segment: its keys go where nothing reads them."""
    decoder = tiny_decoder(tmp_path / "m", "llama", MODES[mode])
    padded = pad_rows(WHOLE, 64, token_id=3)  # no row has this token
    assert len(padded.input_ids) > len(WHOLE.input_ids) + 8
    for checkpointing in (False, True):
        assert_equal(
            trainee(decoder, checkpointing=checkpointing).train([padded]),
            trainee(decoder, checkpointing=checkpointing).train([WHOLE]),
        )


@pytest.mark.parametrize("mode", MODES)
def test_a_used_and_larger_pass_gives_the_same_bits(tmp_path: Path, mode: str) -> None:
    decoder = tiny_decoder(tmp_path / "m", "llama", MODES[mode])
    used = trainee(decoder, capacity=Capacity(rows=400, sequences=20, pages=40, positions=200))
    used.train(CUT)
    used.score(WHOLE, None)
    assert_equal(used.train([WHOLE]), trainee(decoder).train([WHOLE]))


def test_scoring_a_wider_adapter_between_leaves_no_trace(tmp_path: Path) -> None:
    """The pass's buffer for x·Aᵀ grows with the widest adapter that it ever saw."""
    decoder = tiny_decoder(tmp_path / "m", "llama", FP32)
    wide = LoraSpec(r=16, alpha=8)
    one = trainee(decoder)
    alone = one.train([WHOLE])
    one.score(WHOLE, TrainAdapter.build(decoder, random_adapter(decoder, wide), wide))
    assert_equal(one.train([WHOLE]), alone)


@pytest.mark.parametrize("mode", ["bf16", "fp32"])
def test_one_and_two_threads_give_the_same_gradient(tmp_path: Path, mode: str) -> None:
    decoder = tiny_decoder(tmp_path / "m", "qwen3", MODES[mode])
    one = trainee(decoder).train([WHOLE])
    try:
        set_threads(2)
        two = trainee(decoder).train([WHOLE])
    finally:
        set_threads(1)
    assert_equal(one, two)


# ------------------------------------------------------------------ sums


def test_gradients_add_up(tmp_path: Path) -> None:
    decoder = tiny_decoder(tmp_path / "m", "llama", FP32)
    t = trainee(decoder)
    once, twice = t.train([WHOLE]), t.train([WHOLE, WHOLE])
    assert relative_error(twice.grads, {n: 2 * g for n, g in once.grads.items()}) < 1e-6


def test_gradients_have_the_names_and_shapes_of_the_masters(tmp_path: Path) -> None:
    decoder = tiny_decoder(tmp_path / "m", "llama", FP32)
    spec = LoraSpec(r=3, alpha=8)
    masters = random_adapter(decoder, spec)
    sums = AdapterGradients(decoder, TrainAdapter.build(decoder, masters, spec))
    assert {n: g.shape for n, g in sums.named(masters).items()} == {n: t.shape for n, t in masters.items()}
