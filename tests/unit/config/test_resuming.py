"""What a resume may change, and reading a run directory."""

import pytest

from tithe.config import (
    CONFIG_FILE,
    RESUME_MUTABLE,
    check_resume,
    dump_resolved,
    load_config,
    load_resumed,
    load_run,
)
from tithe.config.fields import iter_fields
from tithe.errors import ConfigError, ResumeError


@pytest.fixture
def run_dir(tmp_path):
    directory = tmp_path / "elsewhere"
    directory.mkdir()
    (directory / CONFIG_FILE).write_text(
        dump_resolved(load_config(None, ["run.name=first", "rl.max_policy_update_lag=3"]))
    )
    return directory


def test_every_mutable_key_exists():
    assert set(dict(iter_fields())) >= RESUME_MUTABLE


def test_a_run_directory_may_move(run_dir):
    cfg = load_run(run_dir)
    assert (cfg.run.name, cfg.run.dir, cfg.rl.max_sample_age) == ("first", str(run_dir), 3)


def test_mutable_keys_change_and_nothing_else_does(run_dir):
    cfg = load_resumed(run_dir, ["run.max_steps=500", "run.max_minutes=5", "engine.max_running=8"])
    assert (cfg.run.max_steps, cfg.run.max_minutes, cfg.engine.max_running) == (500, 5.0, 8)
    assert cfg.rl == load_run(run_dir).rl


@pytest.mark.parametrize("key", ["optimizer.lr", "lora.r", "rl.clip_range", "run.seed", "task.source"])
def test_a_key_that_changes_what_is_computed_is_refused_by_name(run_dir, key):
    value = {"task.source": "products"}.get(key, "1")
    with pytest.raises(ConfigError) as caught:
        load_resumed(run_dir, [f"{key}={value}"])
    assert caught.value.key == key
    assert f"{key}: a resume cannot change it" in str(caught.value)
    assert "lora.init_from" in str(caught.value)


def test_every_refused_key_is_named():
    old, new = load_config(None), load_config(None, ["run.seed=3", "lora.r=4", "run.max_steps=7"])
    with pytest.raises(ConfigError) as caught:
        check_resume(old, new)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()[:2]] == ["lora.r", "run.seed"]
    assert "run.max_steps" not in str(caught.value)


def test_the_same_value_again_is_no_change(run_dir):
    assert load_resumed(run_dir, ["rl.max_policy_update_lag=3"]) == load_run(run_dir)


def test_what_is_no_run_directory_is_refused(tmp_path):
    with pytest.raises(ResumeError, match="does not exist"):
        load_run(tmp_path / "missing")
    with pytest.raises(ResumeError, match=r"has no config\.yaml"):
        load_run(tmp_path)
