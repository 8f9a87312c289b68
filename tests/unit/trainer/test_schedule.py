"""Settings that change from batch to batch, as a schedule changes them."""

from __future__ import annotations

from dataclasses import replace

import torch

from support.learning import SETTINGS, batch, group, rollout, train, trainer


def test_another_rate_and_kl_coefficient_count_from_the_next_step_on(decoder) -> None:
    learner = trainer(decoder, SETTINGS)
    what = batch([group([5, 9], [rollout([3, 7, 2]), rollout([4, 8], sample=1)])], [[1.0, -1.0]])
    first = train(learner, what).metrics
    assert first["lr"] == SETTINGS.lr
    assert "kl_mean" not in first
    before = {name: tensor.clone() for name, tensor in learner.adapter_tensors().items()}
    loss = replace(SETTINGS.loss, kl_coef=0.5)
    learner.settings = replace(SETTINGS, lr=1e-6, kl_coef=0.5, loss=loss)
    second = train(learner, what).metrics
    assert second["lr"] == 1e-6
    assert second["kl_mean"] > 0
    moved = max(float((t - before[name]).abs().max()) for name, t in learner.adapter_tensors().items())
    assert 0 < moved < 1e-5, "Adam's step is about the rate"
    learner.settings = replace(SETTINGS, lr=0.5)
    assert train(learner, what).metrics["lr"] == 0.5
    assert all(torch.isfinite(t).all() for t in learner.adapter_tensors().values())
