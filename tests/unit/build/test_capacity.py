"""What `tithe capacity` compares; the command itself is in tests/integration/test_capacity.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.checkpoints import build_gguf
from support.runs import RunFiles
from tithe.build import capacity
from tithe.build.capacity import _largest, _variants
from tithe.config import build_config, dump_resolved, load_config
from tithe.config.yaml_text import parse_yaml
from tithe.errors import ConfigError


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


def test_runs_of_several_processes_keep_them_and_count_the_largest(files: RunFiles) -> None:
    cfg = load_config(files.yaml, ["model.quantize=none", "run.ranks=3"])
    assert {variant.run.ranks for variant in _variants(cfg, [2], 1, None, None).values()} == {3}
    memory = {"rank_0_peak_rss_bytes": 5, "rank_1_peak_rss_bytes": 9, "base_file_bytes": 50}
    assert [_largest(7, memory), _largest(None, memory), _largest(7, {}), _largest(None, {})] == [9, 9, 7, None]


def test_a_start_that_not_all_can_share_is_refused_before_anything_runs(files: RunFiles, tmp_path: Path) -> None:
    gguf = build_gguf(tmp_path / "m.gguf", "llama")
    changes = {"model.path": gguf, "lora.init_from": "somewhere"}
    for change, key in ((f"{key}={value}", key) for key, value in changes.items()):
        with pytest.raises(ConfigError) as caught:
            capacity(load_config(files.yaml, [change]), tmp_path / "c", [2], 1, None)
        assert caught.value.key == key
    assert not (tmp_path / "c").exists()
