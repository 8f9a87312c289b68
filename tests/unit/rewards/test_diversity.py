"""Likeness of completions against a slow reference, and what it costs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tithe.errors import Failure, FailureCause
from tithe.rewards import mean_overlap, penalise_likeness, score_of, unpenalised
from tithe.types import FinishReason, Rollout

texts = st.lists(st.lists(st.integers(0, 2**21 - 2) | st.integers(0, 3), max_size=12), min_size=1, max_size=5)


def slow(texts: list[list[int]]) -> list[float]:
    def grams(text):
        return {tuple(text[i : i + 3]) for i in range(len(text) - 2)} if len(text) >= 3 else {tuple(text)}

    sets = [grams(text) for text in texts]
    others = [[len(a & b) / len(a | b) for j, b in enumerate(sets) if j != i] for i, a in enumerate(sets)]
    return [sum(row) / len(row) if row else 0.0 for row in others]


def arrays(texts):
    return [np.array(text, np.int32) for text in texts]


@given(texts=texts)
def test_overlap_is_the_mean_jaccard_index_of_the_sets_of_trigrams(texts):
    np.testing.assert_allclose(mean_overlap(arrays(texts)), slow(texts), atol=1e-12)


def rollout(sample, ids, reward=1.0, failure=None):
    n = len(ids)
    numbers = np.zeros(n, np.float32)
    return Rollout(
        sample, np.array(ids, np.int32), np.ones(n, bool), numbers, numbers, np.zeros(n, np.int32), 1.0,
        FinishReason.STOP, reward=reward, reward_parts={"answer": reward or 0.0}, failure=failure,
    )  # fmt: skip


def test_copies_pay_and_the_one_that_differs_does_not():
    group = [rollout(0, [1, 2, 3, 4]), rollout(1, [1, 2, 3, 4]), rollout(2, [9, 8, 7, 6])]
    charged = penalise_likeness(group, 0.4)
    assert [r.reward for r in charged] == pytest.approx([0.8, 0.8, 1.0])
    for r in charged:
        assert sum(r.reward_parts.values()) == pytest.approx(r.reward)
        assert set(r.reward_parts) == {"answer", "group.diversity"}
        assert unpenalised(r) == pytest.approx(1.0)
        assert score_of(r) == pytest.approx(1.0), "a solved prompt is known as solved"


def test_only_scored_rollouts_are_compared_and_charged():
    failed = rollout(1, [1, 2, 3], failure=Failure(FailureCause.TIMEOUT, "late"))
    abstained = rollout(2, [1, 2, 3], reward=None)
    charged = penalise_likeness([rollout(0, [1, 2, 3]), failed, abstained], 1.0)
    assert charged[0].reward == 1.0
    assert charged[1:] == (failed, abstained)
    assert unpenalised(charged[2]) is None
