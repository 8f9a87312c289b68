"""Whole runs that train every parameter: published as copies, resumed, their gap shown, refusals named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
import yaml

from support.checkpoints import build_gguf, build_hf
from support.runs import RunFiles, metric_rows, trained_tokens
from tithe.build import evaluate, parity, resume, sample, train
from tithe.build.session import open_session
from tithe.config import RunConfig, load_config
from tithe.errors import ConfigError
from tithe.weight_sync import DirectoryChannel, read_manifest

FULL = ("model.train=full", "model.quantize=none", "model.base_dtype=fp32", "optimizer.lr=1e-3")


def config(files: RunFiles, run_dir: Path, *overrides: str) -> RunConfig:
    """The tiny run without its adapter's section."""
    values = yaml.safe_load(files.yaml.read_text())
    del values["lora"]
    path = files.folder / "full.yaml"
    path.write_text(yaml.safe_dump(values))
    return load_config(path, [*FULL, f"run.dir={run_dir}", "run.eval_every=null", *overrides])


def gaps(run_dir: Path) -> list[float]:
    return [row["sampler_gap"] for row in metric_rows(run_dir) if "sampler_gap" in row]


def final_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(run_dir / "model" / "model.safetensors")


def test_a_run_is_resumed_to_the_bit_and_its_model_serves(files: RunFiles, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    result = train(config(files, whole, "run.max_steps=3", "run.checkpoint_every=1"), whole)
    assert result["steps"] == 3
    train(config(files, broken, "run.max_steps=2", "run.checkpoint_every=1"), broken)
    assert str(resume(broken, [])["text"]).count(str(broken / "model")) == 1, "finished: where its model lies"
    assert resume(broken, ["run.max_steps=3"])["steps"] == 3
    assert trained_tokens(broken) == trained_tokens(whole)
    one, two = final_weights(whole), final_weights(broken)
    start = safetensors.torch.load_file(files.model / "model.safetensors")
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert all(not torch.equal(one[name], start[name].to(one[name].dtype)) for name in one if "proj" in name)

    assert len(gaps(whole)) == 4
    assert 0 < max(gaps(whole)) < 1e-4
    certificate = parity(whole)
    assert 0 < float(str(certificate["max_abs_dlogp"])) < 1e-4
    assert int(str(certificate["tokens"])) > 50
    manifests = [read_manifest(p) for p in DirectoryChannel(whole / "adapters", "full").list_versions()]
    assert manifests[-1].optimizer_step == 3
    assert manifests[-1].parent == manifests[-2].name
    assert json.loads((whole / "run.json").read_text())["memory"]["engine_copies_bytes"] > 0
    assert sample(whole, "the answer 1 + 1 =", [])["tokens"]
    assert "eval_sampled" in evaluate(whole, [])


def test_with_lag_a_kl_and_bf16_the_old_copies_go(files: RunFiles, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    changes = ("model.base_dtype=bf16", "rl.max_policy_update_lag=2", "rl.kl_coef=0.1", "run.max_steps=3")
    assert train(config(files, run_dir, *changes, "engine.max_live_versions=2"), run_dir)["steps"] == 3
    rows = [row for row in metric_rows(run_dir) if "loss" in row]
    assert [row["kl_mean"] > 0 for row in rows[1:]] == [True, True]
    assert 1e-5 < max(gaps(run_dir)) < 0.5


def test_a_quantized_copy_samples_and_its_larger_gap_is_shown(files: RunFiles, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    result = train(config(files, run_dir, "model.quantize=int4", "run.max_steps=1"), run_dir)
    assert min(gaps(run_dir)) > 1e-2
    assert float(str(result["max_abs_dlogp"])) > 1e-2
    certificate = json.loads((run_dir / "parity.json").read_text())
    assert certificate["copy"] == "int4"
    assert "copy=int4" in certificate["numeric_mode"]


def test_a_mixture_trains_every_expert_and_its_model_serves(files: RunFiles, tmp_path: Path) -> None:
    base, run_dir = build_hf(tmp_path / "moe", "qwen3_moe"), tmp_path / "run"
    options = (f"model.path={base}", "rl.router_replay=false", "rl.kl_coef=0.1", "run.max_steps=2")
    assert train(config(files, run_dir, *options), run_dir)["steps"] == 2
    assert 0 < max(gaps(run_dir)) < 1e-3
    one, start = final_weights(run_dir), safetensors.torch.load_file(base / "model.safetensors")
    assert one.keys() == start.keys()
    assert all(not torch.equal(one[name], start[name].to(one[name].dtype)) for name in one if "proj" in name)
    assert sample(run_dir, "the answer 1 + 1 =", [])["tokens"]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("lora.init_from=somewhere", "lora.init_from"),
        ("lora.dropout=0.1", "lora.dropout"),
        ("lora.r=32", "lora.r"),  # also where it is the default: given is given
        ("lora.alpha=16", "lora.alpha"),
        ("lora.target_modules=[q_proj]", "lora.target_modules"),
        ("lora.expert_layout=shared_outer", "lora.expert_layout"),
        ("rollout.on_publish=recompute", "rollout.on_publish"),
    ],
)
def test_what_needs_an_adapter_is_refused_by_name(files: RunFiles, tmp_path: Path, change: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(files, tmp_path, change)
    assert caught.value.key == key


def test_bases_that_cannot_be_trained_are_refused_by_name(files: RunFiles, tmp_path: Path) -> None:
    gguf = build_gguf(tmp_path / "m.gguf", "llama")
    half = build_hf(tmp_path / "half", "llama", dtype="float16")
    mixture = build_hf(tmp_path / "moe", "qwen3_moe")
    for path, key, said in (
        (gguf, "model.path", "no directory of safetensors"),
        (half, "model.path", "F16 weights"),
        (mixture, "rl.router_replay", "transformers routes by itself"),
    ):
        with (
            pytest.raises(ConfigError, match=said) as caught,
            open_session(config(files, tmp_path / "run", f"model.path={path}")),
        ):
            pass
        assert caught.value.key == key
