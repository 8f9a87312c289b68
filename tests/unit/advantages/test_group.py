"""Group advantages: public numbers, exact zeros, and who has a say in the baseline."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tithe.advantages import SCALES, group_advantages
from tithe.errors import ConfigError

# (rewards, verl at 1dda039 `compute_grpo_outcome_advantage`, TRL at f2cd577: scale_rewards "group", epsilon 1e-4)
PUBLIC = [
    ([1.0, 0, 0, 0], [1.499997, *[-0.499999] * 3], [1.49970006, *[-0.49990002] * 3]),
    (
        [0.3, -0.5, 1.2, 0.3, 0.9],
        [-0.213995917, -1.436829729, 1.161692121, -0.213995917, 0.703129442],
        [-0.213963539, -1.436612333, 1.161516354, -0.213963539, 0.703023056],
    ),
    (
        [1.0, 1, 0, 0, 0, 0, 0, -0.5],
        [1.532061804, 1.532061804, *[-0.353552724] * 5, -1.296359988],
        [1.531775858, 1.531775858, *[-0.353486736] * 5, -1.296118034],
    ),
]


@pytest.mark.parametrize(("rewards", "verl", "trl"), PUBLIC)
def test_public_numbers(rewards: list[float], verl: list[float], trl: list[float]) -> None:
    given_ = group_advantages(rewards, "std")
    assert given_ == pytest.approx(verl, abs=1e-9)
    assert given_ == pytest.approx(trl, rel=3e-4)


def test_unscaled_is_the_plain_difference() -> None:
    assert group_advantages([0.3, -0.5, 1.2, 0.3, 0.9], "none") == pytest.approx([-0.14, -0.94, 0.76, -0.14, 0.46])


@pytest.mark.parametrize("scale", sorted(SCALES))
@pytest.mark.parametrize(
    "rewards",
    [
        [1.0] * 4,
        [0.0] * 8,
        [float(np.float32(0.7))] * 7,
        [float(np.float32(0.9))] * 6,
        [0.1 + 0.2, 0.3, 0.3],
        [float(np.float32(0.7)), 0.7],
        [-0.5],
        [None, 2.0, None],
    ],
)
def test_equal_rewards_give_exact_zeros(rewards: list[float | None], scale: str) -> None:
    """C01: also seven times 0.7 in FP32, whose plain formula gives +0.80 for every sample."""
    wanted = [None if reward is None else 0.0 for reward in rewards]
    assert group_advantages(rewards, scale) == wanted


def test_small_but_real_differences_are_kept() -> None:
    assert group_advantages([1e-3, 2e-3], "std") == pytest.approx([-0.7071, 0.7071], rel=2e-3)
    assert group_advantages([1000.0, 1000.01], "none") == pytest.approx([-0.005, 0.005])


@pytest.mark.parametrize("scale", sorted(SCALES))
def test_rejected_and_abstained_have_no_say(scale: str) -> None:
    """C05: what is left is what the group without them would give."""
    without = group_advantages([1.0, 3.0], scale)
    assert group_advantages([60.0, 1.0, 3.0], scale, rejected={0}) == [None, *without]
    assert group_advantages([1.0, None, 3.0], scale) == [without[0], None, without[1]]
    assert group_advantages([60.0, 1.0, 3.0], "none", rejected=[0]) == [None, -1.0, 1.0]


def test_nothing_usable() -> None:
    assert group_advantages([None, None], "std") == [None, None]
    assert group_advantages([1.0, 2.0], "std", rejected=[0, 1]) == [None, None]
    assert group_advantages([], "std") == []


REWARDS = st.lists(st.one_of(st.none(), st.floats(-1e3, 1e3)), max_size=12)


@given(rewards=REWARDS, scale=st.sampled_from(sorted(SCALES)))
def test_advantages_sum_to_zero_and_keep_the_order(rewards: list[float | None], scale: str) -> None:
    advantages = group_advantages(rewards, scale)
    assert [a is None for a in advantages] == [r is None for r in rewards]
    pairs = sorted((r, a) for r, a in zip(rewards, advantages, strict=True) if r is not None and a is not None)
    assert math.fsum(a for _, a in pairs) == pytest.approx(0, abs=1e-6)
    assert [a for _, a in pairs] == sorted(a for _, a in pairs)


@given(
    rewards=st.lists(st.integers(-8, 8), min_size=2, max_size=8),
    factor=st.sampled_from([0.5, 4.0]),
    shift=st.integers(-4, 4),
)
def test_std_scale_forgets_unit_and_offset(rewards: list[int], factor: float, shift: int) -> None:
    plain = group_advantages([float(r) for r in rewards], "std")
    moved = group_advantages([factor * r + shift for r in rewards], "std")
    assert moved == pytest.approx(plain, abs=2e-5)


def test_bad_input_is_named() -> None:
    with pytest.raises(ConfigError, match="'median'") as caught:
        group_advantages([1.0, 0.0], "median")
    assert caught.value.key == "rl.advantage_scale"
    with pytest.raises(ValueError, match=r"\{1: nan\}"):
        group_advantages([1.0, math.nan], "std")
