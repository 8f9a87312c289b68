"""Bad input and full disks: one clear message, exit code 2, nothing half-written."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.checkpoints import build_gguf, build_hf
from support.launcher import Launcher
from support.runs import RunFiles, metric_rows, query
from tithe.cli.main import main
from tithe.pool import Pool

pytestmark = pytest.mark.integration


def tree(folder: Path) -> set[str]:
    """Everything but what SQLite keeps beside an open database."""
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if not p.name.endswith(("-wal", "-shm"))}


@pytest.fixture
def refused(files: RunFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> Callable[..., str]:
    """Runs a command in an empty directory and returns its message; see the module."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path) -> str:
        before = tree(tmp_path)
        code = main([str(a) for a in arguments])
        captured = capsys.readouterr()
        assert code == 2, captured.err
        assert captured.out == ""
        assert "Traceback" not in captured.err
        messages = re.findall(r"^tithe: (?!warning)", captured.err, re.MULTILINE)
        assert len(messages) == 1
        assert tree(tmp_path) == before
        return captured.err[captured.err.index("tithe: ") :]

    return run


# ------------------------------------------------------------------ run files


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rl: {kl_coef: [1\n", r"bad\.yaml.*line"),
        ("rl:\n\tkl_coef: 1\n", r"bad\.yaml.*line 2"),
        ("- a\n- b\n", r"bad\.yaml must hold sections"),
        ("rl: {clip_rnage: 0.2}\n", r"rl\.clip_rnage: there is no such key; did you mean the key rl\.clip_range\?"),
        ("optimiser: {lr: 1}\n", r"optimiser.*optimizer"),
        ("optimizer: {lr: fast}\n", r"optimizer\.lr = 'fast' is not allowed: give a number > 0"),
        ("rl: {samples_per_prompt: 1}\n", r"rl\.samples_per_prompt = 1 is not allowed.*>= 2"),
        ("rl: {clip_range: null, max_policy_update_lag: 4}\n", r"rl\.clip_range.*diverge"),
        ("rollout: {temperature: 0}\n", r"rollout\.temperature"),
    ],
)
def test_a_wrong_run_file_is_refused_by_name(refused, tmp_path, text, said) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert re.search(said, refused("train", path))


def test_a_missing_run_file_and_a_wrong_override(refused, files) -> None:
    assert "absent.yaml" in refused("train", "absent.yaml")
    assert "did you mean the key rl.clip_range?" in refused("train", files.yaml, "rl.clip_rnage=1")
    assert "section.key=value" in refused("train", files.yaml, "=3")


def test_json_answers_bad_input_with_one_line_too(files, tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(files.yaml), "task.source=absent.jsonl", "--json"]) == 2
    out = capfd.readouterr().out
    assert out.count("\n") == 1
    assert "absent.jsonl" in json.loads(out)["error"]


# ------------------------------------------------------------------ data and rewards


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "holds no rows"),
        ("\n\n", "holds no rows"),
        ('{"prompt": "a", "answer": 1}\n{"prompt": "b", "ans\n', r"rows\.jsonl:2.*not JSON"),
        ('{"prompt": "a", "answer": 1}\n[1]\n', r"rows\.jsonl:2"),
        ('{"question": "a", "answer": 1}\n', "prompt"),
        ('{"prompt": "a", "answer": 1}\n', "no training prompt|held-out"),
    ],
)
def test_data_that_cannot_be_used_is_refused_with_its_place(refused, files, tmp_path, content, said) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(content)
    assert re.search(said, refused("train", files.yaml, f"task.source={rows}", "run.dir=out"))


def test_a_prompt_that_is_too_long_is_named_under_the_error_policy(refused, files, tmp_path) -> None:
    rows = tmp_path / "long.jsonl"
    given = [{"prompt": "short", "answer": 1}] * 3 + [
        {"prompt": "long " * 40, "answer": 2},
        {"prompt": "b", "answer": 3},
    ]
    rows.write_text(
        "".join(json.dumps(row | {"n": i, "prompt": f"{i} {row['prompt']}"}) + "\n" for i, row in enumerate(given))
    )
    changes = ("rollout.on_long_prompt=error", "task.eval_size=1", "run.dir=out")
    said = refused("train", files.yaml, f"task.source={rows}", *changes)
    assert "rollout.max_prompt_tokens" in said
    assert re.search(r"long\.jsonl:4|4", said)


