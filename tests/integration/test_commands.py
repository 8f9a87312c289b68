"""One run through every command: what it leaves, what it prints, what it promises."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import yaml

from support.checkpoints import EOS_ID
from support.launcher import Launcher
from support.runs import RunFiles, metric_rows, query
from tithe.arch import read_checkpoint
from tithe.cli.main import main
from tithe.config import load_config, load_run
from tithe.lora import load_adapter
from tithe.models import ModelOptions, load_model
from tithe.weight_sync import load_published, read_manifest

pytestmark = pytest.mark.integration


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# ------------------------------------------------------------------ train


def test_training_answers_with_exactly_one_line(unbroken) -> None:
    lines = unbroken.process.stdout.splitlines(keepends=True)
    assert len(lines) == 1
    assert lines[0].endswith("}\n")
    answer = unbroken.answer
    assert answer["run_dir"] == str(unbroken.run_dir)
    assert (answer["steps"], answer["optimizer_steps"], answer["reason"]) == (6, 6, "max_steps")
    assert answer["max_abs_dlogp"] == 0.0
    assert "Traceback" not in unbroken.process.stderr
    assert "held-out questions" in unbroken.process.stderr, "progress goes to standard error"


def test_a_run_directory_is_complete_and_everything_in_it_can_be_read(files: RunFiles, unbroken) -> None:
    run_dir = unbroken.run_dir
    kinds = {p.name for p in run_dir.iterdir()}
    expected = {"config.yaml", "pool.sqlite", "metrics.jsonl", "adapters", "checkpoints", "adapter", "parity.json"}
    assert kinds >= expected | {"eval", "run.json"}
    assert not [name for name in tree(run_dir) if "tmp" in name], "nothing half-written"
    assert load_run(run_dir) == load_config(run_dir / "config.yaml").model_copy(update={"run": load_run(run_dir).run})
    shapes = load_model(read_checkpoint(files.model), ModelOptions()).linear_shapes()
    tensors, spec = load_adapter(run_dir / "adapter", shapes)
    assert (spec.r, spec.alpha) == (4, 8)
    assert any(bool(t.abs().sum() > 0) for n, t in tensors.items() if "lora_B" in n), "it learned"
    newest = max((run_dir / "adapters").iterdir(), key=lambda p: read_manifest(p).version)
    manifest, published, _ = load_published(newest, shapes)
    assert manifest.optimizer_step == manifest.version.serial == 6
    assert all(torch.equal(published[n], tensors[n]) for n in tensors), "the last version is the final adapter"
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == ["step_000004", "step_000006"]
    assert sorted(p.name for p in (run_dir / "eval").iterdir()) == [f"step_00000{s}.json" for s in (0, 3, 6)]
    record = json.loads((run_dir / "run.json").read_text())
    assert (record["status"], record["reason"], record["steps"]) == ("finished", "max_steps", 6)
    assert 0 < record["memory"]["base_resident_bytes"] < record["memory"]["peak_pss_bytes"]
    parity = json.loads((run_dir / "parity.json").read_text())
    assert parity["max_abs_dlogp"] == 0.0
    assert parity["tokens"] == query(run_dir, "SELECT SUM(n_tokens) FROM rollouts WHERE state = 'trained'")[0][0]


def test_metrics_have_a_row_per_batch_and_the_pool_the_same_rewards(unbroken) -> None:
    rows = metric_rows(unbroken.run_dir)
    train = {row["step"]: row for row in rows if "loss" in row}
    assert sorted(train) == [1, 2, 3, 4, 5, 6]
    rewards = dict(
        query(unbroken.run_dir, "SELECT batch_serial, AVG(reward) FROM rollouts WHERE state = 'trained' GROUP BY 1")
    )
    for step, row in train.items():
        assert row["reward_mean"] == pytest.approx(rewards[step])
        assert (row["ratio_max"], row["approx_kl"], row["age_mean"]) == (1.0, 0.0, 0.0), "on-policy to the bit"
        assert row["entropy"] > 0
        assert row["kl_mean"] >= 0
        assert row["failures"] == row["dropped_groups"] == 0
    assert train[1]["kl_mean"] == 0 < train[6]["kl_mean"]
    assert [row["step"] for row in rows if "eval_sampled" in row] == [0, 3, 6]
    times = [row["t_s"] for row in rows]
    assert times == sorted(times)


def test_completions_end_at_the_checkpoints_own_end_token(unbroken) -> None:
    """C11: what ended is not truncated, and the end token is trained."""
    for ids, mask, finish in query(unbroken.run_dir, "SELECT token_ids, loss_mask, finish FROM rollout"):
        tokens = [int.from_bytes(ids[i : i + 4], "little") for i in range(0, len(ids), 4)]
        assert (finish == "stop") == (tokens[-1] == EOS_ID)
        assert EOS_ID not in tokens[:-1]
        assert set(mask) == {1}
        assert finish == "stop" or len(tokens) == 8


# ------------------------------------------------------------------ after a run


def test_parity_of_a_run_directory_is_zero_in_both_storages(unbroken, launcher: Launcher, tmp_path: Path) -> None:
    before = (unbroken.run_dir / "parity.json").read_bytes()
    run = launcher.run("parity", unbroken.run_dir, "--json", cwd=tmp_path)
    assert run.code == 0, run.err
    answer = run.answer()
    (unbroken.run_dir / "parity.json").write_bytes(before)
    assert answer["max_abs_dlogp"] == answer["mean_abs_dlogp"] == answer["dequantized_max_abs_dlogp"] == 0.0
    assert answer["optimizer_steps"] >= 3
    assert answer["versions"] >= 3
    assert answer["noise_floor"] > 0
    assert answer["lengths"]["distinct"] > 1
    assert answer["compute"] == "packed"


def test_parity_of_a_run_file_trains_on_the_side_and_leaves_nothing(files, launcher, tmp_path) -> None:
    changes = ("rollout.temperature=0.7", "rl.max_policy_update_lag=4", "run.max_steps=1")
    run = launcher.run("parity", files.yaml, *changes, "--json", cwd=tmp_path)
    assert run.code == 0, run.err
    assert run.answer()["max_abs_dlogp"] == 0.0
    assert run.answer()["optimizer_steps"] >= 3
    assert tree(tmp_path) == set()


def test_eval_of_a_run_gives_its_own_last_score_and_of_a_file_the_first(files, unbroken, launcher, tmp_path) -> None:
    scores = {row["step"]: row for row in metric_rows(unbroken.run_dir) if "eval_sampled" in row}
    before = tree(unbroken.run_dir)
    for target, step in ((unbroken.run_dir, 6), (files.yaml, 0)):
        run = launcher.run("eval", target, "--json", cwd=tmp_path)
        assert run.code == 0, run.err
        answer = run.answer()
        for name in ("eval_sampled", "eval_greedy", "eval_sampled_lo", "eval_readable"):
            assert answer[name] == scores[step][name], name
    assert tree(unbroken.run_dir) == before
    assert tree(tmp_path) == set()


def test_sample_answers_a_prompt(unbroken, launcher, tmp_path) -> None:
    spoken = launcher.run("sample", unbroken.run_dir, "the answer 3 + 3 =", cwd=tmp_path)
    assert spoken.code == 0, spoken.err
    written = launcher.run("sample", unbroken.run_dir, "the answer 3 + 3 =", "--json", cwd=tmp_path).answer()
    assert written["answer"] == spoken.out.removesuffix("\n")
    assert 1 <= written["tokens"] <= 8
    assert written["prompt"] == "the answer 3 + 3 ="
    long = launcher.run("sample", unbroken.run_dir, "x" * 400, cwd=tmp_path)
    assert long.code == 2
    assert "leave room for an answer" in long.err
    assert "Traceback" not in long.err


def test_report_is_one_page_about_the_run(unbroken, capfd) -> None:
    assert main(["report", str(unbroken.run_dir), "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    page = Path(answer["report"]).read_text()
    Path(answer["report"]).unlink()
    assert "<svg" in page
    assert re.search(r'<p class="asked">the answer \d+ \+ \d+ =</p>', page), "questions, not their ids"
    assert not re.search(r'(src|href)="(?!#|data:)', page), "nothing is fetched"


@pytest.mark.parametrize("command", ["train", "check", "eval", "parity", "resume", "sample"])
def test_a_dry_run_prints_what_would_be_run_and_writes_nothing(
    files, unbroken, tmp_path, monkeypatch, capfd, command
) -> None:
    monkeypatch.chdir(tmp_path)
    of_run = command in ("resume", "sample")
    arguments = [command, str(unbroken.run_dir if of_run else files.yaml), *(["hello"] if command == "sample" else [])]
    before = tree(unbroken.run_dir)
    assert main([*arguments, "--dry-run", "run.max_steps=9"]) == 0
    values = yaml.safe_load(capfd.readouterr().out)
    assert values["run"]["max_steps"] == 9
    assert values["lora"]["target_modules"] == "all-linear"
    assert main([*arguments, "--dry-run", "--json"]) == 0
    out = capfd.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out)["config"]["rl"]["samples_per_prompt"] == 4
    assert tree(tmp_path) == set()
    assert tree(unbroken.run_dir) == before


def test_the_run_file_can_be_written_anew_from_a_dry_run(files, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(files.yaml), "--dry-run", "optimizer.lr=2e-5"]) == 0
    again = tmp_path / "again.yaml"
    again.write_text(capsys.readouterr().out)
    cfg = load_config(again)
    assert cfg.optimizer.lr == 2e-5
    assert cfg == load_config(files.yaml, ["optimizer.lr=2e-5"])


# ------------------------------------------------------------------ check


def test_check_shows_one_step_on_the_small_model_and_leaves_nothing(files, tmp_path, monkeypatch, capfd) -> None:
    """The demo's model is replaced by a tiny one; the run's own base need not even exist."""
    monkeypatch.chdir(tmp_path)
    for place in ("base", "commands"):
        monkeypatch.setattr(f"tithe.build.{place}.find_demo_model", lambda: files.model)
    of_another = ["lora.target_modules=[q_a_proj,kv_b_proj]", "rl.kl_coef=0.1", "rl.kl_reference=/no/such/model"]
    arguments = ["check", str(files.yaml), "model.path=/no/such/base", "rl.samples_per_prompt=2", *of_another]
    assert main(arguments) == 0
    out, err = capfd.readouterr()
    said = "lora.target_modules = [q_a_proj, kv_b_proj], rl.kl_reference = /no/such/model"
    assert [line for line in err.splitlines() if line.endswith(said)], "what the small model cannot take is named"
    assert out.count("reward ") >= 4, "every rollout with its reward"
    assert "<|im_start|>user" in out, "the prompt as the model reads it"
    assert "max |Δlog-prob| 0.0" in out
    assert main([*arguments, "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert len(answer["rewards"]) == 4
    assert all(0 <= reward <= 1 for reward in answer["rewards"])
    assert answer["metrics"]["ratio_max"] == 1.0
    assert tree(tmp_path) == set()


def test_check_says_what_is_wrong_with_the_users_reward(files, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tithe.build.base.find_demo_model", lambda: files.model)
    (tmp_path / "odd.py").write_text("def pay(item, text):\n    raise KeyError('grade')\n")
    assert main(["check", str(files.yaml), "reward.function=odd.py:pay"]) != 0
    assert "KeyError: 'grade'" in capsys.readouterr().err
