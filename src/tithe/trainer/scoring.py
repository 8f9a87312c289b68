"""Scoring a batch before it is trained, where an algorithm or a correction needs to know something beforehand.

Shape legend: _N targets of one micro-batch, _T completion tokens of one rollout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tithe.losses import CorrectionSettings
from tithe.packing import MicroBatch, plan_micro_batches
from tithe.trainer.full import FullTrainer
from tithe.trainer.trainer import Trainer
from tithe.types import BatchScores, Rollout, RolloutGroup, TrainingBatch

Scored = list[list[np.ndarray | None]]


@dataclass(frozen=True)
class ScoringPlan:
    """What is asked of a batch beforehand: the policy as the batch begins (`prox`), the reference, the critic's
    values; and which correction leaves out whole rollouts."""

    prox: bool = False
    reference: bool = False
    value: bool = False
    rejection: CorrectionSettings | None = None

    @property
    def asks(self) -> bool:
        """Whether anything is."""
        return self.prox or self.reference or self.value


class BatchScorer:
    """`plan` a batch, `score` each micro-batch on the lane, take the `scores`. Several ranks share the micro-batches,
    call the same methods, and have the same scores afterwards."""

    def __init__(self, trainer: Trainer | FullTrainer, plan: ScoringPlan) -> None:
        self._trainer, self._plan = trainer, plan
        self._asked: dict[str, Callable[[MicroBatch], np.ndarray]] = {}
        if plan.prox:
            self._asked["prox_logp"] = trainer.score_policy
        if plan.reference:
            self._asked["ref_logp"] = trainer.score_reference
        if plan.value:
            assert isinstance(trainer, Trainer)
            assert trainer.critic is not None
            self._asked["value"] = trainer.critic.values
        self._found: dict[str, Scored] = {}
        self._groups: Sequence[RolloutGroup] = ()

    def plan(self, groups: Sequence[RolloutGroup]) -> list[MicroBatch]:
        """This rank's micro-batches of all rollouts that may be trained; as many on every rank."""
        ones = [[_ones(rollout) for rollout in group.rollouts] for group in groups]
        self._groups, ranks = groups, self._trainer.ranks
        self._found = {
            name: [[None if one is None else np.zeros_like(one) for one in group] for group in ones]
            for name in self._asked
        }
        micros = plan_micro_batches(TrainingBatch(groups, ones, 0), self._trainer.settings.micro_batch_tokens)
        blank = [self._trainer.blank(micros[-1])] * (-len(micros) % ranks.size) if micros else []
        return [*micros, *blank][ranks.rank :: ranks.size]

    def score(self, micro: MicroBatch) -> None:
        """One micro-batch. On the lane."""
        for name, score in self._asked.items():
            values_N = score(micro)
            for q in range(micro.n_seqs if micro.loss_mask.any() else 0):
                values_T = values_N[micro.seq_index == q].astype(np.float32)
                self._found[name][micro.seq_group[q]][micro.seq_rollout[q]] = values_T

    def scores(self) -> BatchScores:
        """What was found, and the KL's weight now."""
        found = [one for scored in self._found.values() for row in scored for one in row if one is not None]
        self._trainer.ranks.sum([torch.from_numpy(one) for one in found])  # one rank's and zeros; in place
        rejection, prox = self._plan.rejection, self._found.get("prox_logp")
        rejected = frozenset[tuple[int, int]]()
        if rejection is not None and prox is not None:
            rejected = rejected_rollouts(self._groups, prox, rejection)
        return BatchScores(
            prox_logp=prox,
            ref_logp=self._found.get("ref_logp"),
            value=self._found.get("value"),
            kl_coef=self._trainer.kl_coef,
            rejected=rejected,
        )


def _ones(rollout: Rollout) -> np.ndarray | None:
    usable = rollout.failure is None and rollout.reward is not None
    return np.ones(len(rollout.token_ids), np.float32) if usable and rollout.loss_mask.any() else None


def rejects_whole_rollouts(correction: CorrectionSettings) -> bool:
    """Whether what a correction leaves out is known of whole rollouts: then they must not be part of a baseline."""
    return correction.name == "mis" and (correction.level != "token" or correction.veto is not None)


def rejected_rollouts(
    groups: Sequence[RolloutGroup], prox: Scored, correction: CorrectionSettings
) -> frozenset[tuple[int, int]]:
    """(group index, rollout index) of the rollouts that `losses.corrections.mis` leaves out whole, found beforehand: a
    rollout that is not trained must have no part in its group's baseline."""
    found = set[tuple[int, int]]()
    for g, group in enumerate(groups):
        for r, rollout in enumerate(group.rollouts):
            prox_T = prox[g][r]
            if prox_T is not None and rollout.loss_mask.any():
                ratio_T = (prox_T.astype(np.float64) - rollout.logp_behaviour)[rollout.loss_mask]
                if _out_of_bounds(ratio_T, correction):
                    found.add((g, r))
    return frozenset(found)


def _out_of_bounds(log_ratio_T: np.ndarray, correction: CorrectionSettings) -> bool:
    if correction.veto is not None and log_ratio_T.min() < math.log(correction.veto):
        return True
    if correction.level == "token":
        return False
    whole = float(log_ratio_T.sum() if correction.level == "sequence" else log_ratio_T.mean())
    weight = math.exp(min(max(whole, -20.0), 20.0))
    return weight < correction.low or (correction.high is not None and weight > correction.high)
