"""Adapters of two ranks and every parameter, compared by the command itself on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tithe
from support.checkpoints import build_gguf
from support.runs import RunFiles
from tithe.build import capacity
from tithe.build.capacity import _variants
from tithe.config import build_config, dump_resolved, load_config
from tithe.config.yaml_text import parse_yaml
from tithe.errors import ConfigError, UserError


@pytest.mark.slow
def test_both_curves_memory_and_time_of_each_run(
    files: RunFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(tithe.__file__).parents[1]))
    cfg = load_config(files.yaml, ["model.quantize=none", "run.eval_every=null"])
    result = capacity(cfg, tmp_path / "c", [2], 2, None)
    assert result == {**json.loads((tmp_path / "c" / "capacity.json").read_text()), **result}
    adapter, full = json.loads((tmp_path / "c" / "capacity.json").read_text())["runs"]
    assert (adapter["name"], full["name"]) == ("lora-r2", "full")
    for run in (adapter, full):
        assert [step for step, _ in run["held_out"]] == [0, 1, 2]
        assert [step for step, _ in run["reward"]] == [1, 2]
        assert run["peak_bytes"] > 50 << 20
        assert run["step_s"] > 0
    for curve in ("held_out", "reward"):  # one start: the first answers are the same ones
        assert adapter[curve][0] == full[curve][0]
    assert adapter["max_abs_dlogp"] == 0 < full["mean_abs_dlogp"] <= full["max_abs_dlogp"] < 0.5
    assert full["lr"] == pytest.approx(adapter["lr"] / 10)
    assert full["trained_state_bytes"] > 4 * adapter["trained_state_bytes"]
    gap = full["held_out"][-1][1] - adapter["held_out"][-1][1]
    assert result["gap_to_full"] == {"lora-r2": pytest.approx(gap)}
    assert str(result["text"]).splitlines()[0].startswith("run ")
    assert len(str(result["text"]).splitlines()) == 3


def test_a_copy_adds_a_packed_base_to_the_largest_rank_and_packed_rollouts_to_full(files: RunFiles) -> None:
    cfg = load_config(files.yaml, ["model.quantize=none", "lora.dropout=0.1"])
    variants = _variants(cfg, [2, 8, 4], 5, None, "int4")
    assert list(variants) == ["lora-r2", "lora-r8", "lora-r4", "full", "lora-r8-int4", "full-int4"]
    assert [v.model.quantize for v in variants.values()] == ["none"] * 4 + ["int4"] * 2
    assert [v.model.train for v in variants.values()] == ["lora"] * 3 + ["full", "lora", "full"]
    assert [v.lora.r for v in variants.values() if v.model.train == "lora"] == [2, 8, 4, 8]
    for variant in variants.values():  # each is a run file that `tithe train` takes
        assert build_config(parse_yaml(dump_resolved(variant), "run.yaml")) == variant
    with pytest.raises(ConfigError, match="--copy int4") as caught:
        capacity(load_config(files.yaml), files.folder / "c", [2], 1, None, "int4")
    assert caught.value.key == "model.quantize"


def test_a_start_that_not_all_can_share_is_refused_before_anything_runs(files: RunFiles, tmp_path: Path) -> None:
    gguf = build_gguf(tmp_path / "m.gguf", "llama")
    changes = {"model.path": gguf, "lora.init_from": "somewhere", "run.ranks": 2}
    for change, key in ((f"{key}={value}", key) for key, value in changes.items()):
        with pytest.raises(ConfigError) as caught:
            capacity(load_config(files.yaml, [change]), tmp_path / "c", [2], 1, None)
        assert caught.value.key == key
    assert not (tmp_path / "c").exists()


def test_a_run_that_fails_says_which_and_why(files: RunFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(tithe.__file__).parents[1]))
    cfg = load_config(files.yaml, ["lora.target_modules=[no_such_proj]", "model.quantize=none"])
    with pytest.raises(UserError, match=r"the run lora-r2 failed: .*no_such_proj"):
        capacity(cfg, tmp_path / "c", [2], 1, None)
