"""A trainer that is saved and loaded goes on as if nothing had happened."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.decoders import random_ids
from support.learning import SETTINGS, batch, group, rollout, snapshot, train, trainer
from tithe.checkpoint import load_checkpoint, save_checkpoint
from tithe.errors import ResumeError
from tithe.models import Decoder
from tithe.trainer import Trainer
from tithe.types import TrainingBatch

RUN = replace(
    SETTINGS, lr_scheduler="cosine", warmup_steps=2, total_steps=6, weight_decay=0.1, dropout=0.2, kl_coef=0.01, seed=5
)


def data(step: int) -> TrainingBatch:
    rollouts = [rollout(random_ids(6, 10 * step + s).tolist(), sample=s) for s in range(3)]
    return batch([group(random_ids(5, step), rollouts, step)], [[1.0, -0.5, -0.5]])


def run(decoder: Decoder, first: int, last: int, learner: Trainer | None = None) -> tuple[Trainer, list[float]]:
    learner = trainer(decoder, RUN) if learner is None else learner
    return learner, [train(learner, data(step)).metrics["lr"] for step in range(first, last)]


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.fixture(scope="module")
def unbroken(decoder: Decoder) -> tuple[Trainer, list[float]]:
    return run(decoder, 0, 6)


@pytest.mark.parametrize("at", [0, 1, 3, 5])
def test_a_loaded_trainer_goes_on_bit_for_bit(tmp_path: Path, decoder: Decoder, unbroken, at: int) -> None:
    """E07, E09: weights, moments, schedule, dropout and counters, through the files of a checkpoint."""
    before, _ = run(decoder, 0, at)
    path = save_checkpoint(tmp_path, at, before.state_tensors(), {"trainer": before.state()})
    loaded = load_checkpoint(path)
    after = trainer(decoder, RUN, seed=9)  # other tensors: everything must come from the checkpoint
    after.load_state(loaded.tensors, loaded.state["trainer"])
    assert after.optimizer_step == at
    assert equal(after.state_tensors(), before.state_tensors())
    _, rates = run(decoder, at, 6, after)
    whole, all_rates = unbroken
    assert rates == all_rates[at:]
    assert equal(after.state_tensors(), whole.state_tensors())
    assert after.state() == whole.state() == {"optimizer_step": 6, "adam_step": 6}


@pytest.mark.parametrize("forgotten", ["moments", "step"])
def test_a_trainer_that_forgot_a_part_goes_another_way(decoder: Decoder, unbroken, forgotten: str) -> None:
    before, _ = run(decoder, 0, 3)
    state, tensors = before.state(), before.state_tensors()
    if forgotten == "moments":
        tensors = {n: t for n, t in tensors.items() if n.startswith("adapter/")}
        state["adam_step"] = 0
    else:
        state["optimizer_step"] = 2
    after = trainer(decoder, RUN)
    after.load_state(tensors, state)
    run(decoder, 3, 6, after)
    assert not equal(after.adapter_tensors(), unbroken[0].adapter_tensors())


def test_what_a_checkpoint_lacks_is_named_and_nothing_is_taken(decoder: Decoder) -> None:
    before, _ = run(decoder, 0, 2)
    tensors, state = before.state_tensors(), before.state()
    after = trainer(decoder, RUN)
    kept = snapshot(after.state_tensors())

    def refuses(broken: dict[str, Tensor], said: str) -> None:
        with pytest.raises(ResumeError, match=said):
            after.load_state(broken, state)
        assert equal(after.state_tensors(), kept)

    moment = next(n for n in tensors if n.startswith("optimizer/exp_avg_sq/"))
    weight = next(n for n in tensors if n.startswith("adapter/"))
    refuses({n: t for n, t in tensors.items() if n != moment}, moment)
    refuses({n: t for n, t in tensors.items() if n != weight}, weight.removeprefix("adapter/"))
    refuses({**tensors, "adapter/odd": torch.zeros(1)}, "odd")
    refuses({**tensors, weight: tensors[weight][:1]}, weight.removeprefix("adapter/"))
    refuses({**tensors, moment: tensors[moment][:1]}, moment)


def test_memory_is_masters_gradients_and_two_moments(decoder: Decoder) -> None:
    learner = trainer(decoder)
    numbers = sum(t.numel() for t in learner.adapter_tensors().values())
    assert learner.memory_bytes() == 16 * numbers
