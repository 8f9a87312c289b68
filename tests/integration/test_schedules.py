"""Phases, adaptive numbers of samples, a curriculum and the diversity penalty by the real command line, killed and
resumed."""

from __future__ import annotations

import json
import signal

import numpy as np
import pytest

from support.runs import metric_rows, query, trained_serial, trained_tokens

pytestmark = pytest.mark.integration

SCHEDULE = {
    "phases": [
        {"name": "explore", "until_step": 2, "temperature": 1.0, "top_p": 0.95, "samples_per_prompt": 4},
        {"name": "refine", "temperature": 0.7, "top_p": 0.9, "samples_per_prompt": 2, "lr": 0.002, "kl_coef": 0.05},
    ],
    "adaptive_samples": [2, 8],
    "rest_batches": 1,
    "prompt_weights": "pass_rate",
}
DIGITS = '''
def pay(item, text, token_ids, **info):
    """Right for an even first token: prompts differ in how often they are solved."""
    return float(token_ids[0] % 2 == 0)
'''


def test_a_scheduled_run_that_is_killed_ends_as_if_unbroken(files, launcher, tmp_path) -> None:
    (tmp_path / "first.py").write_text(DIGITS)
    file = files.write(
        "scheduled",
        schedule=SCHEDULE,
        reward={"function": f"{tmp_path / 'first.py'}:pay", "diversity_penalty": 0.5},
        rl={"batch_size_per_update": 16},
        run={"max_steps": 5, "eval_every": None},
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    done = launcher.run("train", file, f"run.dir={whole}", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "top_p of phase explore" in done.err
    killed = launcher.start("train", file, f"run.dir={broken}", cwd=tmp_path)
    killed.when(lambda: trained_serial(broken) >= 3).signal(signal.SIGKILL).wait()
    resumed = launcher.run("resume", broken, cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert trained_tokens(broken) == trained_tokens(whole)
    name = "adapter/adapter_model.safetensors"
    assert (broken / name).read_bytes() == (whole / name).read_bytes()
    check_what_was_trained(whole)


def check_what_was_trained(run_dir) -> None:
    sizes = query(run_dir, "SELECT SUM(n_rollouts) FROM groups WHERE state = 'trained' GROUP BY batch_serial")
    assert sizes == [(16,)] * 5
    phases = query(run_dir, "SELECT admitted_batch, phase FROM groups WHERE state = 'trained'")
    assert all(phase == ("explore" if batch < 2 else "refine") for batch, phase in phases)
    trained = [row for row in metric_rows(run_dir) if "loss" in row]
    assert [row["temperature"] for row in trained] == [1.0, 1.0, 0.7, 0.7, 0.7]
    assert [row["lr"] <= 0.002 for row in trained] == [False, False, True, True, True]
    assert all(0 <= row["overlap"] <= 1 for row in trained)
    rollouts = query(run_dir, "SELECT reward, reward_parts, logp, logp_behaviour FROM rollout WHERE reward IS NOT NULL")
    cut = 0
    for reward, text, logp, behaviour in rollouts:
        parts = json.loads(text)
        assert reward == pytest.approx(sum(parts.values()))
        assert -0.5 <= parts["group.diversity"] <= 0
        gain = np.frombuffer(behaviour, "<f4") - np.frombuffer(logp, "<f4")
        assert (gain >= 0).all(), "what is left after top-p weighs more"
        cut += int((gain > 0).sum())
    assert cut > 0
