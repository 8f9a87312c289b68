"""Reward models in the configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from tithe.config import load_config
from tithe.errors import ConfigError


def test_a_reward_knows_whether_a_model_judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not load_config(None).reward.uses_learned_model
    main = load_config(None, ["reward.function=model:judge"]).reward
    assert main.uses_learned_model
    assert main.model_directories == (str(tmp_path / "judge"),)
    assert main.function == f"model:{tmp_path / 'judge'}"
    part = "reward.parts=[{name: a, function: 'model:x', kind: model}, {name: b, function: 'model:x'}]"
    mixed = load_config(None, [part, "reward.model_quantize=int4"]).reward
    assert load_config(None, ["reward.function=model:judge"]).rl.kl_coef == 0.001
    assert mixed.model_directories == (str(tmp_path / "x"),)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["reward.function=model:"], "reward.function"),
        (["reward.function=model"], "reward.function"),
        (["reward.model_quantize=int4"], "reward.model_quantize"),
        (["reward.function=model:x", "reward.weights={model: 2.0}"], "reward.weights"),
        (["reward.function=model:x", "run.ranks=2"], "run.ranks"),
    ],
)
def test_what_makes_no_sense_names_its_key(overrides: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, overrides)
    assert error.value.key == key
    assert key in str(error.value)
