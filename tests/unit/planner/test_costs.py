"""Step costs: the worked example, experts' coverage, what hides behind what."""

from __future__ import annotations

import dataclasses

import pytest

from tithe.planner import StepCosts

COSTS = StepCosts(
    prefill_s_per_token=2e-5,
    decode_fixed_s=5e-3,
    decode_dense_s=2e-3,
    decode_experts_s=1e-2,
    n_experts=384,
    experts_per_token=8,
    decode_s_per_sequence=4e-6,
    decode_exposed_s_per_sequence=1e-5,
    decode_s_per_cached_token=1e-9,
    train_s_per_token=1e-4,
    publish_s=0.5,
    reward_s_per_rollout=0.0,
)


def test_the_worked_example_of_the_docstring():
    assert COSTS.decode_tick_s(1) == pytest.approx(7.2e-3, rel=0.01)
    assert COSTS.decode_tick_s(64) == pytest.approx(15.04e-3, rel=0.01)
    assert COSTS.decode_tick_s(0) == 0.0


def test_coverage_of_experts_grows_from_k_of_e_towards_all():
    shares = [COSTS.expert_coverage(n) for n in (1, 8, 64, 4096)]
    assert shares[0] == pytest.approx(8 / 384)
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)


def test_arithmetic_hides_behind_reading_until_it_exceeds_it():
    slow = dataclasses.replace(COSTS, decode_s_per_sequence=1e-3)
    assert slow.decode_tick_s(2) == COSTS.decode_tick_s(2)
    assert slow.decode_tick_s(64) == pytest.approx(5e-3 + 64e-3 + 64 * 1e-5)


def test_cached_tokens_cost_their_reading():
    assert COSTS.decode_tick_s(8, 1000) - COSTS.decode_tick_s(8) == pytest.approx(8 * 1000 * 1e-9)
