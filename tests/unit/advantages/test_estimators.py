"""Every estimator against numbers that verl gave, and what must hold for any of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tithe.advantages import (
    ESTIMATOR_OF,
    ESTIMATORS,
    SCALES,
    AdvantageRule,
    Sample,
    estimate,
    gae_of,
    soft_punishment,
    whiten,
)
from tithe.errors import ConfigError
from unit.losses.ragged import GROUPS, LENGTHS, REWARDS, drawn

# verl at 1dda039, `core_algos.compute_*_advantage` on the ragged batch (gamma 0.9 for REINFORCE++, gamma 0.95 and
# lambda 0.9 for GAE, penalties as token rewards for both), rollout by rollout. 0 off the mask. REINFORCE++ with a
# baseline without the lone rollout, whose bare reward verl would count into the batch's mean.
# fmt: off
FROZEN: dict[str, list[list[float]]] = {
    "grpo": [
        [1.12089492, 1.12089492, 1.12089492, 1.12089492, 1.12089492, 1.12089492, 1.12089492],
        [0, -0.800639231, -0.800639231],
        [-0.320255692, 0, -0.320255692, -0.320255692, 0, -0.320255692, 0, -0.320255692, -0.320255692],
        [0, 0, 0, 0],
        [0],
        [0, 0, 1.99999809, 0, 1.99999809],
    ],
    "dr_grpo": [
        [0.583333333, 0.583333333, 0.583333333, 0.583333333, 0.583333333, 0.583333333, 0.583333333],
        [0, -0.416666667, -0.416666667],
        [-0.166666667, 0, -0.166666667, -0.166666667, 0, -0.166666667, 0, -0.166666667, -0.166666667],
        [0, 0, 0, 0],
        [0],
        [0, 0, 2, 0, 2],
    ],
    "rloo": [
        [0.875, 0.875, 0.875, 0.875, 0.875, 0.875, 0.875],
        [0, -0.625, -0.625],
        [-0.25, 0, -0.25, -0.25, 0, -0.25, 0, -0.25, -0.25],
        [0, 0, 0, 0],
        [0],
        [0, 0, 2, 0, 2],
    ],
    "reinforce_pp_baseline": [
        [1.26246507, 1.26246507, 1.26246507, 1.26246507, 1.26246507, 1.26246507, 1.26246507],
        [0, -1.41887667, -1.41887667],
        [-0.748541234, 0, -0.748541234, -0.748541234, 0, -0.748541234, 0, -0.748541234, -0.748541234],
        [-0.301650945, -0.301650945, -0.301650945, -0.301650945],
        [-0.301650945],
    ],
    "reinforce_pp": [
        [-0.161190118, -0.241567557, -0.0264762927, 0.0647684098, 0.289473756, 0.649259965, 0.858886462],
        [0, -0.997287637, -1.08744425],
        [-0.894435489, 0, -0.795445601, -0.814504072, 0, -0.971959112, 0, -0.781921926, -0.768682291],
        [-0.0096912337, -0.0954763111, 0.0582474126, 0.380288868],
        [0.256398752],
        [0, 0, 2.34843025, 0, 2.74032803],
    ],
    "ppo": [
        [-1.13243072, 0.154428278, -0.938592954, 1.0348071, 1.1299102, 0.230476034, 0.553080168],
        [0, -0.0763209518, -0.824853733],
        [-0.176472908, 0, -0.280915618, -0.424053047, 0, -1.57456056, 0, -0.0811080022, -1.22453101],
        [-0.739303699, 1.12930033, -0.336832381, -0.366052281],
        [-0.287118806],
        [0, 0, 2.26015009, 0, 1.97099448],
    ],
    "returns": [
        [0.276158952, 0.261221576, 0.299616141, 0.437866232, 0.651584209, 0.852774525, 0.999775907],
        [0, 0.0696109885, 2.34998e-05],
        [0.188937764, 0, 0.258896895, 0.257429226, 0, 0.0906127291, 0, 0.221079833, 0.163758796],
        [0.476084812, 0.544695322, 0.612004715, 0.753939424],
        [0.690302016],
        [0, 0, 1.65803492, 0, 1.96619735],
    ],
}
# fmt: on
RULES = {
    "grpo": AdvantageRule("group", "std"),
    "dr_grpo": AdvantageRule("group", "none"),
    "rloo": AdvantageRule("leave_one_out", "none"),
    "reinforce_pp_baseline": AdvantageRule("group", "batch"),
    "reinforce_pp": AdvantageRule("reinforce_pp", "batch", gamma=0.9),
    "ppo": AdvantageRule("gae", "batch", gamma=0.95, lam=0.9),
}
WITH_PENALTY = {"reinforce_pp", "ppo"}
ALONE = 5
"""The rollout that is a group by itself: verl lets it keep its bare reward, here it has nothing to learn from."""


def samples(*, penalties: bool, rewards: tuple[float, ...] = REWARDS) -> list[list[Sample | None]]:
    rows = drawn(extreme=False)
    grouped: list[list[Sample | None]] = [[] for _ in set(GROUPS)]
    for q, group in enumerate(GROUPS):
        penalty = rows["penalty"][q] if penalties else None
        grouped[group].append(Sample(rewards[q], rows["mask"][q], penalty, rows["value"][q]))
    return grouped


def advantages(rule: AdvantageRule, given: list[list[Sample | None]]) -> list[np.ndarray]:
    """Rollout by rollout, 0 off the mask."""
    nested = estimate(given, rule).advantages
    flat = [
        (one, sample) for group, own in zip(nested, given, strict=True) for one, sample in zip(group, own, strict=True)
    ]
    return [np.where(sample.mask, one, 0.0) for one, sample in flat if one is not None and sample is not None]


@pytest.mark.parametrize("name", RULES)
def test_frozen_public_numbers(name: str) -> None:
    """Of what compares groups without the lone rollout."""
    penalised = name in WITH_PENALTY
    given = samples(penalties=penalised)
    found = advantages(RULES[name], given if penalised else given[:-1])
    for own, public in zip(found, FROZEN[name], strict=penalised):
        assert own == pytest.approx(public, abs=1e-6)


def test_a_rollout_alone_is_not_trained() -> None:
    for name in RULES.keys() - WITH_PENALTY - {"reinforce_pp_baseline"}:
        assert (advantages(RULES[name], samples(penalties=False))[ALONE] == 0).all()


def test_returns_are_not_whitened() -> None:
    nested = estimate(samples(penalties=True), RULES["ppo"]).returns
    found = [one for group in nested for one in group]
    for own, public in zip(found, FROZEN["returns"], strict=True):
        assert own == pytest.approx(public, abs=1e-6)


def test_gae_by_hand_passes_over_what_a_tool_wrote() -> None:
    """Two tokens of the model around one of a tool: as if the tool's were not there."""
    mask, value = np.array([True, False, True]), np.array([0.5, 99.0, 0.25])
    advantage, returns = gae_of(Sample(1.0, mask, None, value), gamma=0.9, lam=0.8)
    last = 1.0 - 0.25
    first = 0.9 * 0.25 - 0.5 + 0.9 * 0.8 * last
    assert advantage == pytest.approx([first, 0.0, last])
    assert returns == pytest.approx([first + 0.5, 0.0, 1.0])


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_gae_against_the_sum_that_defines_it(lam: float) -> None:
    draw = np.random.RandomState(0)
    reward, value, gamma = draw.uniform(-1, 1, 9), draw.uniform(-1, 1, 9), 0.9
    sample = Sample(0.0, np.ones(9, bool), -reward, value)
    delta = reward + gamma * np.append(value[1:], 0.0) - value
    wanted = [sum((gamma * lam) ** (u - t) * delta[u] for u in range(t, 9)) for t in range(9)]
    assert gae_of(sample, gamma, lam)[0] == pytest.approx(wanted)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("reward", [0.7, 0.9, 1.0, 1e-3])
