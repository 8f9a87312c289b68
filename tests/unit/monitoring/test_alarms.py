"""Alarms are raised when they should be, once, and name keys that exist."""

import math

import pytest

from tithe.config.fields import find_field
from tithe.errors import FailureCause
from tithe.metrics import JsonlSink, read_rows
from tithe.monitoring import Alarm, AlarmKind, AlarmRules, Alarms


def run(rows, rules=None, first=1):
    told: list[Alarm] = []
    alarms = Alarms(rules, on_alarm=told.append)
    for step, values in enumerate(rows, first):
        alarms.write(step, values)
    assert told == alarms.raised
    return [(alarm.kind, alarm.step) for alarm in told]


ZERO = {"reward_mean": 0.0, "reward_std": 0.0}
SOME = {"reward_mean": 0.0, "reward_std": 0.5}


@pytest.mark.parametrize(
    ("kind", "bad", "good"),
    [
        (AlarmKind.ALL_ZERO_REWARDS, ZERO, SOME),
        (AlarmKind.REPEATED_FAILURE, {"failures_timeout": 2}, {"failures_timeout": 0}),
        (AlarmKind.REPEATED_FAILURE, {"failures": 1}, {"failures": 0}),
        (AlarmKind.MOSTLY_DROPPED, {"groups": 8, "dropped_groups": 9}, {"groups": 8, "dropped_groups": 8}),
        (AlarmKind.FEW_PROMPTS, {"groups": 16, "prompts": 7}, {"groups": 16, "prompts": 8}),
        (AlarmKind.FEW_PROMPTS, {"groups": 4, "prompts": 3}, {"groups": 4, "prompts": 4}),
    ],
)
def test_three_bad_batches_in_a_row_raise_one_alarm_and_two_none(kind, bad, good):
    assert run([bad, bad, good, bad, bad]) == []
    assert run([bad] * 10) == [(kind, 3)]
    assert run([bad] * 3 + [good] + [bad] * 3) == [(kind, 3), (kind, 7)]
    rules = AlarmRules(batches=2, few_prompts_batches=2)
    assert run([bad, bad], rules) == [(kind, 2)]


def test_different_failures_are_not_the_same_failure():
    rows = [{"failures_timeout": 1}, {"failures_engine": 1}, {"failures_timeout": 1}, {"failures_engine": 1}]
    assert run(rows) == []
    assert run([{"failures_timeout": 1, "failures_engine": 1}] * 3) == [(AlarmKind.REPEATED_FAILURE, 3)] * 2


def test_rewards_that_only_average_to_zero_are_no_alarm():
    assert run([SOME] * 10) == []
    assert run([{"reward_mean": 0.0}] * 10) == []


def test_rows_of_others_break_no_streak():
    rows = [ZERO, {"tok_per_s": 100.0}, ZERO, {"eval_sampled": 0.0}, ZERO]
    assert run(rows) == [(AlarmKind.ALL_ZERO_REWARDS, 5)]


def test_a_skipped_batch_and_its_next_try_have_the_same_step():
    told: list[Alarm] = []
    alarms = Alarms(on_alarm=told.append)
    for step, skipped in ((5, 0), (5, 1), (5, 1), (6, 0), (6, 1)):
        alarms.write(step, {"skipped": skipped})
    assert [alarm.step for alarm in told] == [5, 6]


def kl_rows(early, late):
    return [{"kl_mean": 50.0}] * 4 + [{"kl_mean": early}] * 11 + [{"kl_mean": value} for value in late]


def test_kl_is_compared_with_ten_times_its_mean_over_batches_5_to_15():
    assert run(kl_rows(0.02, [0.199, 0.2])) == []
    assert run(kl_rows(0.02, [0.1, 0.201])) == [(AlarmKind.KL_RUNAWAY, 17)]


def test_kl_below_the_noise_floor_is_never_an_alarm():
    assert run(kl_rows(0.0, [0.0099])) == []
    assert run(kl_rows(0.0, [0.0101])) == [(AlarmKind.KL_RUNAWAY, 16)]
    assert run(kl_rows(0.0, [0.0101]), AlarmRules(kl_noise_floor=0.01)) == []


def test_one_excursion_of_kl_is_one_alarm():
    assert run(kl_rows(0.02, [0.3, 0.19, 0.3, 0.05, 0.3])) == [(AlarmKind.KL_RUNAWAY, 16), (AlarmKind.KL_RUNAWAY, 20)]


def test_kl_that_is_not_finite_or_has_nothing_to_compare_with_is_not_judged():
    assert run(kl_rows(0.02, [math.nan, math.inf])) == []
    assert run([{"kl_mean": 100.0}] * 5, first=100) == []


def test_a_skipped_step_raises_once_per_episode():
    skipped, fine = {"skipped": 1}, {"skipped": 0}
    assert run([fine, skipped, skipped, fine, skipped]) == [(AlarmKind.SKIPPED_STEP, 2), (AlarmKind.SKIPPED_STEP, 5)]


def test_replayed_rows_count_but_are_not_told_again(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        sink.write(step, {**ZERO, "failures_reward": 1 if step > 1 else 0, "loss": math.nan})
    sink.close()
    told: list[Alarm] = []
    alarms = Alarms(on_alarm=told.append)
    alarms.replay(read_rows(sink.path).rows)
    assert [alarm.kind for alarm in alarms.raised] == [AlarmKind.ALL_ZERO_REWARDS]
    assert told == []
    alarms.write(4, {"failures_reward": 1})
    assert [alarm.kind for alarm in told] == [AlarmKind.REPEATED_FAILURE]


def test_every_remedy_is_a_key_of_the_configuration():
    failures = {f"failures_{cause}": 1 for cause in [*FailureCause, "new"]}
    always = {**ZERO, **failures, "groups": 1, "prompts": 0, "dropped_groups": 5, "skipped": 1}
    rows = [{**always, "kl_mean": 0.02 if step < 16 else 9.0} for step in range(20)]
    alarms = Alarms(on_alarm=lambda alarm: None)
    for step, values in enumerate(rows, 1):
        alarms.write(step, values)
    assert {alarm.kind for alarm in alarms.raised} == set(AlarmKind)
    for alarm in alarms.raised:
        assert alarm.remedy_keys
        assert [key for key in alarm.remedy_keys if find_field(key) is None] == []
        assert all(key in str(alarm) for key in alarm.remedy_keys)
