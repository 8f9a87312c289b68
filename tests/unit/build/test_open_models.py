"""Whole runs on the architectures of large open models: trained with lag, certified bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.checkpoints import build_hf
from support.runs import RunFiles
from tithe.build import parity, train
from tithe.config import load_config


@pytest.mark.parametrize("architecture", ["mistral", "mixtral", "glm4_moe", "gpt_oss", "minimax_m2", "deepseek_v3"])
def test_a_run_trains_and_is_certified(files: RunFiles, tmp_path: Path, architecture: str) -> None:
    """Window, sinks, partial rotary, latent attention, shared experts: the trainer's log-probs are the sampler's."""
    base, run_dir = build_hf(tmp_path / "base", architecture), tmp_path / "run"
    options = [f"model.path={base}", "rl.max_policy_update_lag=2", "run.max_steps=3", "run.eval_every=null"]
    assert train(load_config(files.yaml, [*options, f"run.dir={run_dir}"]), run_dir)["steps"] == 3
    certificate = parity(run_dir)
    assert certificate["max_abs_dlogp"] == 0
    assert certificate["tokens"] >= 100
