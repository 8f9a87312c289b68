"""Whole runs on a mixture of experts: both adapter layouts, resumed, certified."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from support.checkpoints import build_hf
from support.runs import RunFiles, metric_rows
from tithe.build import parity, resume, train
from tithe.config import load_config

GATE_A = "base_model.model.model.layers.0.mlp.experts.{}.gate_proj.lora_A.weight"
GATE_B = "base_model.model.model.layers.0.mlp.experts.{}.gate_proj.lora_B.weight"


@pytest.mark.parametrize("layout", ["per_expert", "shared_outer"])
def test_a_mixture_trains_with_lag_resumes_and_is_certified(files: RunFiles, tmp_path: Path, layout: str) -> None:
    base = build_hf(tmp_path / "moe", "qwen3_moe")
    run_dir = tmp_path / "run"
    options = [f"model.path={base}", f"lora.expert_layout={layout}", "rl.max_policy_update_lag=2", f"run.dir={run_dir}"]
    cfg = load_config(files.yaml, [*options, "run.eval_every=null"])
    assert train(cfg, run_dir)["steps"] == 6
    assert resume(run_dir, ["run.max_steps=8"])["steps"] == 8
    rows = metric_rows(run_dir)
    shares = [row["router_agreement"] for row in rows if "router_agreement" in row]
    assert len(shares) == 8
    assert all(0.5 < share <= 1 for share in shares)
    tensors = safetensors.torch.load_file(run_dir / "adapter" / "adapter_model.safetensors")
    a0, a3 = tensors[GATE_A.format(0)], tensors[GATE_A.format(3)]
    assert torch.equal(a0, a3) == (layout == "shared_outer")
    assert not torch.equal(tensors[GATE_B.format(0)], tensors[GATE_B.format(3)])
    certificate = parity(run_dir)
    assert certificate["max_abs_dlogp"] == 0
    assert certificate["tokens"] >= 100
    assert json.loads((run_dir / "parity.json").read_text())["max_abs_dlogp"] == 0


def test_attention_alone_is_a_choice_of_targets(files: RunFiles, tmp_path: Path) -> None:
    base = build_hf(tmp_path / "moe", "qwen3_moe")
    options = [f"model.path={base}", "lora.target_modules=[q_proj, v_proj]", "run.max_steps=1", "run.eval_every=null"]
    run_dir = tmp_path / "run"
    train(load_config(files.yaml, [*options, f"run.dir={run_dir}"]), run_dir)
    names = safetensors.torch.load_file(run_dir / "adapter" / "adapter_model.safetensors")
    assert names
    assert not any("experts" in name for name in names)
