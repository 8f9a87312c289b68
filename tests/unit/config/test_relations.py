"""Rules between keys, and warnings as data."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tithe.config import RunConfig, build_config, config_warnings, load_config
from tithe.errors import ConfigError


@pytest.mark.parametrize(
    ("overrides", "key", "others"),
    [
        (["rl.batch_size_per_update=12"], "rl.batch_size_per_update", ["rl.samples_per_prompt = 8", "16 would be"]),
        (["rl.batch_size_per_update=4"], "rl.batch_size_per_update", ["8 would be"]),
        (["rl.rollout_buffer_size=100"], "rl.rollout_buffer_size", ["rl.samples_per_prompt = 8"]),
        (["rl.rollout_buffer_size=32"], "rl.rollout_buffer_size", ["rl.batch_size_per_update = 64"]),
        (["rl.sync_every=2"], "rl.sync_every", ["max(1, rl.max_policy_update_lag) = 1"]),
        (["rl.max_policy_update_lag=0", "rl.sync_every=2"], "rl.sync_every", ["= 1"]),
        (
            ["rl.max_policy_update_lag=4", "rl.max_sample_age=0", "rl.sync_every=2"],
            "rl.sync_every",
            ["rl.max_sample_age + 1"],
        ),
        (
            ["rl.clip_range=null", "rl.max_policy_update_lag=2"],
            "rl.clip_range",
            ["max_policy_update_lag = 2", "lower both"],
        ),
        (["rl.clip_range=null", "rl.max_sample_age=3"], "rl.clip_range", ["rl.max_sample_age = 3"]),
        (["rl.clip_range=null", "rl.clip_range_high=0.2"], "rl.clip_range_high", ["rl.clip_range is null"]),
        (["rl.clip_range_high=null"], "rl.clip_range_high", ["rl.clip_range = 0.2"]),
        (["model.load_in_8bit=true", "model.quantize=int4"], "model.load_in_8bit", ["model.quantize = int4"]),
        (["model.max_context=500"], "model.max_context", ["rollout.max_prompt_tokens", "560"]),
        (["reward.right=0"], "reward.right", ["reward.wrong"]),
        (["reward.unreadable=1"], "reward.unreadable", ["reward.right"]),
        (
            ["rl.reward_shaping=none", "reward.format_rules=[{pattern: a, weight: 1}]"],
            "reward.format_rules",
            ["rl.reward_shaping = none"],
        ),
        (["task.turn_reward=0.25"], "task.turn_reward", ["task.tools"]),
        (["schedule.change=linear"], "schedule.change", ["0 phases"]),
        (["schedule.change=linear", "schedule.phases=[{name: a}]"], "schedule.change", ["1 phases"]),
        (["schedule.rest_outside=[0.1, 0.9]"], "schedule.rest_outside", ["schedule.rest_batches = 0"]),
    ],
)
def test_what_cannot_work_is_refused_with_the_key_to_change(overrides, key, others):
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    assert caught.value.key == key
    assert str(caught.value).startswith(f"{key} = ")
    for other in others:
        assert other in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["rl.max_policy_update_lag=4", "rl.sync_every=4"],
        ["rl.max_policy_update_lag=4", "rl.max_sample_age=1", "rl.sync_every=2"],
        ["rl.max_policy_update_lag=0", "rl.sync_every=1"],
        ["rl.clip_range=null", "rl.max_policy_update_lag=1"],
        ["model.max_context=560"],
        ["rl.rollout_buffer_size=64"],
    ],
)
def test_the_limits_themselves_are_accepted(overrides):
    assert load_config(None, overrides) is not None


def test_a_relation_holds_for_configurations_built_in_python_too():
    with pytest.raises(ConfigError, match="samples_per_prompt"):
        RunConfig.model_validate({"rl": {"batch_size_per_update": 12}})


@given(
    group=st.integers(2, 12),
    batch=st.integers(2, 200),
    lag=st.integers(0, 12),
    age=st.none() | st.integers(0, 12),
    sync=st.integers(1, 14),
)
def test_the_staleness_relations_are_exactly_the_written_ones(group, batch, lag, age, sync):
    rl = {"samples_per_prompt": group, "batch_size_per_update": batch, "max_policy_update_lag": lag, "sync_every": sync}
    if age is not None:
        rl["max_sample_age"] = age
    legal = batch % group == 0 and sync <= max(1, lag) and sync <= (lag if age is None else age) + 1
    try:
        cfg = build_config({"rl": rl})
    except ConfigError:
        assert not legal
    else:
        assert legal
        assert cfg.rl.rollout_buffer_size == batch * (cfg.rl.max_sample_age + 1)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["lora.dropout=0.1"], ["lora.dropout = 0.1", "parity", "0 costs nothing"]),
        (
            ["rl.max_policy_update_lag=9", "rl.clip_range=1"],
            ["rl.clip_range = 1", "9 batches", "rl.max_policy_update_lag"],
        ),
        (["rl.max_sample_age=9", "rl.clip_range_high=5"], ["rl.clip_range_high = 5", "rl.max_sample_age"]),
        (
            ["rl.max_policy_update_lag=4", "rl.max_sample_age=2"],
            ["rl.max_sample_age = 2", "rl.max_policy_update_lag = 4"],
        ),
        (["rollout.top_p=0.9", "rollout.min_p=0.1"], ["rollout.top_p, rollout.min_p"]),
        (["rollout.on_publish=keep"], ["rollout.on_publish = keep"]),
        (["optimizer.warmup_steps=100"], ["optimizer.warmup_steps = 100", "run.max_steps = 100"]),
        (["rl.batch_size_per_update=32"], ["rl.batch_size_per_update = 32", "4 distinct prompts", "raise it to 64"]),
        (
            ["optimizer.lr=3e-4", "rl.kl_coef=0.004"],
            [
                "optimizer.lr = 0.0003",
                "rl.kl_coef = 0.004",
                "lower optimizer.lr to 0.0001",
                "raise rl.kl_coef to 0.005",
            ],
        ),
        (
            ["schedule.phases=[{name: a}, {name: late, lr: 2e-4, kl_coef: 0}]"],
            ["rl.kl_coef = 0 in phase late of schedule.phases"],
        ),
        (["schedule.phases=[{name: wide, samples_per_prompt: 16}, {name: b}]"], ["in phase wide", "raise it to 128"]),
        (["schedule.phases=[{name: wide, top_p: 0.9}, {name: b}]"], ["top_p of phase wide"]),
    ],
)
def test_what_is_doubtful_is_one_warning_that_names_its_keys(overrides, words):
    (warning,) = config_warnings(load_config(None, overrides))
    for word in words:
        assert word in warning


@pytest.mark.parametrize("overrides", [["rl.batch_size_per_update=64"], ["optimizer.lr=1e-4", "rl.kl_coef=0"], []])
def test_at_the_limits_nothing_is_doubtful(overrides):
    assert config_warnings(load_config(None, overrides)) == []


@pytest.mark.parametrize("lag", [8, 9, 32])
def test_a_clipped_loss_may_lag(lag):
    assert config_warnings(load_config(None, [f"rl.max_policy_update_lag={lag}"])) == []


@pytest.mark.parametrize(("every", "kept", "batches"), [(10, 2, 200), (150, 2, 300)])
def test_the_pool_keeps_what_a_resume_from_the_oldest_checkpoint_trains_again(every, kept, batches):
    run = load_config(None, [f"run.checkpoint_every={every}", f"run.keep_checkpoints={kept}"]).run
    assert run.keep_pool_batches == batches