def test_prompts_that_are_all_too_long_leave_nothing_to_train_on(refused, files) -> None:
    said = refused("train", files.yaml, "rollout.max_prompt_tokens=3", "run.dir=out")
    assert "prompt" in said


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("absent.py:pay", "absent.py"),
        ("{reward}:pya", "pay"),
        ("no_such_module:pay", "no_such_module"),
        ("broken.py:pay", "ZeroDivisionError"),
        ("nonsense", "reward.function"),
    ],
)
def test_a_reward_function_that_cannot_be_loaded(refused, files, tmp_path, function, said) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    name = function.format(reward=files.reward)
    assert said in refused("train", files.yaml, f"reward.function={name}", "run.dir=out")


@pytest.mark.parametrize("answer", ["'much'", "[1.0]", "float('inf')", "True and {'a': 'b'}"])
def test_a_reward_that_is_no_number_ends_the_run_with_the_functions_name(
    files, tmp_path, monkeypatch, capsys, answer
) -> None:
    """F15: found with the first judgement, so the directory exists; it says how the run ended."""
    (tmp_path / "odd.py").write_text(f"def pay(item, text):\n    return {answer}\n")
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(files.yaml), "reward.function=odd.py:pay", "run.dir=out"]) == 2
    err = capsys.readouterr().err
    assert "odd.py:pay" in err
    assert "Traceback" not in err
    assert json.loads((tmp_path / "out" / "run.json").read_text())["status"] == "failed"


# ------------------------------------------------------------------ models and adapters


def test_models_that_cannot_be_used(refused, files, tmp_path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    pickled = tmp_path / "pickled"
    shutil.copytree(files.model, pickled)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    packed = build_gguf(tmp_path / "packed.gguf", "llama")
    out = "run.dir=out"
    assert "absent" in refused("train", files.yaml, "model.path=absent", out)
    assert "config.json" in refused("train", files.yaml, f"model.path={empty}", out)
    assert "safetensors" in refused("train", files.yaml, f"model.path={pickled}", out)
    assert "model.quantize" in refused("train", files.yaml, f"model.path={packed}", out)
    assert "model.max_context" in refused("train", files.yaml, "model.max_context=4096", out)
    assert "run.device" in refused("train", files.yaml, "run.device=cuda", out)


def test_memory_that_cannot_hold_one_sequence_is_refused_with_the_key(refused, files, tmp_path) -> None:
    path = build_hf(tmp_path / "long", "llama", max_position_embeddings=65536)
    sizes = ("model.max_context=60000", "rollout.max_new_tokens=30000", "engine.kv_memory_mib=1")
    said = refused("train", files.yaml, f"model.path={path}", *sizes, "run.dir=out")
    assert re.search(r"engine\.kv_memory_mib = 1: .* takes \d+\.\d MiB; raise it", said)


def test_adapters_that_do_not_fit(refused, files, unbroken, tmp_path) -> None:
    out = "run.dir=out"
    said = refused("train", files.yaml, "lora.target_modules=[q_porj]", out)
    assert "q_porj" in said
    assert "q_proj" in said
    assert "absent" in refused("train", files.yaml, "lora.init_from=absent", out)
    other = build_hf(tmp_path / "other", "llama", hidden_size=96)
    said = refused("train", files.yaml, f"model.path={other}", f"lora.init_from={unbroken.run_dir}/adapter", out)
    assert "lora_" in said or "shape" in said


# ------------------------------------------------------------------ run directories


def test_run_directories_that_cannot_be_made(refused, files, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    assert "run.dir" in refused("train", files.yaml, "run.dir=file")
    assert re.search(r"run\.dir.*a part of the path is a file", refused("train", files.yaml, "run.dir=file/run"))
    assert "holds files already" in refused("train", files.yaml, "run.dir=full")
    assert "run.dir" in refused("train", files.yaml, "run.dir=/proc/run")


def test_what_is_no_run_directory_cannot_be_resumed(refused, tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    assert "does not exist" in refused("resume", "absent")
    assert "config.yaml" in refused("resume", "empty")
    for command in (("eval", "empty"), ("sample", "empty", "hello"), ("parity", "empty"), ("report", "empty")):
        assert "config.yaml" in refused(*command)


def as_killed(run_dir: Path) -> None:
    """A finished run's directory, as after a kill that came before its last record."""
    path = run_dir / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "status": "running"}))


