"""One batch through a fake trainer: how many steps, what is scored before, what a stop leaves behind."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from tithe.advantages import AdvantagePlan, AdvantageRule, Overlong, make_advantages
from tithe.orchestration import Learner, RunControl, StopReason, UpdatePlan
from tithe.trainer import StepResult
from tithe.types import BatchScores, FinishReason, Rollout, RolloutGroup, TrainingBatch


class HereLane:
    """Runs jobs at once."""

    def call(self, job, *args):
        return job(*args)


@dataclass
class CountingTrainer:
    """A micro-batch per group; `stop_after` jobs a stop is requested. `skips` says which steps are skipped."""

    control: RunControl
    stop_after: int = 10**9
    skips: tuple[int, ...] = ()
    planned: list[TrainingBatch] = field(default_factory=list)
    accumulated: int = 0
    steps: int = 0

    def plan(self, batch: TrainingBatch) -> list[int]:
        self.planned.append(batch)
        return [group.group_id for group in batch.groups]

    def accumulate(self, _micro: int) -> None:
        self.accumulated += 1
        if self.accumulated == self.stop_after:
            self.control.request_stop(StopReason.SIGNAL)

    def step(self) -> StepResult:
        self.steps += 1
        skipped = self.steps in self.skips
        metrics = {"loss": float(self.steps), "ratio_max": float(-self.steps), "lr": 0.1 * self.steps}
        metrics["rank_peak_bytes"] = 100.0 * self.steps
        return StepResult(metrics | {"train_compute_s": 2.0}, skipped=skipped)


class Scorer:
    """Scores every group with its number; counts."""

    def __init__(self, control: RunControl, *, stops: bool = False) -> None:
        self.control, self.stops, self.seen = control, stops, 0

    def plan(self, groups):
        self.groups = groups
        return list(groups)

    def score(self, _micro) -> None:
        self.seen += 1
        if self.stops:
            self.control.request_stop(StopReason.SIGNAL)

    def scores(self) -> BatchScores:
        value = [[np.zeros(len(r.token_ids), np.float32) for r in g.rollouts] for g in self.groups]
        return BatchScores(value=value, kl_coef=0.1, rejected=frozenset({(0, 0)}))


def groups(n: int, tokens: int = 3) -> list[RolloutGroup]:
    def rollout(sample: int) -> Rollout:
        zeros = np.zeros(tokens, np.float32)
        ids = np.ones(tokens, np.int32)
        return Rollout(sample, ids, ids > 0, zeros, zeros, ids, 1.0, FinishReason.STOP, reward=float(sample))

    return [RolloutGroup(g, f"p{g}", np.array([1], np.int32), (rollout(0), rollout(1)), 0, 0) for g in range(n)]


def learner(trainer, control, **plan) -> Learner:
    scorer, advantages = plan.pop("scorer", None), plan.pop("advantages", AdvantagePlan())
    return Learner(
        trainer=trainer,
        lane=HereLane(),
        advantages=lambda given, scores, whole: make_advantages(given, advantages, scores, whole),
        control=control,
        update=UpdatePlan(**plan),
        scorer=scorer,
    )


def test_one_step_is_passed_on_as_it_is() -> None:
    control = RunControl()
    trainer = CountingTrainer(control)
    result = learner(trainer, control).learn(groups(4), 7)
    assert result is not None
    assert result.metrics == {
        "loss": 1.0,
        "ratio_max": -1.0,
        "lr": 0.1,
        "rank_peak_bytes": 100.0,
        "train_compute_s": 2.0,
    }
    assert (trainer.steps, trainer.accumulated) == (1, 4)
    assert (trainer.planned[0].serial, trainer.planned[0].scores) == (7, None)


def test_passes_and_mini_batches_see_every_group_and_are_told_as_one() -> None:
    control = RunControl()
    trainer = CountingTrainer(control)
    result = learner(trainer, control, ppo_epochs=2, mini_batches=2).learn(groups(4), 0)
    assert result is not None
    assert [[g.group_id for g in part.groups] for part in trainer.planned] == [[0, 1], [2, 3]] * 2
    assert result.metrics == {
        "loss": 2.5,
        "ratio_max": -1.0,
        "lr": pytest.approx(0.4),
        "rank_peak_bytes": 400.0,
        "train_compute_s": 8.0,
        "optimizer_steps": 4.0,
        "skipped_steps": 0.0,
    }


@pytest.mark.parametrize(("skips", "skipped", "mean"), [((2,), False, 8 / 3), ((1, 2, 3, 4), True, 2.5)])
def test_a_batch_is_skipped_when_every_step_was(skips: tuple[int, ...], skipped: bool, mean: float) -> None:
    control = RunControl()
    trainer = CountingTrainer(control, skips=skips)
    result = learner(trainer, control, ppo_epochs=4).learn(groups(1), 0)
    assert result is not None
    assert (result.skipped, result.metrics["loss"]) == (skipped, pytest.approx(mean))
    assert result.metrics["skipped_steps"] == (len(skips) if not skipped else 0)


def test_a_stop_before_the_first_step_abandons_the_batch_and_after_it_finishes_it() -> None:
    """Half a batch could be neither trained again nor counted."""
    for stop_after, steps, done in ((1, 0, False), (5, 4, True)):
        control = RunControl()
        trainer = CountingTrainer(control, stop_after=stop_after)
        result = learner(trainer, control, ppo_epochs=2, mini_batches=2).learn(groups(4), 0)
        assert (result is not None, trainer.steps) == (done, steps)


def test_a_batch_is_scored_once_and_all_of_its_steps_know() -> None:
    control = RunControl()
    trainer, scorer = CountingTrainer(control), Scorer(control)
    result = learner(trainer, control, mini_batches=2, scorer=scorer).learn(groups(4), 0)
    assert scorer.seen == 4
    assert result is not None
    assert result.metrics["rejected_rollouts"] == 1.0
    first, second = trainer.planned
    assert first.advantages[0][0] is None, "left out whole: no advantage, and no part of a baseline"
    assert first.scores is not None
    assert first.scores.returns is not None
    assert second.scores is not None
    assert second.scores.value is not None
    assert len(second.scores.value) == 2


def test_a_stop_while_scoring_abandons_the_batch() -> None:
    control = RunControl()
    trainer, scorer = CountingTrainer(control), Scorer(control, stops=True)
    assert learner(trainer, control, scorer=scorer).learn(groups(4), 0) is None
    assert (scorer.seen, trainer.planned) == (1, [])


def test_what_is_not_trained_of_long_rollouts_is_told() -> None:
    control = RunControl()
    trainer = CountingTrainer(control)
    result = learner(trainer, control, max_train_tokens=2, row_bytes=10).learn(groups(2), 0)
    assert result is not None
    assert (result.metrics["train_cut_rollouts"], result.metrics["train_cut_bytes"]) == (4.0, 40.0)
    assert {len(r.token_ids) for g in trainer.planned[0].groups for r in g.rollouts} == {2}


def test_an_answer_is_punished_for_its_whole_length_though_only_its_beginning_is_trained() -> None:
    """Sample 0 has 10 tokens of at most 10, sample 1 has 3: of both the first 2 are trained."""
    control = RunControl()
    trainer = CountingTrainer(control)
    plan = AdvantagePlan(AdvantageRule(scale="none"), Overlong("punish", max_tokens=10, buffer=2))
    (group,) = groups(1, tokens=10)
    long, short = group.rollouts
    short = groups(1, tokens=3)[0].rollouts[1]
    mixed = RolloutGroup(0, "p0", group.prompt_ids, (long, short), 0, 0)
    learner(trainer, control, max_train_tokens=2, advantages=plan).learn([mixed], 0)
    first, second = trainer.planned[0].advantages[0]
    assert first is not None
    assert second is not None
    assert (first.tolist(), second.tolist()) == ([-1.0, -1.0], [1.0, 1.0]), "rewards 0 - 1 and 1 - 0"