def test_equal_rewards_teach_nothing(name: str, reward: float) -> None:
    """C01, over a whole batch: exactly 0, where a critic does not know better."""
    given = [[Sample(reward, np.ones(3, bool), None, np.zeros(3))] * 7 for _ in range(2)]
    rule = replace(RULES[name], gamma=1.0, lam=1.0)
    assert all((row == 0).all() for row in advantages(rule, given))


@pytest.mark.parametrize("name", RULES)
def test_a_rejected_rollout_has_no_part_in_any_baseline(name: str) -> None:
    """C05."""
    given = samples(penalties=False)
    given[0] = [given[0][0], None, *given[0][1:]]
    assert estimate(given, RULES[name]).advantages[0][1] is None
    without = samples(penalties=False)
    assert all(map(np.array_equal, advantages(RULES[name], given), advantages(RULES[name], without)))
    huge = [[*group] for group in samples(penalties=False)]
    huge[0].append(None)
    assert all(map(np.array_equal, advantages(RULES[name], huge), advantages(RULES[name], without)))


def test_leave_one_out_compares_with_the_others_alone() -> None:
    rewards = (3.0, 1.0, 0.0, 0.0)
    group = [Sample(r, np.ones(1, bool)) for r in rewards]
    found = [float(x[0]) for x in advantages(AdvantageRule("leave_one_out", "none"), [group])]
    assert found == pytest.approx([r - (sum(rewards) - r) / 3 for r in rewards])


