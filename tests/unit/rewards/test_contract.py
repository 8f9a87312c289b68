"""How what functions return becomes one reward, and what is kept of it."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tithe.config.sampling import RewardPart, RewardSettings
from tithe.errors import ConfigError
from tithe.pool import Pool, PoolReader
from tithe.rewards import PartSpec, RewardPool, RewardSpec, RunningScale, build_reward
from tithe.rewards.composition import Contribution, compose
from tithe.rewards.grading import Grader, grade_at_once
from tithe.rewards.running import deviation
from tithe.types import FinishReason, PromptItem, Rollout, RolloutGroup

ITEM = PromptItem("p-0", messages=({"role": "user", "content": "3+4?"},), answer="7")
RIGHT, WRONG = r"\boxed{7}", r"\boxed{8}"

FUNCTIONS = """
from tithe.rewards import weighted

def liking(item, text):
    return 0.9

def brevity(item, text):
    return {"words": -0.1, "lines": -0.2}

def polite(item, text):
    return 1.0 if "please" in text else 0.0

def silent(item, text):
    return None

def telling(item, text):
    return {"a": 1.0, "reason": "because"}

def declining(item, text):
    return {"reason": "there is nothing to judge"}

def big(item, text):
    return {"a": 1e308}

@weighted(a=0.5)
def halves(item, text):
    return {"a": 1.0, "b": 1.0}
