"""Optimizer steps: metrics, clipping, schedule, skipped steps, masters, KL, dropout."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from support.decoders import random_adapter, random_ids
from support.learning import SETTINGS, SPEC, Rig, batch, group, rollout, snapshot, train, trainer
from tithe.advantages import with_kl_penalty
from tithe.losses import Aggregation, LossSettings
from tithe.trainer import Trainer, TrainerSettings, learning_rate, probe_masters
from tithe.types import TrainingBatch

EXACT = replace(SETTINGS, betas=(0.0, 0.95), max_grad_norm=1e30)
IN_REWARD = LossSettings(aggregation=Aggregation.TOKEN_MEAN, kl_estimator="k1")


def token_mean(**terms: float) -> LossSettings:
    return LossSettings(aggregation=Aggregation.TOKEN_MEAN, **terms)


def some_batch(advantages: tuple[float, ...] = (1.0, -1.0, 0.5)) -> TrainingBatch:
    rollouts = [rollout(random_ids(5 + s, s).tolist(), sample=s) for s in range(len(advantages))]
    return batch([group(random_ids(7), rollouts)], [advantages])


def sampled(learner: Trainer, what: TrainingBatch) -> TrainingBatch:
    """The batch with the trainer's own log-probs as the sampler's."""
    adapter = learner.adapter_tensors()

    def scored(prompt: np.ndarray, ids: np.ndarray) -> np.ndarray:
        logp = probe_masters(learner.passes, prompt.tolist(), ids.tolist(), adapter, SPEC)
        return np.array(logp, np.float32)

    groups = [
        replace(g, rollouts=tuple(replace(r, logp=scored(g.prompt_ids, r.token_ids)) for r in g.rollouts))
        for g in what.groups
    ]
    return TrainingBatch(groups, what.advantages, what.serial)


def first_moment(learner: Trainer) -> Tensor:
    prefix = "optimizer/exp_avg/"
    return torch.cat([t.flatten() for n, t in sorted(learner.state_tensors().items()) if n.startswith(prefix)])


def unchanged(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    return before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)


# ------------------------------------------------------------------ metrics


def test_metrics_of_fresh_samples(decoder) -> None:
    learner = trainer(decoder, replace(SETTINGS, kl_coef=0.1, loss=token_mean(kl_coef=0.1)))
    result = train(learner, sampled(learner, some_batch()))
    m = result.metrics
    assert not result.skipped
    assert (m["ratio_mean"], m["ratio_max"], m["approx_kl"], m["ess"], m["clip_frac"]) == (1.0, 1.0, 0.0, 1.0, 0.0)
    assert m["kl_mean"] > 0, "the adapter is not the base"
    assert 0 < m["entropy"] <= math.log(decoder.n_tokens)
    assert m["grad_norm"] > 0
    assert m["lr"] == SETTINGS.lr
    tokens = [5, 6, 7]
    policy = -np.average([1.0, -1.0, 0.5], weights=tokens)
    assert m["loss"] == pytest.approx(policy + 0.1 * m["kl_mean"], rel=1e-5)


def test_no_reference_is_scored_without_a_kl_coefficient(decoder) -> None:
    assert "kl_mean" not in train(trainer(decoder), some_batch()).metrics
    learner = trainer(decoder, replace(SETTINGS, kl_coef=0.1), size=0.0)
    assert train(learner, some_batch()).metrics["kl_mean"] == 0.0, "with B = 0 the policy is the reference, to the bit"


def test_a_second_step_on_the_same_samples_has_a_ratio(decoder) -> None:
    learner = trainer(decoder, replace(SETTINGS, lr=0.05))
    what = sampled(learner, some_batch())
    train(learner, what)
    m = train(learner, what).metrics
    assert m["ratio_max"] > 1.0
    assert m["approx_kl"] > 0
    assert m["clip_frac"] > 0
    assert m["ess"] < 1


# ------------------------------------------------------------------ clipping, schedule, nothing to do


def test_the_gradient_is_scaled_down_to_the_largest_norm(exact) -> None:
    free, clipped, roomy = (trainer(exact, replace(EXACT, max_grad_norm=n)) for n in (1e30, 0.01, 1e3))
    norms = [train(t, some_batch()).metrics["grad_norm"] for t in (free, clipped, roomy)]
    assert norms[0] == norms[1] == norms[2] == pytest.approx(float(first_moment(free).norm()), rel=1e-5)
    assert float(first_moment(clipped).norm()) == pytest.approx(0.01, rel=1e-3)
    torch.testing.assert_close(first_moment(clipped) * norms[0] / 0.01, first_moment(free), rtol=1e-3, atol=1e-7)
    assert torch.equal(first_moment(roomy), first_moment(free))


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_the_rate_follows_the_schedule_step_by_step(decoder, kind) -> None:
    settings = replace(SETTINGS, lr_scheduler=kind, warmup_steps=2, total_steps=6)
    learner = trainer(decoder, settings)
    rates = [train(learner, some_batch()).metrics["lr"] for _ in range(7)]
    shares = {
        "constant": [1 / 3, 2 / 3, 1, 1, 1, 1, 1],
        "linear": [1 / 3, 2 / 3, 1, 3 / 4, 1 / 2, 1 / 4, 0],
        "cosine": [1 / 3, 2 / 3, 1, (2 + 2**0.5) / 4, 1 / 2, (2 - 2**0.5) / 4, 0],
    }[kind]
    assert rates == pytest.approx([SETTINGS.lr * share for share in shares])


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (0, 2), (5, 3), (3, 3), (10, 200)])
def test_no_step_of_a_run_has_a_rate_of_zero(kind, warmup, total) -> None:
    rates = [learning_rate(s, peak=1.0, kind=kind, warmup_steps=warmup, total_steps=total) for s in range(total)]
    assert all(0 < rate <= 1 for rate in rates)
    assert rates[: warmup + 1] == sorted(rates[: warmup + 1]), "rising"
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True), "then falling or level"


def test_weight_decay_pulls_toward_no_change_even_without_a_gradient(exact) -> None:
    learner = trainer(exact, replace(EXACT, weight_decay=0.5, lr=0.1))
    before = snapshot(learner.adapter_tensors())
    train(learner, some_batch((0.0, 0.0, 0.0)))
    after = snapshot(learner.adapter_tensors())
    assert all(torch.allclose(after[n], before[n] * (1 - 0.1 * 0.5), rtol=1e-5) for n in before)


def test_a_batch_of_which_nothing_is_trained_changes_nothing(decoder) -> None:
    learner = trainer(decoder, replace(SETTINGS, weight_decay=0.5))
    before = snapshot(learner.adapter_tensors())
    what = TrainingBatch(some_batch().groups, [[None, None, None]], 0)
    assert learner.plan(what) == []
    result = learner.step()
    assert not result.skipped
    assert (result.metrics["loss"], result.metrics["grad_norm"]) == (0.0, 0.0)
    assert unchanged(before, learner.adapter_tensors())
    assert learner.state() == {"optimizer_step": 1, "adam_step": 0}


def test_an_abandoned_batch_leaves_no_gradient_behind(exact) -> None:
    fresh, used = trainer(exact, EXACT), trainer(exact, EXACT)
    used.accumulate(used.plan(some_batch((3.0, -2.0, 1.0)))[0])
    train(fresh, some_batch())
    train(used, some_batch())
    assert unchanged(fresh.state_tensors(), used.state_tensors())


# ------------------------------------------------------------------ not finite


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_step_that_is_not_finite_is_skipped_and_changes_nothing(decoder, bad) -> None:
    learner, twin = trainer(decoder), trainer(decoder)
    train(learner, some_batch())
    train(twin, some_batch())
    before, state = snapshot(learner.state_tensors()), learner.state()
    result = train(learner, some_batch((1.0, bad, -1.0)))
    assert result.skipped
    assert not math.isfinite(result.metrics["loss"])
    assert unchanged(before, learner.state_tensors())
    assert learner.state() == state | {"optimizer_step": 2}, "the schedule goes on, Adam does not"
    assert not train(learner, some_batch()).skipped, "and nothing of it stays"
    train(twin, some_batch())
    assert unchanged(learner.state_tensors(), twin.state_tensors())


# ------------------------------------------------------------------ masters


def moved_share(before: dict[str, Tensor], after: dict[str, Tensor]) -> float:
    return float(torch.cat([(before[n] != after[n]).flatten() for n in before]).float().mean())


def test_small_updates_reach_float32_masters_and_would_be_lost_in_bf16_ones(decoder) -> None:
    """At the learning rate of the README a bf16 master rounds most updates away."""
    learner = trainer(decoder, replace(SETTINGS, lr=2e-5, max_grad_norm=1e9))
    start = snapshot(learner.adapter_tensors())
    rounded = {n: t.bfloat16() for n, t in start.items()}
    lost = start
    for _ in range(5):
        before = snapshot(learner.adapter_tensors())
        train(learner, some_batch())
        after = snapshot(learner.adapter_tensors())
        assert moved_share(before, after) > 0.97
        assert all(t.dtype == torch.float32 for t in after.values())
        rounded, lost = {n: (rounded[n].float() + after[n] - before[n]).bfloat16() for n in start}, rounded
        assert moved_share(lost, rounded) < 0.25, "a bf16 master hardly moves"
    drift = torch.cat([(learner.adapter_tensors()[n] - start[n]).flatten() for n in start]).abs().mean()
    bf16_drift = torch.cat([(rounded[n].float() - start[n].bfloat16().float()).flatten() for n in start]).abs().mean()
    assert drift > 2 * bf16_drift


def test_what_is_handed_out_is_no_copy_and_what_is_taken_in_is(decoder) -> None:
    """A version is written without a second copy in memory, and two trainers never share a tensor."""
    learner, twin = trainer(decoder), trainer(decoder, seed=9)
    train(learner, some_batch())
    given = learner.adapter_tensors()
    twin.load_state(learner.state_tensors(), learner.state())
    taken = snapshot(twin.state_tensors())
    train(learner, some_batch())
    assert unchanged(given, learner.adapter_tensors())
    assert unchanged(taken, twin.state_tensors())


# ------------------------------------------------------------------ KL


def test_kl_in_the_loss_alone_pulls_back(exact) -> None:
    """C15: zero advantages, one small step, less KL on the same tokens."""
    settings = replace(SETTINGS, lr=1e-3, kl_coef=1.0, loss=token_mean(kl_coef=1.0))
    learner = trainer(exact, settings, size=0.2)
    what = sampled(learner, some_batch((0.0, 0.0, 0.0)))
    kl = [train(learner, what).metrics["kl_mean"] for _ in range(3)]
    assert kl[0] > kl[1] > kl[2], "one step, and another"


def test_kl_in_the_reward_is_what_each_token_answers_for(exact) -> None:
    settings = replace(EXACT, kl_coef=0.3, kl_placement="reward", micro_batch_tokens=10_000, loss=IN_REWARD)
    learner = trainer(exact, settings, size=0.2)
    what = sampled(learner, some_batch())
    (micro,) = learner.plan(what)
    reference = learner.passes.score(micro, None)
    expected = 0.0
    for q in range(micro.n_seqs):
        own = micro.seq_index == q
        arguments = (micro.advantage[own], micro.old_logp[own], reference[own], micro.loss_mask[own])
        expected -= float(with_kl_penalty(*arguments, 0.3).sum()) / len(micro.target_ids)
    learner.accumulate(micro)
    metrics = learner.step().metrics
    assert metrics["loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["kl_mean"] > 0, "reported wherever it is paid"


def test_kl_in_the_reward_pulls_an_on_policy_run_back(exact, tmp_path) -> None:
    """Equal rewards everywhere, so that the penalty is all there is to learn from."""
    settings = replace(SETTINGS, lr=3e-3, kl_coef=0.5, kl_placement="reward", micro_batch_tokens=4096, loss=IN_REWARD)
    with Rig(exact, tmp_path, settings, options={"max_running": 64}) as rig:
        rig.trainer = trainer(exact, settings, size=0.2)
        kl, previous = [], ""
        prompts = [random_ids(6, i) for i in range(4)]
        for step in range(10):
            name = rig.publish()
            rig.engine.drop_adapter(previous)
            previous = name
            groups = rig.rollouts(prompts, 32, first_group=4 * step, reward=lambda _: 1.0, max_new_tokens=2)
            kl.append(rig.learn(groups).metrics["kl_mean"])
    assert np.mean(kl[-3:]) < 0.6 * kl[0]


# ------------------------------------------------------------------ dropout


def dropping(seed: int = 3, **changes: object) -> TrainerSettings:
    return replace(EXACT, dropout=0.3, seed=seed, **changes)  # pyright: ignore[reportArgumentType]


def test_dropout_is_off_wherever_a_policy_is_measured(decoder) -> None:
    """C23: the same ids twice, unchanged weights, the same bits, and those of a trainer without dropout."""
    with_dropout, without = trainer(decoder, dropping()), trainer(decoder)
    (micro,) = with_dropout.plan(some_batch())[:1]
    adapters = with_dropout._adapter, without._adapter
    first = with_dropout.passes.score(micro, adapters[0])
    train(with_dropout, some_batch((0.0, 0.0, 0.0)))
    assert np.array_equal(first, with_dropout.passes.score(micro, adapters[0]))
    assert np.array_equal(first, without.passes.score(micro, adapters[1]))


def test_dropout_masks_follow_seed_and_step_alone(decoder) -> None:
    def two_steps(seed: int) -> list[Tensor]:
        learner = trainer(decoder, dropping(seed, lr=1e-12))
        moments = []
        for _ in range(2):
            train(learner, some_batch())
            moments.append(first_moment(learner))
        return moments

    one, again, other = two_steps(3), two_steps(3), two_steps(4)
    assert torch.equal(one[0], again[0])
    assert torch.equal(one[1], again[1])
    assert not torch.equal(one[0], one[1]), "another mask each step"
    assert not torch.equal(one[0], other[0])


@pytest.mark.parametrize("seed", [0, 12_345, 2**63 - 1])
def test_any_seed_of_a_run_is_a_seed_for_dropout(decoder, seed) -> None:
    learner = trainer(decoder, dropping(seed))
    assert not train(learner, some_batch()).skipped


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_backward_drops_what_the_forward_dropped(exact, checkpointing) -> None:
    """The loss along a direction changes as the gradient says, under one and the same mask."""
    settings = dropping(activation_checkpointing=checkpointing, micro_batch_tokens=10_000)
    start = random_adapter(exact, SPEC, 0, 0.2)
    generator = torch.Generator().manual_seed(5)
    direction = {n: torch.randn(t.shape, generator=generator) for n, t in start.items()}
    what = some_batch()

    def loss_at(step: float) -> float:
        learner = Trainer(exact, SPEC, {n: t + step * direction[n] for n, t in start.items()}, settings)
        (micro,) = learner.plan(what)
        learner.accumulate(micro)
        return learner.step().metrics["loss"]

    learner = Trainer(exact, SPEC, start, replace(settings, lr=1e-12))
    train(learner, what)
    along = torch.cat([direction[n].flatten() for n in sorted(direction)])
    slope = float(first_moment(learner) @ along)
    measured = (loss_at(1e-3) - loss_at(-1e-3)) / 2e-3
    assert measured == pytest.approx(slope, rel=0.02)
    assert abs(slope) > 1e-3
