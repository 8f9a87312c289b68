"""In BF16 a token whose last chosen expert is nearly tied with the next may take the other one: that alone makes its
log-probs jump, in this decoder as in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.decoders import BF16, Walk, random_ids, tiny_decoder, transformers_twin
from tithe.models.decoder import Decoder

N = 60
IDS = random_ids(N)
NEAR = 0.01
"""Logits whose order bf16 rounding may turn: here they are about 1, and bf16 keeps 8 bits."""
SMALL = 0.05
"""Nats: what rounding makes of a log-prob while the experts are the same."""


def answer_and_routers(model: Any) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """transformers' log-probs [N, V], and of each layer the router's logits [N, E] and the ids it took, ascending."""
    taken: list[tuple[Tensor, Tensor]] = []
    routers = [m for name, m in model.named_modules() if name.endswith("mlp.router")]
    hooks = [
        r.register_forward_hook(lambda _m, _x, out: taken.append((out[0].float(), out[2].sort(-1).values)))
        for r in routers
    ]
    with torch.no_grad():
        logp = model(torch.from_numpy(IDS).long()[None]).logits[0].float().log_softmax(-1)
    for hook in hooks:
        hook.remove()
    return logp, taken


def answer(decoder: Decoder, replay: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """This decoder's log-probs [N, V] and the experts it took [layers, N, k], ascending."""
    walk = Walk(decoder)
    b = walk.plan.buffers
    b.sequence[:N], b.position[:N] = 0, torch.arange(N, dtype=torch.int32)
    plans = walk.plan.begin(torch.from_numpy(IDS), [(0, N, None)], replay)
    for layer in range(len(decoder.layers)):
        walk.plan.run_layer(layer, plans, lambda *_: None)
    return walk.logits(walk.plan.buffers.x[:N].clone()).log_softmax(-1), walk.plan.chosen(N).long().sort(-1).values


def test_large_errors_of_gpt_oss_in_bf16_are_ties_of_experts(tmp_path: Path) -> None:
    """Measured with AVX512-BF16: 0.67 nats at one token, whose second and third expert are 0.0046 apart, and at most
    0.020 elsewhere; 0.020 with the exact run's experts replayed, where transformers in BF16 has 0.051."""
    decoder = tiny_decoder(tmp_path / "m", "gpt_oss", BF16)
    exact, routers = answer_and_routers(transformers_twin(tmp_path / "m"))
    ids = torch.stack([ids for _, ids in routers])
    margins = torch.stack([logits.sort(-1, descending=True).values for logits, _ in routers])
    margins = margins[..., ids.shape[-1] - 1] - margins[..., ids.shape[-1]]

    mine, taken = answer(decoder)
    turned = (taken != ids).any(-1)
    assert (margins[turned] < NEAR).all()
    large = (mine - exact).abs().amax(1) > SMALL
    assert not (large & ~turned.any(0)).any()

    replayed, _ = answer(decoder, [layer.int().contiguous() for layer in ids])
    assert (replayed - exact).abs().max() < SMALL

    layer, token = divmod(int(margins.argmin()), N)
    other = [one.int().contiguous() for one in ids]
    ranked = routers[layer][0][token].argsort(descending=True)[: ids.shape[-1] + 1]
    other[layer][token] = torch.cat([ranked[:-2], ranked[-1:]]).sort().values.int()
    swapped, _ = answer(decoder, other)
    error = (swapped - exact).abs().amax(1)
    assert error[token] > 4 * SMALL, "one expert taken for its neighbour"
    assert error[:token].max() < SMALL
