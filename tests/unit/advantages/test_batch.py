"""Advantages per token: groups by identity, failures left out, the KL penalty's exact gradient."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from tithe.advantages import batch_advantages, with_kl_penalty
from tithe.errors import Failure, FailureCause
from tithe.types import FinishReason, Rollout, RolloutGroup


def make_rollout(reward: float | None, n: int = 2, failure: Failure | None = None) -> Rollout:
    zeros = np.zeros(n, np.float32)
    ids, on, serials = np.ones(n, np.int32), np.ones(n, np.bool_), np.zeros(n, np.int32)
    return Rollout(0, ids, on, zeros, zeros, serials, 1.0, FinishReason.STOP, reward=reward, failure=failure)


def make_group(rewards: list[float | None], prompt: list[int] | None = None) -> RolloutGroup:
    ids = np.array([7, 8] if prompt is None else prompt, np.int32)
    return RolloutGroup(0, "same prompt", ids, tuple(make_rollout(r) for r in rewards), 0, 0)


def first_tokens(advantages: list[list[NDArray[np.float32] | None]]) -> list[list[float | None]]:
    return [[None if a is None else float(a[0]) for a in group] for group in advantages]


def test_groups_of_one_text_stay_apart() -> None:
    """C03: merging the two would give -0.5 and +0.5."""
    groups = [make_group([0.0] * 4), make_group([1.0] * 4)]
    assert first_tokens(batch_advantages(groups, "std")) == [[0.0] * 4, [0.0] * 4]


def test_one_group_of_four_prompts_that_differ_is_one_group() -> None:
    """C03: what was sampled together is compared together."""
    (advantages,) = first_tokens(batch_advantages([make_group([1.0, 0.0, 0.0, 0.0])], "std"))
    assert advantages == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_failed_unscored_and_rejected_are_left_out() -> None:
    crash = Failure(FailureCause.REWARD, "ZeroDivisionError: division by zero")
    rollouts = (make_rollout(1.0, 3), make_rollout(9.0, failure=crash), make_rollout(None), make_rollout(3.0, 1))
    group = RolloutGroup(0, "p", np.array([1], np.int32), rollouts, 0, 0)
    assert first_tokens(batch_advantages([group], "none")) == [[-1.0, None, None, 1.0]]
    assert first_tokens(batch_advantages([group], "none", rejected={(0, 0)})) == [[None, None, None, 0.0]]


def test_arrays_are_fp32_of_the_rollouts_length() -> None:
    rollouts = (make_rollout(1.0, 3), make_rollout(0.0, 0), make_rollout(0.0, 1))
    group = RolloutGroup(0, "p", np.array([1], np.int32), rollouts, 0, 0)
    (advantages,) = batch_advantages([group], "std")
    assert [(a.shape, a.dtype) for a in advantages if a is not None] == [((n,), np.float32) for n in (3, 0, 1)]


def log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_kl_penalty_has_the_gradient_of_the_kl_over_whole_rollouts() -> None:
    """Every two-token rollout over three tokens, weighted by its probability, against central differences of the KL."""
    draw = np.random.default_rng(5)
    logits, reference = draw.normal(size=(4, 3)), log_softmax(draw.normal(size=(4, 3)))
    coef = 0.3  # row 0 predicts the first token, row 1 + first token the second

    def rollouts_kl(table: NDArray[np.float64]) -> float:
        logp = log_softmax(table)
        pairs = itertools.product(range(3), repeat=2)
        terms = [(logp[0, a] + logp[1 + a, b], reference[0, a] + reference[1 + a, b]) for a, b in pairs]
        return sum(np.exp(p) * (p - q) for p, q in terms)

    logp = log_softmax(logits)
    gradient = np.zeros_like(logits)
    for a, b in itertools.product(range(3), repeat=2):
        rows, tokens = np.array([0, 1 + a]), np.array([a, b])
        own, ref = logp[rows, tokens], reference[rows, tokens]
        zero, on = np.zeros(2, np.float32), np.ones(2, np.bool_)
        penalised = with_kl_penalty(zero, own.astype(np.float32), ref.astype(np.float32), on, coef)
        for row, token, advantage in zip(rows, tokens, penalised, strict=True):
            gradient[row] += np.exp(own.sum()) * float(advantage) * (np.eye(3)[token] - np.exp(logp[row]))
    step = 1e-5
    numeric = np.zeros_like(logits)
    for index in np.ndindex(*logits.shape):
        up, down = logits.copy(), logits.copy()
        up[index] += step
        down[index] -= step
        numeric[index] = -coef * (rollouts_kl(up) - rollouts_kl(down)) / (2 * step)
    assert gradient == pytest.approx(numeric, abs=2e-7)


def test_kl_penalty_skips_text_the_model_did_not_write() -> None:
    """C13: whatever a tool token's log-probabilities are, NaN included."""
    mask = np.array([True, False, True])
    logp, ref = np.array([-1, np.nan, -1], np.float32), np.array([-2, -np.inf, -3], np.float32)
    out = with_kl_penalty(np.zeros(3, np.float32), logp, ref, mask, 0.5)
    assert out.tolist() == [-1.5, -1.0, -1.0]
    assert out.dtype == np.float32


def test_kl_penalty_of_a_stale_token_stays_finite() -> None:
    """C17: a difference of 92 nats is a large number and nothing worse."""
    one = np.ones(1, np.float32)
    assert with_kl_penalty(one, -3 * one, -95 * one, one > 0, 0.01).tolist() == pytest.approx([0.08])


def test_kl_penalty_names_bad_input() -> None:
    one, two = np.ones(1, np.float32), np.ones(2, np.float32)
    with pytest.raises(ValueError, match=r"lengths \[1, 2\]"):
        with_kl_penalty(one, two, two, two > 0, 0.1)
    with pytest.raises(ValueError, match="at least 0"):
        with_kl_penalty(one, one, one, one > 0, -0.1)
