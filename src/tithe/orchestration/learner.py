"""One batch through the trainer: scored, planned, accumulated micro-batch by micro-batch on the lane, stepped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tithe.advantages import BatchAdvantages
from tithe.orchestration.control import RunControl
from tithe.packing import Cut, cut_rollouts, split_batch
from tithe.types import BatchScores, RolloutGroup, TrainingBatch

if TYPE_CHECKING:  # they need torch, which this room must not load
    from tithe.models import Lane
    from tithe.trainer import BatchScorer, FullTrainer, LeadingScorer, LeadingTrainer, StepResult, TrainerSettings

AdvantagesFn = Callable[[Sequence[RolloutGroup], BatchScores | None, Sequence[RolloutGroup]], BatchAdvantages]
"""Groups as they are trained, what was scored of them, and the groups before their long rollouts were cut →
advantages, e.g. `advantages.make_advantages` with its plan bound."""


@dataclass(frozen=True)
class UpdatePlan:
    """How often a batch is used: `ppo_epochs` passes of `mini_batches` optimizer steps each. `max_train_tokens` trains
    only the beginning of longer completions, which saves `row_bytes` of kept activations per token left out."""

    ppo_epochs: int = 1
    mini_batches: int = 1
    max_train_tokens: int | None = None
    row_bytes: int = 0


class Learner:
    """Turns leased groups into one or several optimizer steps. Between two micro-batches the lane is free for the
    sampler.

    `settings_at` gives the trainer's settings for a batch that begins at a serial (learning rate and KL coefficient of
    a schedule); None keeps those it was made with.
    """

    def __init__(
        self,
        *,
        trainer: LeadingTrainer | FullTrainer,
        lane: Lane,
        advantages: AdvantagesFn,
        control: RunControl,
        settings_at: Callable[[int], TrainerSettings] | None = None,
        update: UpdatePlan | None = None,
        scorer: BatchScorer | LeadingScorer | None = None,
    ) -> None:
        self._trainer = trainer
        self._lane = lane
        self._advantages = advantages
        self._control = control
        self._settings_at = settings_at
        self._update = update or UpdatePlan()
        self._scorer = scorer

    def learn(self, groups: Sequence[RolloutGroup], serial: int) -> StepResult | None:
        """Train on one batch that begins at `serial`. None when the run is stopping and no optimizer step was taken
        yet: the micro-batches that are left are abandoned, and the next batch's plan starts from zero gradients. Once a
        step was taken the batch is finished: half a batch could be neither trained again nor counted as trained.
        """
        if self._settings_at is not None:
            self._trainer.settings = self._settings_at(serial)
        whole, cut = groups, Cut()
        if self._update.max_train_tokens is not None:
            groups, cut = cut_rollouts(groups, self._update.max_train_tokens)
        scores = self._scored(groups)
        if scores is None and self._scorer is not None:
            return None
        made = self._advantages(groups, scores, whole)
        if scores is not None:
            scores = replace(scores, returns=made.returns if scores.value is not None else None)
        batch = TrainingBatch(groups, made.advantages, serial, scores)
        results: list[StepResult] = []
        for _ in range(self._update.ppo_epochs):
            for part in split_batch(batch, self._update.mini_batches):
                for micro in self._lane.call(self._trainer.plan, part):
                    if self._control.stopping and not results:
                        return None
                    self._lane.call(self._trainer.accumulate, micro)
                results.append(self._lane.call(self._trainer.step))
        return _together(results, self._extra(cut, scores))

    def _scored(self, groups: Sequence[RolloutGroup]) -> BatchScores | None:
        """None where nothing is asked beforehand, or the run is stopping."""
        if self._scorer is None:
            return None
        for micro in self._lane.call(self._scorer.plan, groups):
            if self._control.stopping:
                return None
            self._lane.call(self._scorer.score, micro)
        return self._lane.call(self._scorer.scores)

    def _extra(self, cut: Cut, scores: BatchScores | None) -> dict[str, float]:
        row: dict[str, float] = {}
        if self._update.max_train_tokens is not None:
            row["train_cut_rollouts"] = float(cut.rollouts)
            row["train_cut_bytes"] = float(cut.tokens * self._update.row_bytes)
        if scores is not None and scores.rejected:
            row["rejected_rollouts"] = float(len(scores.rejected))
        return row


def _together(results: Sequence[StepResult], extra: dict[str, float]) -> StepResult:
    """The steps of one batch as one: means of their metrics, the largest of `…_max` and `…_peak_bytes`, the last `lr`
    and `kl_coef`, the sum of their times. Skipped when every step was."""
    first = results[0]
    if len(results) == 1:
        return replace(first, metrics={**first.metrics, **extra})
    taken = [result for result in results if not result.skipped] or list(results)
    row: dict[str, float] = {}
    for name in dict.fromkeys(name for result in taken for name in result.metrics):
        values = [result.metrics[name] for result in taken if name in result.metrics]
        if name.endswith(("_max", "_peak_bytes")):
            row[name] = max(values)
        elif name.endswith("_compute_s"):
            row[name] = sum(values)
        elif name in ("lr", "kl_coef"):
            row[name] = values[-1]
        else:
            row[name] = sum(values) / len(values)
    row |= {"optimizer_steps": float(len(taken)), "skipped_steps": float(len(results) - len(taken)), **extra}
    return replace(first, metrics=row, skipped=all(result.skipped for result in results))