def test_a_penalty_is_paid_by_what_comes_before_it() -> None:
    sample = Sample(0.0, np.array([True, False, True, True]), np.array([1.0, 50.0, 0.0, 2.0]))
    other = Sample(0.0, np.ones(4, bool))
    for rule in (AdvantageRule("group", "none"), AdvantageRule("leave_one_out", "none")):
        found = estimate([[sample, other]], rule).advantages[0]
        assert found[0] is not None
        assert found[0][sample.mask].tolist() == [-3.0, -2.0, -2.0]
        assert found[1] is not None
        assert (found[1] == 0).all()


def test_whitened_values_have_mean_0_and_deviation_1_under_the_mask() -> None:
    rows = drawn(extreme=False)
    white = whiten(rows["value"], rows["mask"])
    kept = np.concatenate([x[m] for x, m in zip(white, rows["mask"], strict=True)])
    assert (kept.mean(), kept.std(ddof=1)) == pytest.approx((0.0, 1.0), abs=1e-6)
    assert all((x[~m] == 0).all() for x, m in zip(white, rows["mask"], strict=True))
    assert [len(x) for x in white] == list(LENGTHS)
    assert whiten([np.array([3.0])], [np.ones(1, bool)])[0].tolist() == [0.0]
    assert whiten([], []) == []


def test_soft_punishment_is_the_papers_line() -> None:
    """Of the paper: expected length 16384, cache 4096."""
    wanted = {16384: 0.0, 16385: -1 / 4096, 18432: -0.5, 20480: -1.0, 30000: -1.0}
    assert {n: soft_punishment(n, 20480, 4096) for n in wanted} == pytest.approx(wanted)
    for buffer in (0, 20480):
        with pytest.raises(ValueError, match="between 0 and the limit"):
            soft_punishment(1, 20480, buffer)


def test_registries_and_bad_input() -> None:
    assert set(ESTIMATOR_OF.values()) == set(ESTIMATORS)
    assert set(SCALES) == {"batch", "none", "std"}
    given = samples(penalties=False)
    with pytest.raises(ConfigError, match="estimators are"):
        estimate(given, AdvantageRule("remax"))
    with pytest.raises(ConfigError, match="compares no group") as caught:
        estimate(given, AdvantageRule("gae", "std"))
    assert caught.value.key == "rl.advantage_scale"
    with pytest.raises(ValueError, match="critic's values"):
        estimate([[Sample(1.0, np.ones(1, bool))]], AdvantageRule("gae", "batch"))
