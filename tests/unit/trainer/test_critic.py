"""The critic: its gradient, its warm-up, its state, and that it adds no second base."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from support.decoders import random_adapter, random_ids
from support.learning import SETTINGS, SPEC, group, rollout, snapshot
from tithe.advantages import AdvantagePlan, AdvantageRule, make_advantages
from tithe.errors import ResumeError
from tithe.models import Decoder
from tithe.models.value_head import BIAS, WEIGHT
from tithe.trainer import BatchScorer, CriticSettings, ScoringPlan, Trainer
from tithe.types import BatchScores, TrainingBatch

PPO = replace(
    SETTINGS, algorithm="ppo", critic=CriticSettings(value_clip=None), lr=1e-2, betas=(0.0, 0.95), max_grad_norm=1e30
)
RULE = AdvantagePlan(AdvantageRule("gae", "batch", lam=0.9))


def learner(decoder: Decoder, settings=PPO, *, seed: int = 0) -> Trainer:
    policy, critic = random_adapter(decoder, SPEC, seed, 0.05), random_adapter(decoder, SPEC, seed + 1, 0.05)
    trainer = Trainer(decoder, SPEC, policy, settings, critic=critic)
    assert trainer.critic is not None
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        trainer.critic._masters[WEIGHT].copy_(torch.randn(decoder.spec.hidden_size, generator=draw) * 0.1)
        trainer.critic._masters[BIAS].fill_(0.2)
    return trainer


def some_groups():
    masks = ([True] * 5, [True, False, True, True, False, True])
    rollouts = [rollout(random_ids(len(m), s).tolist(), sample=s, mask=m, reward=float(s)) for s, m in enumerate(masks)]
    return [group(random_ids(7), rollouts)]


def scored(trainer: Trainer, groups) -> BatchScores:
    scorer = BatchScorer(trainer, ScoringPlan(value=True))
    for micro in scorer.plan(groups):
        scorer.score(micro)
    return scorer.scores()


def ready(trainer: Trainer) -> TrainingBatch:
    groups = some_groups()
    scores = scored(trainer, groups)
    made = make_advantages(groups, RULE, scores)
    return TrainingBatch(groups, made.advantages, 0, replace(scores, returns=made.returns))


def train(trainer: Trainer, batch: TrainingBatch):
    for micro in trainer.plan(batch):
        trainer.accumulate(micro)
    return trainer.step()


def loss_of(trainer: Trainer, batch: TrainingBatch) -> float:
    """½ the mean squared error over trained tokens, from the values alone."""
    assert trainer.critic is not None
    errors = []
    for micro in trainer.plan(batch):
        assert micro.returns is not None
        errors.append((trainer.critic.values(micro) - micro.returns)[micro.loss_mask].astype(np.float64))
    return 0.5 * float(np.square(np.concatenate(errors)).mean())


def test_the_gradient_is_that_of_the_loss_along_any_direction(exact: Decoder) -> None:
    """Through the head, the final norm and the adapter, against differences of the loss itself."""
    trainer = learner(exact)
    batch = ready(trainer)
    assert trainer.critic is not None
    assert train(trainer, batch).metrics["value_loss"] == pytest.approx(loss_of(learner(exact), batch), rel=1e-5)
    moments = trainer.critic._adam.state_tensors()
    gradient = {n: moments[f"optimizer/exp_avg/{n}"] for n in trainer.critic._masters}  # β1 = 0: the gradient itself
    for seed, names in enumerate(([WEIGHT, BIAS], [n for n in gradient if n not in (WEIGHT, BIAS)])):
        draw = torch.Generator().manual_seed(seed)
        step = {n: torch.randn(gradient[n].shape, generator=draw) * 3e-3 for n in names}
        losses = []
        for sign in (1.0, -1.0):
            moved = learner(exact)
            assert moved.critic is not None
            with torch.no_grad():
                for name in names:
                    moved.critic._masters[name].add_(sign * step[name])
            moved.critic._adapter = moved.critic._build()
            losses.append(loss_of(moved, batch))
        wanted = sum(float((gradient[n] * step[n]).sum()) for n in names)
        assert (losses[0] - losses[1]) / 2 == pytest.approx(wanted, rel=2e-2)


def test_it_learns_what_it_is_asked_and_alone_during_its_warm_up(decoder: Decoder) -> None:
    trainer = learner(decoder, replace(PPO, betas=(0.9, 0.95), critic=CriticSettings(None, warmup_steps=12), lr=3e-3))
    policy = snapshot(trainer.adapter_tensors())
    batch = ready(trainer)
    errors = [train(trainer, batch).metrics["value_loss"] for _ in range(12)]
    assert errors[-1] < 0.6 * errors[0]
    assert all(torch.equal(policy[n], t) for n, t in trainer.adapter_tensors().items()), "the policy waits"
    metrics = train(trainer, batch).metrics
    assert metrics["value_explained"] > 0
    assert metrics["clip_frac"] >= 0
    assert any(not torch.equal(policy[n], t) for n, t in trainer.adapter_tensors().items()), "and then learns"


def test_its_learning_rate_is_that_of_the_batch_it_steps_on(decoder: Decoder) -> None:
    """A phase with half the rate moves it half as far; the first step of AdamW is as long as the rate."""
    moved = []
    for rate in (1e-3, 5e-4):
        trainer = learner(decoder)
        assert trainer.critic is not None
        batch = ready(trainer)
        trainer.settings = replace(trainer.settings, lr=rate)
        before = snapshot(trainer.critic._masters)
        assert train(trainer, batch).metrics["lr"] == rate
        moved.append(max(float((t - before[n]).detach().abs().max()) for n, t in trainer.critic._masters.items()))
    assert moved == pytest.approx([1e-3, 5e-4], rel=1e-2)


def test_a_fresh_head_says_nothing(decoder: Decoder) -> None:
    trainer = Trainer(decoder, SPEC, random_adapter(decoder, SPEC, 0, 0.05), PPO, critic=random_adapter(decoder, SPEC))
    values = scored(trainer, some_groups()).value
    assert values is not None
    assert [v.tolist() for v in values[0] if v is not None] == [[0.0] * 5, [0.0] * 6]


def test_a_checkpoint_brings_the_critic_back_to_the_bit(decoder: Decoder) -> None:
    one, two = learner(decoder), learner(decoder, seed=7)
    train(one, ready(one))
    two.load_state(snapshot(one.state_tensors()), one.state())
    batch = ready(one)
    for trainer in (one, two):
        train(trainer, batch)
    state = one.state_tensors()
    assert state.keys() == two.state_tensors().keys()
    assert all(torch.equal(state[n], t) for n, t in two.state_tensors().items())
    assert one.state() == two.state()
    plain = {n: t for n, t in state.items() if not n.startswith("critic/")}
    with pytest.raises(ResumeError, match="lacks the critic"):
        two.load_state(plain, one.state())


def test_its_memory_is_counted_and_its_base_is_the_policys(decoder: Decoder) -> None:
    trainer, without = learner(decoder), Trainer(decoder, SPEC, random_adapter(decoder, SPEC, 0, 0.05), SETTINGS)
    assert trainer.critic is not None
    assert trainer.critic._passes is trainer.passes
    numbers = sum(t.numel() for t in trainer.adapter_tensors().values()) + decoder.spec.hidden_size + 1
    assert trainer.critic_bytes() == 16 * numbers
    assert trainer.memory_bytes() - without.memory_bytes() == trainer.critic_bytes()
    assert without.critic_bytes() == 0


def test_a_batch_that_was_not_scored_is_refused(decoder: Decoder) -> None:
    trainer = learner(decoder)
    batch = ready(trainer)
    with pytest.raises(ValueError, match="values and returns are missing"):
        train(trainer, replace(batch, scores=None))
