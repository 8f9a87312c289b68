"""Whole mixture models train: transformers' autograd, adapters on experts, the sampler's experts replayed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.decoders import FP32, Walk, hang_adapter, random_adapter, random_ids, tiny_decoder, transformers_twin
from support.training import Trainee, autograd, random_batch, relative_error
from tithe.errors import ModelError
from tithe.lora import LoraSpec
from tithe.models.decoder import Decoder
from tithe.models.expert_adapter import init_tensors, stack_experts, tensor_shapes
from tithe.models.layout import page_layout
from tithe.models.options import ModelOptions
from tithe.packing import plan_micro_batches

SPEC = LoraSpec(r=4, alpha=8)
BATCH = random_batch()
(WHOLE,) = plan_micro_batches(BATCH, 10_000)
CUT = plan_micro_batches(BATCH, 70)
INT4 = ModelOptions(quantize="int4")
each_layout = pytest.mark.parametrize("layout", ["per_expert", "shared_outer"])


def on_experts(decoder: Decoder, layout: Any, seed: int = 3) -> dict[str, Tensor]:
    """Adapter tensors on all experts, whose B is not zero."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in decoder.layers:
        for bank in layer.experts.banks() if layer.experts is not None else ():
            for site in bank.sites:
                columns = bank.hidden if site.place == "gate_up" else bank.width
                shapes |= tensor_shapes(site, len(bank), columns, SPEC.r, layout)
    draw = torch.Generator().manual_seed(seed)
    drawn = init_tensors(shapes, draw)
    return {name: t if t.any() else torch.randn(t.shape, generator=draw) * 0.05 for name, t in drawn.items()}


def everywhere(decoder: Decoder, layout: Any) -> dict[str, Tensor]:
    dense = {name: t for name, t in random_adapter(decoder, SPEC, seed=5).items() if ".experts." not in name}
    return dense | on_experts(decoder, layout)


