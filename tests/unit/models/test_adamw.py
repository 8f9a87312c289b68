"""AdamW beside torch's own."""

from __future__ import annotations

import pytest
import torch

from tithe.models import AdamW

SHAPES = {"a": (7, 5), "b": (33,), "c": (1, 64)}


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_it_makes_torchs_steps_bit_for_bit(weight_decay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    ours = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    theirs = {name: t.clone().requires_grad_() for name, t in ours.items()}
    adamw = AdamW(ours, betas=(0.9, 0.95), weight_decay=weight_decay)
    peer = torch.optim.AdamW(theirs.values(), betas=(0.9, 0.95), weight_decay=weight_decay, foreach=False)
    for step in range(1, 40):
        rate = 1e-2 / step
        grads = {name: torch.randn(t.shape, generator=generator) * 10.0 ** (step % 9 - 6) for name, t in ours.items()}
        for name, grad in grads.items():
            theirs[name].grad = grad.clone()
        peer.param_groups[0]["lr"] = rate
        peer.step()
        adamw.step(grads, rate)
        for name, master in ours.items():
            assert torch.equal(master, theirs[name]), (name, step)
            state = peer.state[theirs[name]]
            assert torch.equal(adamw.moments[name][0], state["exp_avg"])
            assert torch.equal(adamw.moments[name][1], state["exp_avg_sq"])


def test_a_master_without_a_gradient_is_left_alone() -> None:
    masters = {"a": torch.ones(3), "b": torch.ones(3)}
    AdamW(masters, betas=(0.9, 0.95), weight_decay=0.1).step({"a": torch.ones(3)}, 0.1)
    assert torch.equal(masters["b"], torch.ones(3))
    assert not torch.equal(masters["a"], torch.ones(3))