def copied(unbroken: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(unbroken.run_dir, tmp_path / "run"))


def test_a_resume_refuses_another_policy_and_changes_nothing(refused, files, unbroken, tmp_path) -> None:
    run_dir = copied(unbroken, tmp_path)
    config = (run_dir / "config.yaml").read_bytes()
    said = refused("resume", run_dir, "optimizer.lr=1", "run.max_steps=8")
    assert "optimizer.lr" in said
    assert "max_steps" not in said
    other = build_hf(tmp_path / "other", "llama", tie_word_embeddings=False, seed=1)
    assert "another base" in refused("resume", run_dir, f"model.path={other}", "run.max_steps=8")
    assert (run_dir / "config.yaml").read_bytes() == config
    assert query(run_dir, "SELECT serial FROM pool_state") == [(6,)]
    assert "trained on another base" in refused("eval", run_dir, f"model.path={other}")


def test_a_run_that_is_in_work_cannot_be_resumed_beside_it(files, unbroken, launcher, tmp_path) -> None:
    run_dir = copied(unbroken, tmp_path)
    config = (run_dir / "config.yaml").read_bytes()
    with Pool.open(run_dir / "pool.sqlite"):
        second = launcher.run("resume", run_dir, "run.max_steps=8", cwd=tmp_path)
    assert second.code == 2
    assert "in use by another process" in second.err
    assert (run_dir / "config.yaml").read_bytes() == config


def test_damaged_checkpoints_are_passed_over_until_none_is_left(files, unbroken, launcher, tmp_path) -> None:
    """E01: the newest is torn, the one before is taken; without any, a clear refusal and the pool as it was."""
    run_dir = copied(unbroken, tmp_path)
    torn = run_dir / "checkpoints" / "step_000006" / "optimizer.safetensors"
    torn.write_bytes(torn.read_bytes()[:1000])
    as_killed(run_dir)
    resumed = launcher.run("resume", run_dir, "--json", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert "step_000006 is passed over" in resumed.err
    assert "from batch 4" in resumed.err
    name = Path("adapter", "adapter_model.safetensors")
    assert (run_dir / name).read_bytes() == (unbroken.run_dir / name).read_bytes()
    for state in (run_dir / "checkpoints").glob("*/state.json"):
        state.write_text("")
    as_killed(run_dir)
    refused = launcher.run("resume", run_dir, cwd=tmp_path)
    assert refused.code == 2
    assert "holds none of the checkpoints" in refused.err
    assert query(run_dir, "SELECT serial FROM pool_state") == [(6,)]


# ------------------------------------------------------------------ full disks


@pytest.mark.parametrize("file_bytes", [5_000, 40_000])
def test_a_disk_that_is_full_at_once_leaves_no_directory(files, launcher: Launcher, tmp_path, file_bytes) -> None:
    run = launcher.run("train", files.yaml, "run.dir=out", cwd=tmp_path, file_bytes=file_bytes)
    assert run.code == 2, run.err
    assert "Traceback" not in run.err
    assert re.search("larger than the system allows|no space left|input/output", run.err)
    assert tree(tmp_path) == set()


@pytest.mark.parametrize("file_bytes", [90_000, pytest.param(150_000, marks=pytest.mark.soak)])
def test_a_disk_that_fills_up_ends_the_run_and_a_resume_goes_on(
    files, unbroken, launcher, tmp_path, file_bytes
) -> None:
    run = launcher.run("train", files.yaml, "run.dir=out", cwd=tmp_path, file_bytes=file_bytes)
    assert run.code == 2, run.err
    assert "Traceback" not in run.err
    assert re.search("larger than the system allows|no space left|input/output", run.err)
    run_dir = tmp_path / "out"
    assert not [name for name in tree(run_dir) if ".tmp-" in name]
    resumed = launcher.run("resume", run_dir, "--json", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert [row["step"] for row in metric_rows(run_dir) if "loss" in row] == [1, 2, 3, 4, 5, 6]
    name = Path("adapter", "adapter_model.safetensors")
    assert (run_dir / name).read_bytes() == (unbroken.run_dir / name).read_bytes()