def hang_on_experts(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Make transformers' experts compute y + scale·(x·Aᵀ)·Bᵀ in every linear."""

    def hang(name: str, module: Any) -> None:
        def share(x: Tensor, part: str, e: int) -> Tensor:
            def pick(half: str) -> Tensor:
                own = tensors.get(f"base_model.model.{name}.{{expert}}.{part}_proj.lora_{half}.weight")
                return own[e] if own is not None else tensors[f"base_model.model.{name}.{part}_proj.lora_{half}.weight"]

            return SPEC.scale("x") * (x @ pick("A").T) @ pick("B").T

        def forward(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            out = torch.zeros_like(hidden)
            for e in range(module.num_experts):
                rows, slot = (ids == e).nonzero(as_tuple=True)
                x = hidden[rows]
                gate, up = (x @ module.gate_up_proj[e].T).chunk(2, dim=-1)
                act = torch.nn.functional.silu(gate + share(x, "gate", e)) * (up + share(x, "up", e))
                y = act @ module.down_proj[e].T + share(act, "down", e)
                out = out.index_add(0, rows, y * weights[rows, slot, None])
            return out

        module.forward = forward

    for name, module in model.named_modules():
        if name.endswith("mlp.experts"):
            hang(name, module)


@each_layout
@pytest.mark.parametrize("config", [{}, {"norm_topk_prob": False}, {"mlp_only_layers": [0]}])
def test_gradients_are_autograds(tmp_path: Path, config: dict[str, Any], layout: str) -> None:
    decoder = tiny_decoder(tmp_path / "m", "qwen3_moe", FP32, **config)
    tensors = everywhere(decoder, layout)
    mine, cut = (Trainee(decoder, SPEC, tensors).train(micros) for micros in ([WHOLE], CUT))
    parameters = {name: t.clone().requires_grad_() for name, t in tensors.items()}
    model = transformers_twin(tmp_path / "m")
    hang_adapter(model, {name: t for name, t in parameters.items() if ".experts." not in name}, SPEC)
    hang_on_experts(model, parameters)
    theirs = autograd(model, parameters, BATCH, [WHOLE], decoder.n_tokens)
    assert relative_error(mine.grads, theirs.grads) < 1e-5
    assert relative_error(cut.grads, theirs.grads) < 1e-5
    np.testing.assert_allclose(mine.logp, theirs.logp, rtol=2e-6, atol=0)


def test_experts_named_one_by_one_are_those_that_lie_together(tmp_path: Path) -> None:
    """What PEFT names a linear each trains like the stacked tensors, and autograd sees it in merged weights, too."""
    decoder = tiny_decoder(tmp_path / "m", "qwen3_moe", FP32, num_experts_per_tok=1)
    tensors = random_adapter(decoder, SPEC, seed=5)
    mine = Trainee(decoder, SPEC, tensors).train([WHOLE])
    parameters = {name: t.clone().requires_grad_() for name, t in tensors.items()}
    model = transformers_twin(tmp_path / "m")
    hang_adapter(model, parameters, SPEC)
    theirs = autograd(model, parameters, BATCH, [WHOLE], decoder.n_tokens)
    assert relative_error(mine.grads, stack_experts(theirs.grads)) < 1e-5


@each_layout
def test_recomputed_layers_give_the_same_bits(tmp_path: Path, layout: str) -> None:
    decoder = tiny_decoder(tmp_path / "m", "qwen3_moe", INT4)
    tensors = everywhere(decoder, layout)
    kept, again = (Trainee(decoder, SPEC, tensors, checkpointing=c).train(CUT) for c in (False, True))
    assert all(torch.equal(kept.grads[name], again.grads[name]) for name in tensors)


def test_an_adapter_on_experts_alone_trains(tmp_path: Path) -> None:
    decoder = tiny_decoder(tmp_path / "m", "qwen3_moe", INT4)
    tensors = on_experts(decoder, "shared_outer")
    grads = Trainee(decoder, SPEC, tensors).train([WHOLE]).grads
    assert {n: g.shape for n, g in grads.items()} == {n: t.shape for n, t in tensors.items()}
    assert all(g.any() for g in grads.values())


def test_dropout_on_experts_is_refused(tmp_path: Path) -> None:
    decoder = tiny_decoder(tmp_path / "m", "qwen3_moe", INT4)
    with pytest.raises(ModelError, match=r"set lora\.dropout to 0"):
        Trainee(decoder, SPEC, on_experts(decoder, "per_expert"), dropout=0.1).train([WHOLE])
    attention = LoraSpec(r=4, alpha=8, target_modules=("q_proj", "o_proj"))
    grads = (
        Trainee(decoder, attention, random_adapter(decoder, attention), dropout=0.1)
        .train([WHOLE], dropout_seed=1)
        .grads
    )
    assert all(g.any() for g in grads.values())


@each_layout
def test_decoded_rows_have_the_bits_of_prefilled_ones(tmp_path: Path, layout: str) -> None:
    decoder = tiny_decoder(tmp_path / "m", "qwen3_moe", INT4)
    adapter = decoder.build_adapter(everywhere(decoder, layout), SPEC)
    ids, walk = random_ids(20), Walk(decoder)
    whole = walk.prefill(0, ids, adapter=adapter)
    for i, token in enumerate(ids):
        assert torch.equal(walk.prefill(1, [token], first=i, adapter=adapter)[0], whole[i])
    assert not torch.equal(whole, walk.prefill(2, ids))


def test_training_replays_the_experts_of_sampling(tmp_path: Path) -> None:
    decoder = tiny_decoder(tmp_path / "m", "qwen3_moe", INT4)
    trainee = Trainee(decoder, SPEC, everywhere(decoder, "per_expert"))
    train, layout = trainee.pass_for(WHOLE), page_layout(WHOLE)
    n = len(WHOLE.input_ids)
    own = train.forward(WHOLE.input_ids, layout, trainee.adapter).clone()
    recorded = train.plan.chosen(n)
    assert train.plan.agreed(n) == (0, 0)
    again = train.forward(WHOLE.input_ids, layout, trainee.adapter, replay=list(recorded))
    assert torch.equal(again, own)
    layers = len(decoder.blocks())
    assert train.plan.agreed(n) == (layers * n, layers * n)
    other = train.forward(WHOLE.input_ids, layout, None, replay=list(recorded))
    assert torch.equal(train.plan.chosen(n), recorded)
    agreeing, replayed = train.plan.agreed(n)
    assert 0 < agreeing < replayed == layers * n
    assert not torch.equal(other, own)
