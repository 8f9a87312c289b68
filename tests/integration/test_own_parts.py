"""A user's own data, reward, base and adapter, and the settings that a demo does not touch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from support.checkpoints import build_gguf, build_hf
from support.launcher import Launcher
from support.runs import RunFiles, metric_rows, query
from tithe.lora import load_adapter
from tithe.weight_sync import load_published

pytestmark = pytest.mark.integration

GRADING = '''
def grade(item, text):
    """Named parts; knows the row's own columns."""
    if item.extra["hard"]:
        return None
    return {"length": len(text) / 10, "vowels": 0.1 * sum(text.count(v) for v in "aeiou")}
'''
ROWS = """
def train():
    return [{"prompt": f"{a} plus {b}", "answer": a + b} for a in range(5) for b in range(5)]


def held_out():
    return ({"prompt": f"{a} plus 9", "answer": a + 9} for a in range(4))
"""


def run(launcher: Launcher, path: Path, cwd: Path, *overrides: str) -> Path:
    done = launcher.run("train", path, f"run.dir={cwd / 'out'}", "--json", *overrides, cwd=cwd)
    assert done.code == 0, done.err
    assert len(done.lines) == 1
    return cwd / "out"


def test_chats_parts_and_stop_strings_in_an_asynchronous_run_that_recomputes(files, launcher, tmp_path) -> None:
    (tmp_path / "grading.py").write_text(GRADING)
    chats = [
        {
            "talk": [{"role": "system", "content": "brief"}, {"role": "user", "content": f"say {i}"}],
            "gold": i,
            "hard": i % 5 == 0,
        }
        for i in range(24)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    path = files.write(
        "chats",
        task={"source": str(tmp_path / "chats.jsonl"), "prompt_column": "talk", "answer_column": "gold"},
        reward={"function": "grading:grade", "format_rules": [{"pattern": "[0-9]", "weight": 0.5}], "workers": 2},
        rollout={"stop_strings": ["a", "e"], "on_publish": "recompute", "temperature": 1.3, "top_k": 50},
        rl={"max_policy_update_lag": 2, "sync_every": 2, "algorithm": "dapo"},
        engine={"max_running": 8},
    )
    out = run(launcher, path, tmp_path)
    trained = query(out, "SELECT batch_serial - 1, min_serial FROM rollout_group WHERE state = 'trained'")
    assert len(trained) == 12
    assert all(0 <= begins - oldest <= 2 for begins, oldest in trained)
    rollouts = query(out, "SELECT text, finish, reward, reward_parts FROM rollouts WHERE reward IS NOT NULL")
    for text, finish, reward, parts in rollouts:
        paid = {name: value for name, value in json.loads(parts).items() if not name.startswith("fact.")}
        assert reward == pytest.approx(sum(paid.values()))
        assert paid["length"] == pytest.approx(len(text) / 10)
        assert paid.get("format.1", 0.0) == (0.5 if any(c.isdigit() for c in text) else 0.0)
        if "a" in text or "e" in text:
            assert finish == "stop"
    judging_s = [row["reward_s"] for row in metric_rows(out) if "generated_tok" in row]
    assert sum(judging_s) > 0, "what grading took is told batch by batch"
    hard = query(out, "SELECT COUNT(*) FROM rollouts WHERE reward IS NULL AND cause IS NULL AND state != 'running'")
    assert hard[0][0] % 4 == 0, "abstentions come in whole groups here and are nobody's failure"
    prompts = {
        int.from_bytes(row[0][:4], "little")
        for row in query(out, "SELECT prompt_tokens FROM rollout_group WHERE prompt_tokens IS NOT NULL")
    }
    assert prompts == {1}, "the checkpoint's own template opens every prompt"


def test_a_task_of_functions_on_a_packed_file_with_the_old_cache_kept(files, launcher, tmp_path) -> None:
    (tmp_path / "additions.py").write_text(ROWS)
    base = build_gguf(tmp_path / "base.gguf", "qwen2", linear="Q4_1")
    path = files.write(
        "additions",
        model={"path": str(base), "quantize": "none", "compute_dtype": "bf16"},
        task={"source": "additions:train", "eval_source": "additions:held_out"},
        reward={"function": "math"},
        rollout={"on_publish": "keep"},
        rl={"max_policy_update_lag": 1, "kl_coef": 0.1, "kl_placement": "reward", "entropy_coef": 0.01},
        run={"max_steps": 4},
    )
    out = run(launcher, path, tmp_path)
    assert {row["questions"] for row in metric_rows(out) if "eval_sampled" in row} == {4.0}
    rewards = {row[0] for row in query(out, "SELECT DISTINCT reward FROM rollouts")}
    assert rewards <= {1.0, 0.0, -0.5}
    assert all(row["failures"] == 0 for row in metric_rows(out) if "loss" in row)
    record = json.loads((out / "run.json").read_text())
    assert record["memory"]["base_resident_bytes"] <= 1.2 * record["memory"]["base_file_bytes"]


def test_a_run_begins_from_any_peft_adapter(files: RunFiles, unbroken, launcher, tmp_path) -> None:
    start = unbroken.run_dir / "adapter"
    out = run(launcher, files.yaml, tmp_path, f"lora.init_from={start}", "lora.r=16", "run.max_steps=1", "run.seed=3")
    tensors, spec = load_adapter(start)
    _, first, first_spec = load_published(next((out / "adapters").glob("*-v0-*")))
    assert (first_spec.r, first_spec.alpha) == (spec.r, spec.alpha) == (4, 8)
    assert all(torch.equal(first[n], tensors[n]) for n in tensors)
    assert next(row["kl_mean"] for row in metric_rows(out) if "loss" in row) > 0, "the reference stays the bare base"


def test_everything_else_switched_on(files, launcher, tmp_path) -> None:
    """8-bit packing, dropout, recomputed activations, a chosen target, measured compute, all that watches."""
    base = build_hf(tmp_path / "qwen3", "qwen3", shards=2)
    path = files.write(
        "all",
        model={
            "path": str(base),
            "quantize": "none",
            "load_in_8bit": True,
            "compute": "auto",
            "compute_dtype": "auto",
            "activation_checkpointing": True,
        },
        lora={"dropout": 0.1, "target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj"]},
        optimizer={"weight_decay": 0.01},
        rl={"algorithm": "dr_grpo", "max_policy_update_lag": 1},
        monitor={"progress": True, "tensorboard": True, "report": True},
        run={"max_steps": 3, "seed": 123_456_789, "name": "all"},
    )
    out = run(launcher, path, tmp_path)
    assert list((out / "tb").iterdir())
    assert "<svg" in (out / "report.html").read_text()
    parity = json.loads((out / "parity.json").read_text())
    assert parity["max_abs_dlogp"] == 0.0
    assert "off while scoring" in parity["adapter_dropout"]
    tensors, _ = load_adapter(out / "adapter")
    assert {name.split(".")[-3] for name in tensors} == {"q_proj", "v_proj", "o_proj", "gate_proj"}
    resolved = (out / "config.yaml").read_text()
    assert "auto" not in resolved, "what was measured is written down, so that a resume computes the same"
    resumed = launcher.run("resume", out, "run.max_steps=4", "--json", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert resumed.answer()["steps"] == 4
    assert [row["step"] for row in metric_rows(out) if "loss" in row] == [1, 2, 3, 4]


def test_fewer_rows_than_a_batch_are_drawn_again(files, launcher, tmp_path) -> None:
    """F11: three training rows, batches of four groups: no batch is cut short, and the run does not end at once."""
    (tmp_path / "few.jsonl").write_text(
        "".join(json.dumps({"prompt": f"say {i}", "answer": i}) + "\n" for i in range(5))
    )
    path = files.write(
        "few", task={"source": str(tmp_path / "few.jsonl"), "eval_size": 2}, rl={"batch_size_per_update": 16}
    )
    out = run(launcher, path, tmp_path, "run.max_steps=3")
    batches = query(out, "SELECT COUNT(*) FROM rollout_group WHERE state = 'trained' GROUP BY batch_serial")
    assert batches == [(4,)] * 3
    drawn = query(out, "SELECT COUNT(*) FROM rollout_group WHERE state = 'trained' GROUP BY prompt_id")
    assert drawn == [(4,)] * 3, "every row as often as the others"
