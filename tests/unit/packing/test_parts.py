"""Parts of a batch, and beginnings of rollouts."""

from __future__ import annotations

import numpy as np
import pytest

from tithe.packing import Cut, cut_rollouts, plan_micro_batches, split_batch
from tithe.types import BatchScores, FinishReason, Rollout, RolloutGroup, TrainingBatch


def a_rollout(sample: int, n: int, prompt: int = 2) -> Rollout:
    ids = np.arange(n, dtype=np.int32)
    logp = -np.arange(n, dtype=np.float32)
    experts = np.arange((prompt + n - 1) * 2, dtype=np.uint16).reshape(-1, 1, 2)
    return Rollout(sample, ids, ids >= 0, logp, logp - 1, ids, 1.0, FinishReason.STOP, reward=1.0, experts=experts)


def groups_of(lengths: list[list[int]]) -> list[RolloutGroup]:
    prompt = np.array([7, 8], np.int32)
    return [
        RolloutGroup(g, f"p{g}", prompt, tuple(a_rollout(s, n) for s, n in enumerate(row)), 0, 0)
        for g, row in enumerate(lengths)
    ]


def a_batch(n_groups: int, scores: BatchScores | None = None) -> TrainingBatch:
    groups = groups_of([[2, 3]] * n_groups)
    advantages = [[np.full(len(r.token_ids), float(g.group_id), np.float32) for r in g.rollouts] for g in groups]
    return TrainingBatch(groups, advantages, 5, scores)


@pytest.mark.parametrize(
    ("n_groups", "parts", "sizes"), [(4, 2, [2, 2]), (5, 2, [2, 3]), (3, 8, [1, 1, 1]), (2, 1, [2])]
)
def test_parts_hold_every_group_once_in_order(n_groups: int, parts: int, sizes: list[int]) -> None:
    value = [[np.full(2, g, np.float32), np.full(3, g, np.float32)] for g in range(n_groups)]
    split = split_batch(a_batch(n_groups, BatchScores(value=value, kl_coef=0.5)), parts)
    assert [len(part.groups) for part in split] == sizes
    assert [group.group_id for part in split for group in part.groups] == list(range(n_groups))
    for part in split:
        assert part.scores is not None
        assert (part.serial, part.scores.kl_coef, part.scores.ref_logp) == (5, 0.5, None)
        for micro in plan_micro_batches(part, 100):
            assert micro.old_value is not None
            assert np.array_equal(micro.old_value, micro.advantage), "scores and advantages stay with their groups"


def test_only_the_beginning_of_a_long_rollout_is_left() -> None:
    groups, cut = cut_rollouts(groups_of([[3, 8], [5, 2]]), 4)
    assert cut == Cut(tokens=5, rollouts=2)
    assert [[len(r.token_ids) for r in g.rollouts] for g in groups] == [[3, 4], [4, 2]]
    long = groups[0].rollouts[1]
    assert (long.token_ids.tolist(), long.logp.tolist()) == ([0, 1, 2, 3], [0, -1, -2, -3])
    assert long.experts is not None
    assert len(long.experts) == 2 + 4 - 1
    assert (long.reward, long.finish) == (1.0, FinishReason.STOP)
    advantages = [[np.ones(len(r.token_ids), np.float32) for r in g.rollouts] for g in groups]
    (micro,) = plan_micro_batches(TrainingBatch(groups, advantages, 0), 100)
    assert len(micro.target_ids) == 13


def test_short_rollouts_stay_as_they_are() -> None:
    groups = groups_of([[3, 2]])
    same, cut = cut_rollouts(groups, 3)
    assert cut == Cut()
    assert same[0] is groups[0]


def test_what_was_drawn_from_less_than_the_vocabulary_says_so() -> None:
    batch = a_batch(1)
    (micro,) = plan_micro_batches(batch, 100)
    assert micro.behaviour_logp is not None
    assert np.array_equal(micro.behaviour_logp, micro.old_logp - 1)
    assert (micro.prox_logp, micro.returns) == (None, None)


def test_a_rollout_without_scores_cannot_be_trained() -> None:
    scores = BatchScores(prox_logp=[[np.zeros(2, np.float32), None]])
    with pytest.raises(ValueError, match="rollout 1 of group 0 was not scored"):
        plan_micro_batches(a_batch(1, scores), 100)
