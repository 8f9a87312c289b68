"""Dropout on an adapter's input: one mask forward and backward, none when it is off (case C23)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.decoders import BF16, FP32, WIDE, random_adapter, tiny_decoder, transformers_twin
from support.training import Trainee, autograd, random_batch, relative_error
from tithe.lora import LoraSpec, tensor_names
from tithe.models.dropout import AdapterDropout
from tithe.packing import plan_micro_batches

MODES = {"bf16": BF16, "fp32": FP32, "wide": WIDE}
SPEC = LoraSpec(r=4, alpha=8)
P = 0.25
PLACES = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "o_proj": "o"}
PLACES |= {"gate_proj": "gate_up", "up_proj": "gate_up", "down_proj": "down"}


def trainee(decoder: Any, **options: Any) -> Trainee:
    return Trainee(decoder, SPEC, random_adapter(decoder, SPEC, seed=5), **options)


def hang_dropped_adapter(model: Any, parameters: dict[str, Tensor], dropout: AdapterDropout) -> None:
    """y + scale·(mask(x)·Aᵀ)·Bᵀ with the mask that row r of a one-sequence micro-batch has."""

    def hang(module: str, linear: Any) -> None:
        layer, place = int(module.split(".")[2]), PLACES[module.rpartition(".")[2]]
        a, b = (parameters[name] for name in tensor_names(module))

        def forward(x: Tensor) -> Tensor:
            dropped = dropout.apply_mask(layer, place, x[0])
            return torch.nn.functional.linear(x, linear.weight, linear.bias) + 2.0 * (dropped @ a.T) @ b.T

        linear.forward = forward

    for module, linear in model.named_modules():
        if tensor_names(module)[0] in parameters:
            hang(module, linear)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_forward_and_backward_see_one_mask(tmp_path: Path, checkpointing: bool) -> None:
    """Gradients are autograd's under the same masks; any other mask in the backward would differ."""
    decoder = tiny_decoder(tmp_path / "m", "llama", FP32)
    batch = random_batch([(19, (23,))])
    micros = plan_micro_batches(batch, 10_000)
    mine = trainee(decoder, dropout=P, checkpointing=checkpointing).train(micros, dropout_seed=11)
    masks = AdapterDropout(decoder, len(micros[0].input_ids), P)
    masks.seed = 11
    model = transformers_twin(tmp_path / "m")
    parameters = {n: t.requires_grad_() for n, t in random_adapter(decoder, SPEC, seed=5).items()}
    hang_dropped_adapter(model, parameters, masks)
    theirs = autograd(model, parameters, batch, micros, decoder.n_tokens)
    np.testing.assert_allclose(mine.logp, theirs.logp, rtol=2e-6, atol=0)
    assert relative_error(mine.grads, theirs.grads) < 1e-5
    without = trainee(decoder).train(micros)
    assert relative_error(without.grads, theirs.grads) > 0.1, "the masks matter"


@pytest.mark.parametrize("mode", MODES)
def test_switched_off_it_leaves_no_trace_in_log_probs(tmp_path: Path, mode: str) -> None:
    """Case C23: the same ids under unchanged weights have ratio exactly 1, also against a pass without dropout.

    Gradients are the same sums in another order.
    """
    decoder = tiny_decoder(tmp_path / "m", "qwen3", MODES[mode])
    micros = plan_micro_batches(random_batch(), 100)
    with_dropout = trainee(decoder, dropout=P)
    first = with_dropout.train(micros)
    with_dropout.train(micros, dropout_seed=8)
    again, plain = with_dropout.train(micros), trainee(decoder).train(micros)
    for other in (again, plain):
        assert (np.exp(first.logp.astype(np.float64) - other.logp) == 1.0).all()
    assert all(torch.equal(first.grads[name], again.grads[name]) for name in first.grads)
    assert relative_error(first.grads, plain.grads) < (0.01 if mode == "bf16" else 1e-6)


def test_a_seed_is_a_mask(tmp_path: Path) -> None:
    decoder = tiny_decoder(tmp_path / "m", "llama", BF16)
    micros = plan_micro_batches(random_batch(), 10_000)
    t = trainee(decoder, dropout=P)
    one, same, other = (t.train(micros, dropout_seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.logp, same.logp)
    assert all(torch.equal(one.grads[name], same.grads[name]) for name in one.grads)
    assert (one.logp != other.logp).mean() > 0.9


def test_masks_keep_their_share_and_the_mean(tmp_path: Path) -> None:
    decoder = tiny_decoder(tmp_path / "m", "llama", FP32)
    dropout = AdapterDropout(decoder, 500, P)
    dropout.seed = 4
    ones = torch.ones(500, decoder.spec.hidden_size)
    masked = {
        (layer, place): dropout.apply_mask(layer, place, ones) for layer in (0, 1) for place in ("qkv", "gate_up")
    }
    for x in masked.values():
        assert set(x.unique().tolist()) == {0.0, float(torch.tensor(1.0) / (1 - P))}
        assert abs(float((x == 0).float().mean()) - P) < 0.01
    assert len({x.numpy().tobytes() for x in masked.values()}) == 4, "every layer and place has a mask of its own"