"""


@pytest.fixture
def functions(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(FUNCTIONS)
    return lambda name: f"{path}:{name}"


def grade(spec, text=RIGHT):
    return Grader(spec).grade(ITEM, text, {})


def test_guidance_never_lifts_what_breaks_a_rule(functions):
    spec = RewardSpec(parts=(PartSpec("liking", functions("liking"), "model", 5.0),))
    right, wrong = grade(spec), grade(spec, WRONG)
    assert (right.value, right.parts) == (5.5, {"answer": 1.0, "liking": 4.5})
    assert (wrong.value, wrong.parts) == (0.0, {"answer": 0.0})
    assert wrong.facts["unpaid.liking"] == 4.5
    assert wrong.record()["fact.unpaid.liking"] == 4.5


def test_a_further_rule_withholds_guidance_too(functions):
    spec = RewardSpec(
        parts=(PartSpec("polite", functions("polite"), "rule"), PartSpec("liking", functions("liking"), "model"))
    )
    assert grade(spec).parts == {"answer": 1.0, "polite": 0.0}
    assert grade(spec, f"please {RIGHT}").parts == {"answer": 1.0, "polite": 1.0, "liking": 0.9}


def test_parts_of_one_name_are_an_error_and_none_is_lost(functions):
    for main, name in ((functions("liking"), "reward"), (functions("telling"), "a")):
        spec = RewardSpec(main, parts=(PartSpec(name, functions("polite"), "shaping"),))
        with pytest.raises(ConfigError, match=f"two parts of the reward are called '{name}'"):
            grade(spec)


def test_a_weight_that_makes_a_part_infinite_names_the_function(functions):
    with pytest.raises(ConfigError, match=r"big returned inf as part 'a' times its weight"):
        grade(RewardSpec(functions("big"), weights={"a": 10.0}))


def test_shaping_is_paid_always_and_its_parts_are_summed(functions):
    spec = RewardSpec(parts=(PartSpec("brevity", functions("brevity"), "shaping", 2.0),))
    assert grade(spec, WRONG).parts == {"answer": 0.0, "brevity": pytest.approx(-0.6)}


def test_a_part_that_abstains_leaves_no_reward(functions):
    result = grade(RewardSpec(parts=(PartSpec("silent", functions("silent"), "model"),)))
    assert (result.value, dict(result.parts)) == (None, {})
    assert "silent abstained" in result.reason


def test_weights_are_the_functions_own_unless_the_run_gives_others(functions):
    assert grade(RewardSpec(functions("halves"))).parts == {"a": 0.5, "b": 1.0}
    assert grade(RewardSpec(functions("halves"), weights={"b": 3.0})).parts == {"a": 1.0, "b": 3.0}
    with pytest.raises(ConfigError, match=r"reward\.weights names the part 'c'.*a, b"):
        grade(RewardSpec(functions("halves"), weights={"c": 1.0}))


def test_a_function_may_say_why(functions):
    assert (grade(RewardSpec(functions("telling"))).reason, grade(RewardSpec(functions("telling"))).value) == (
        "because",
        1,
    )
    declined = grade(RewardSpec(functions("declining")))
    assert (declined.value, declined.reason) == (None, "there is nothing to judge")


@pytest.mark.parametrize(
    ("bounds", "clip", "raw", "value"),
    [
        (None, None, 3.0, 3.0),
        ((0.0, 4.0), None, 3.0, 0.5),
        ((0.0, 4.0), None, 4.0, 1.0),
        ((0.0, 4.0), None, -9.0, -1.0),
        (None, (-1.0, 2.0), 3.0, 2.0),
        ((0.0, 4.0), (-0.25, 0.25), 3.0, 0.25),
    ],
)
def test_bounds_map_to_the_unit_range_and_clipping_comes_last(bounds, clip, raw, value):
    result = compose(RewardSpec(bounds=bounds, clip=clip), {"": Contribution("rule", {"x": raw})})
    assert result.value == pytest.approx(value)
    assert result.parts == {"x": raw}
    assert result.facts.get("raw") == (None if bounds is clip is None else raw)


@given(raw=st.floats(-1e6, 1e6), low=st.floats(-100, 99), width=st.floats(0.01, 100))
def test_normalised_rewards_stay_in_range(raw, low, width):
    result = compose(RewardSpec(bounds=(low, low + width)), {"": Contribution("rule", {"x": raw})})
    assert -1.0 <= result.value <= 1.0


def test_every_verdict_names_its_grader_and_its_reason(functions, tmp_path):
    assert (grade(RewardSpec()).grader, grade(RewardSpec()).reason) == ("math@4", "equal to the answer")
    first = grade(RewardSpec(functions("liking"))).grader
    assert first.startswith(functions("liking") + "@")
    (tmp_path / "my_rewards.py").write_text(FUNCTIONS + "\n# changed\n")
    assert grade(RewardSpec(functions("liking"))).grader != first
    abstained = Grader(RewardSpec()).grade(PromptItem("p", answer=""), RIGHT, {})
    assert (abstained.value, abstained.grader) == (None, "math@4")
    assert "no readable answer" in abstained.reason


def test_formulas_need_a_worker_and_numbers_do_not():
    spec = RewardSpec("symbolic_math")
    assert grade_at_once(spec, ITEM, r"\boxed{7.0}").value == 1.0
    assert grade_at_once(spec, ITEM, r"\boxed{\sqrt{49}}") is None
    assert grade_at_once(dataclasses.replace(spec, parts=(PartSpec("x", "m:f"),)), ITEM, RIGHT) is None
    assert Grader(spec).grade(ITEM, r"\boxed{\sqrt{49}}", {}).value == 1.0
    assert Grader(spec).grade(ITEM, "no idea", {}).facts == {"right": 0.0, "readable": 0.0}


def test_the_pool_tells_how_long_and_why_from_both_processes():
    with RewardPool(RewardSpec("symbolic_math"), timeout_s=60.0) as pool:
        here, there = pool.submit(ITEM, RIGHT).result(), pool.submit(ITEM, r"\boxed{\sqrt{49}}").result()
        undecided = pool.submit(PromptItem("p", answer="\x0crac58"), r"\boxed{58}").result()
    assert (here.value, there.value, undecided.value) == (1.0, 1.0, None)
    assert (here.reason, there.reason) == ("equal as numbers", "equal as formulas")
    assert here.grader == there.grader == undecided.grader == "symbolic_math@3"
    assert 0 < here.seconds < there.seconds
    assert pool.stats()["reward_abstained"] == 1


def rollout(sample, reward, **more):
    two = np.zeros(2, np.float32)
    ids = np.ones(2, np.int32)
    return Rollout(sample, ids, np.ones(2, bool), two, two, ids, 1.0, FinishReason.STOP, reward=reward, **more)


def group(number, *rewards):
    return RolloutGroup(number, "p", np.array([5], np.int32), tuple(map(rollout, range(9), rewards)), 0, 0)


def test_parts_grader_and_reason_are_kept_in_the_pool(tmp_path):
    parts = {"answer": 1.0, "fact.right": 1.0}
    kept = rollout(0, 1.0, reward_parts=parts, grader="math@4", reward_reason="equal as numbers")
    abstained = rollout(1, None, grader="math@4", reward_reason="the question has no readable answer")
    with Pool.create(tmp_path / "pool.sqlite", "run") as pool:
        number = pool.admit("p", 0, 0)
        pool.commit(dataclasses.replace(group(number), rollouts=(kept, abstained)))
        (read,) = pool.lease_batch(2, 0, lambda _: False).groups
    assert [(r.grader, r.reward_reason, r.failure) for r in read.rollouts] == [
        ("math@4", "equal as numbers", None),
        ("math@4", "the question has no readable answer", None),
    ]
    with PoolReader(tmp_path / "pool.sqlite") as reader:
        rows = reader.query("SELECT reward, reason, grader, cause FROM rollouts ORDER BY sample")
    assert rows[1] == {
        "reward": None, "reason": "the question has no readable answer", "grader": "math@4", "cause": None,
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------- running scale


def test_the_running_scale_is_the_deviation_of_all_that_was_trained():
    trained = [(0, 0.0), (0, 4.0), (1, 0.0), (1, 4.0)]
    scaled = RunningScale(lambda after: [row for row in trained if row[0] > after])
    first = scaled([group(7, 0.0, 4.0, None)])
    assert [r.reward for r in first[0].rollouts] == [0.0, 2.0, None]
    trained.append((2, 10.0))
    second = scaled([group(8, 10.0)])
    assert second[0].rollouts[0].reward == pytest.approx(10.0 / np.std([0.0, 4.0, 0.0, 4.0, 10.0, 10.0]))


def test_a_resumed_run_scales_as_the_unbroken_one():
    rewards = [(serial, math.sin(serial * 7 + k)) for serial in range(5) for k in range(8)]
    unbroken = RunningScale(lambda after: [row for row in rewards[:32] if row[0] > after])
    unbroken([group(1, 0.5)])
    resumed = RunningScale(lambda after: [row for row in reversed(rewards[:32]) if row[0] > after])
    batch = [group(2, 0.1, 0.9)]
    values = [[r.reward for r in scaled(batch)[0].rollouts] for scaled in (unbroken, resumed)]
    assert values[0] == values[1]


def test_equal_rewards_are_left_as_they_are():
    assert deviation([0.7] * 7) == deviation([]) == deviation([3.0]) == 1.0


# ---------------------------------------------------------------------------------------------- the configuration


def test_the_configuration_becomes_a_spec_that_survives_the_way_to_a_worker():
    settings = RewardSettings(
        function="symbolic_math",
        parts=(RewardPart(name="j", function="m:f", kind="model", weight=0.5), RewardPart(name="s", function="m:g")),
        normalise=(0.0, 2.0),
        clip=(-1.0, 1.0),
    )
    spec = build_reward(settings)
    assert RewardSpec.from_json(spec.to_json()) == spec
    assert (spec.parts[0], spec.bounds) == (PartSpec("j", "m:f", "model", 0.5), (0.0, 2.0))
    assert [part.name for part in build_reward(settings, "none").parts] == ["j"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["reward.clip=[1, 0]"], "lower end first"),
        (["reward.normalise=bounds"], r"none, running, or \[low, high\]"),
        (["reward.normalise=[1, 0]"], r"reward\.normalise = \[1, 0\]"),
        (["reward.normalise=running"], r"rl\.advantage_scale"),
        (["reward.weights={a: 1}"], r"reward\.weights"),
        (["reward.parts=[{name: a, function: math}]"], "belong in reward.function"),
        (["reward.parts=[{name: answer, function: 'm:f'}]"], "must differ"),
    ],
)
def test_settings_that_cannot_work_are_refused(overrides, message, tmp_path):
    from tithe.config import load_config

    path = tmp_path / "run.yaml"
    path.write_text("rl: {advantage_scale: std}\n")
    with pytest.raises(ConfigError, match=message):
        load_config(path, overrides)
