"""Scoring a batch before it is trained, where an algorithm or a correction needs to know something beforehand.

Shape legend: _N targets of one micro-batch, _T completion tokens of one rollout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

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
    """`plan` a batch, `score` each micro-batch on the lane, take the `scores`.

    Several ranks share the micro-batches: rank 0 knows the batch, shares it out and takes the scores, to which the
    others `contribute` what they found.
    """

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
        self._groups: Sequence[RolloutGroup] = ()
        self._parts: list[list[MicroBatch]] = []
        self._found: list[np.ndarray] = []
        """What this rank has found: per micro-batch with rows of its own float32 [asked, N]."""

    def plan(self, groups: Sequence[RolloutGroup]) -> list[MicroBatch]:
        """Rank 0's own micro-batches; the others' are those of `share_out`."""
        own = self.share_out(groups)[0]
        self.begin()
        return own

    def share_out(self, groups: Sequence[RolloutGroup]) -> list[list[MicroBatch]]:
        """By rank: micro-batches of all rollouts that may be trained, as many for each."""
        ones = [[_ones(rollout) for rollout in group.rollouts] for group in groups]
        size = self._trainer.ranks.size
        micros = plan_micro_batches(TrainingBatch(groups, ones, 0), self._trainer.settings.micro_batch_tokens)
        blank = [self._trainer.blank(micros[-1])] * (-len(micros) % size) if micros else []
        self._groups, self._parts = groups, [[*micros, *blank][rank::size] for rank in range(size)]
        return self._parts

    def begin(self) -> None:
        """A new batch: nothing found yet."""
        self._found = []

    def score(self, micro: MicroBatch) -> None:
        """One micro-batch. On the lane."""
        found = [score(micro) for score in self._asked.values()]
        if micro.loss_mask.any():
            self._found.append(np.stack(found).astype(np.float32, copy=False))

    def contribute(self) -> None:
        """On a rank other than 0: tell rank 0 what was found here."""
        self._trainer.ranks.collect(b"".join(one.tobytes() for one in self._found))
        self._found = []

    def scores(self) -> BatchScores:
        """On rank 0: what all ranks have found, and the KL's weight now."""
        found = self._collected()
        rejection, prox = self._plan.rejection, found.get("prox_logp")
        rejected = frozenset[tuple[int, int]]()
        if rejection is not None and prox is not None:
            rejected = rejected_rollouts(self._groups, prox, rejection)
        return BatchScores(
            prox_logp=prox,
            ref_logp=found.get("ref_logp"),
            value=found.get("value"),
            kl_coef=self._trainer.kl_coef,
            rejected=rejected,
        )

    def _collected(self) -> dict[str, Scored]:
        """By what was asked: per group and rollout float32 [T], None where nothing was."""
        out: dict[str, Scored] = {
            name: [[None] * len(group.rollouts) for group in self._groups] for name in self._asked
        }
        planned = [[micro for micro in part if micro.loss_mask.any()] for part in self._parts]
        n_bytes = [sum(4 * len(self._asked) * len(micro.target_ids) for micro in part) for part in planned]
        told = self._trainer.ranks.collect(b"".join(one.tobytes() for one in self._found), n_bytes)
        for part, data in zip(planned, told, strict=True):
            values, at = np.frombuffer(bytearray(data), np.float32), 0
            for micro in part:
                n = len(micro.target_ids)
                for name in self._asked:
                    _put(out[name], micro, values[at : at + n])
                    at += n
        self._found = []
        return out


def _put(out: Scored, micro: MicroBatch, values_N: np.ndarray) -> None:
    for q in range(micro.n_seqs):
        out[micro.seq_group[q]][micro.seq_rollout[q]] = values_N[micro.seq_index == q]


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
