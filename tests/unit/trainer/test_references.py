"""Whom the KL is measured against, and how its weight follows it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.decoders import random_ids
from support.learning import SETTINGS, SPEC, batch, group, rollout, snapshot, train, trainer
from tithe.advantages import AdvantagePlan, AdvantageRule, make_advantages
from tithe.errors import ResumeError
from tithe.losses import Aggregation, CorrectionSettings, KLControl, LossSettings, k3
from tithe.models import Decoder
from tithe.trainer import BatchScorer, Reference, ScoringPlan, TrainerSettings
from tithe.types import TrainingBatch

KL = replace(SETTINGS, kl_coef=0.1, loss=LossSettings(Aggregation.TOKEN_MEAN, kl_coef=0.1))


def some_batch() -> TrainingBatch:
    rollouts = [rollout(random_ids(5 + s, s).tolist(), sample=s, reward=float(s)) for s in range(3)]
    return batch([group(random_ids(7), rollouts)])


def test_a_saved_adapter_is_a_reference(decoder: Decoder) -> None:
    learner = trainer(decoder, KL)
    learner.reference = Reference(learner.passes, learner.adapter_tensors(), SPEC)
    bytes_held = learner.memory_bytes() - trainer(decoder, KL).memory_bytes()
    assert bytes_held == sum(t.numel() * 4 for t in learner.adapter_tensors().values())
    kl = [train(learner, some_batch()).metrics["kl_mean"] for _ in range(2)]
    assert kl[0] == 0.0, "the policy itself, to the bit"
    assert kl[1] > 0, "a copy stays where it was"


def test_another_model_is_a_reference(decoder: Decoder, exact: Decoder) -> None:
    base, other = trainer(decoder, KL), trainer(decoder, KL)
    other.reference = Reference.other(exact)
    near, far = (train(learner, some_batch()).metrics["kl_mean"] for learner in (base, other))
    assert near != far
    assert far == pytest.approx(near, rel=0.2), "the same weights, another arithmetic"


def test_a_moving_reference_follows_and_comes_back_from_a_checkpoint(decoder: Decoder) -> None:
    settings = replace(KL, reference_every=2)
    learner, twin = trainer(decoder, settings), trainer(decoder, settings, seed=4)
    kl = [train(learner, some_batch()).metrics["kl_mean"] for _ in range(3)]
    assert kl[0] == kl[2] == 0.0
    assert kl[1] > 0
    twin.load_state(snapshot(learner.state_tensors()), learner.state())
    one, other = (train(t, some_batch()).metrics["kl_mean"] for t in (learner, twin))
    assert one == other > 0
    without = {n: t for n, t in learner.state_tensors().items() if not n.startswith("reference/")}
    with pytest.raises(ResumeError, match="moving reference"):
        twin.load_state(without, learner.state())


def steered(kl_target: float | None) -> TrainerSettings:
    return replace(KL, kl_control=KLControl(kl_target, horizon=3, floor=0.001, ceiling=10.0))


def test_the_weight_rises_above_its_target_falls_below_and_is_part_of_a_checkpoint(decoder: Decoder) -> None:
    strict, loose, fixed = (trainer(decoder, steered(target)) for target in (1e-9, 1e9, None))
    for learner in (strict, loose, fixed):
        assert train(learner, some_batch()).metrics["kl_coef"] == 0.1, "what this step was made with"
    assert strict.kl_coef == pytest.approx(0.1 * 1.2), "a fifth in a horizon of three rollouts"
    assert loose.kl_coef == pytest.approx(0.1 * 0.8)
    assert fixed.kl_coef == 0.1
    twin = trainer(decoder, steered(1e-9), seed=3)
    twin.load_state(snapshot(strict.state_tensors()), strict.state())
    assert twin.kl_coef == strict.kl_coef
    assert train(twin, some_batch()).metrics["kl_coef"] == strict.kl_coef


def test_several_passes_over_a_batch_steer_as_much_as_one(decoder: Decoder) -> None:
    learner = trainer(decoder, replace(steered(1e-9), ppo_epochs=2))
    train(learner, some_batch())
    assert learner.kl_coef == pytest.approx(0.1 * 1.1)


# ------------------------------------------------------------------ scored beforehand


def scored(learner, what: TrainingBatch, **asked: bool):
    scorer = BatchScorer(learner, ScoringPlan(**asked))
    for micro in scorer.plan(what.groups):
        scorer.score(micro)
    return scorer.scores()


def test_at_the_only_step_the_batchs_policy_is_the_policy_itself(exact: Decoder) -> None:
    """So a correction costs no pass of its own."""
    settings = replace(SETTINGS, loss=replace(SETTINGS.loss, correction=CorrectionSettings("tis", high=2.0)))
    once, scorer = trainer(exact, settings), trainer(exact, settings)
    what = some_batch()
    metrics = train(once, what).metrics
    assert (metrics["update_kl"], metrics["ratio_max"]) == (0.0, 1.0)
    prox = scored(scorer, what, prox=True).prox_logp
    assert prox is not None
    logp = torch.cat([torch.from_numpy(row) for row in prox[0] if row is not None])
    assert metrics["sampler_kl"] == pytest.approx(float(k3(torch.full_like(logp, -3.0), logp).mean()), rel=1e-5)
    assert 0 < metrics["weight_mean"] <= 2.0
    again = train(trainer(exact, settings), replace(what, scores=scored(scorer, what, prox=True))).metrics
    assert again["loss"] == pytest.approx(metrics["loss"], rel=1e-6)


def test_a_kl_in_the_reward_is_the_same_scored_beforehand_or_not(exact: Decoder) -> None:
    settings = replace(SETTINGS, kl_coef=0.3, kl_placement="reward", loss=replace(SETTINGS.loss, kl_estimator="k1"))
    before, during = trainer(exact, settings), trainer(exact, settings)
    what = some_batch()
    scores = scored(before, what, reference=True)
    assert scores.kl_coef == 0.3
    made = make_advantages(what.groups, AdvantagePlan(kl_in_reward=True), scores)
    one = train(before, TrainingBatch(what.groups, made.advantages, 0, scores)).metrics
    other = train(during, what).metrics
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
    assert one["kl_mean"] == pytest.approx(other["kl_mean"], rel=1e-5)


def test_a_kl_of_whole_rollouts_is_taken_from_the_reward_before_anything_is_compared(exact: Decoder) -> None:
    """As TRL's RLOO does: of R - kl_coef·Σ k1 of the others' mean."""
    learner, what = trainer(exact, replace(KL, kl_coef=0.3), size=0.3), some_batch()
    scores = scored(learner, what, reference=True)
    assert scores.ref_logp is not None
    plan = AdvantagePlan(AdvantageRule("leave_one_out", "none"), kl_level="sequence", kl_in_reward=True)
    (made,) = make_advantages(what.groups, plan, scores).advantages
    paid = [
        float(r.reward or 0) - 0.3 * float((r.logp.astype(float) - ref.astype(float)).sum())
        for r, ref in zip(what.groups[0].rollouts, scores.ref_logp[0], strict=True)
        if ref is not None
    ]
    wanted = [one - (sum(paid) - one) / 2 for one in paid]
    assert [float(row[0]) for row in made if row is not None] == pytest.approx(wanted, rel=1e-4)


def test_what_a_correction_leaves_out_whole_is_no_part_of_the_baseline(exact: Decoder) -> None:
    """C05, with the same verdict as the loss's own."""
    correction = CorrectionSettings("mis", "geometric", low=0.5, high=2.0)
    learner = trainer(exact, replace(SETTINGS, loss=replace(SETTINGS.loss, correction=correction)))
    ids = [random_ids(4 + s, s).tolist() for s in range(3)]
    plain = batch([group(random_ids(7), [rollout(i, sample=s) for s, i in enumerate(ids)])])
    prox = scored(learner, plain, prox=True).prox_logp
    assert prox is not None
    near = [row for row in prox[0] if row is not None]
    far = [near[0] - 1.0, near[1], near[2] + 0.1]
    rollouts = [
        rollout(i, sample=s, logp=far[s], reward=r) for s, (i, r) in enumerate(zip(ids, (60.0, 1.0, 3.0), strict=True))
    ]
    what = batch([group(random_ids(7), rollouts)])
    scorer = BatchScorer(learner, ScoringPlan(prox=True, rejection=correction))
    for micro in scorer.plan(what.groups):
        scorer.score(micro)
    scores = scorer.scores()
    assert scores.rejected == {(0, 0)}
    (made,) = make_advantages(what.groups, AdvantagePlan(AdvantageRule(scale="none")), scores).advantages
    assert [None if row is None else float(row[0]) for row in made] == [None, -1.0, 1.0]
    metrics = train(learner, what).metrics
    assert metrics["rejected_frac"] == pytest.approx(4 / 15), "the loss by itself leaves the same rollout out"
