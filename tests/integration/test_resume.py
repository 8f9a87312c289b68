"""A run that is stopped or killed and resumed: nothing lost, nothing trained twice; bit for bit when synchronous."""

from __future__ import annotations

import json
import random
import re
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from support.launcher import Launcher, Run
from support.learning import Forgetful
from support.runs import RunFiles, metric_rows, query, trained_serial, trained_tokens
from tithe.cli.main import main

pytestmark = pytest.mark.integration
STEPS, GROUPS = 6, 2


def adapter_bytes(run_dir: Path) -> bytes:
    return (run_dir / "adapter" / "adapter_model.safetensors").read_bytes()


def events(run_dir: Path) -> int:
    """Things a run has done so far, of any kind."""
    made = sum(len(list((run_dir / name).glob("[!.]*"))) for name in ("adapters", "checkpoints", "eval"))
    return made + len(metric_rows(run_dir))


def check_whole(run_dir: Path, steps: int = STEPS) -> None:
    """Every batch is whole, every group left exactly once, every prompt of the first pass was drawn once."""
    trained = query(
        run_dir,
        "SELECT batch_serial, batch_position FROM rollout_group WHERE state = 'trained' ORDER BY 1, 2",
    )
    assert trained == [(serial, place) for serial in range(1, steps + 1) for place in range(GROUPS)]
    assert query(run_dir, "SELECT COUNT(*) FROM rollout_group WHERE state IN ('running', 'leased')") == [(0,)]
    samples = query(run_dir, "SELECT COUNT(*) FROM rollouts WHERE state = 'trained' GROUP BY group_id")
    assert set(samples) == {(4,)}
    prompts = Counter(row[0] for row in query(run_dir, "SELECT prompt_id FROM rollout_group WHERE state != 'dropped'"))
    assert max(prompts.values()) == 1, "20 prompts, fewer draws"


def check_within_bounds(run_dir: Path, lag: int) -> None:
    """What the pool says of ages: oldest token against the batch's beginning, and how far sampling ran ahead."""
    rows = query(run_dir, "SELECT batch_serial - 1, min_serial, max_serial FROM rollout_group WHERE state = 'trained'")
    assert all(0 <= begins - oldest <= lag or newest > begins for begins, oldest, newest in rows), rows
    assert all(begins - oldest <= lag for begins, oldest, _ in rows)


# ------------------------------------------------------------------ signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_with_zero_and_the_resume_command_goes_on_bit_for_bit(
    files: RunFiles, launcher: Launcher, tmp_path: Path, unbroken, number: int
) -> None:
    run_dir = tmp_path / "stopped run"
    stopped = launcher.start("train", files.yaml, f"run.dir={run_dir}", cwd=tmp_path)
    stopped.when(lambda: trained_serial(run_dir) >= 3).signal(number).wait()
    assert stopped.code == 0, stopped.err
    (command,) = [line for line in stopped.lines if "tithe resume" in line]
    assert command.endswith(f"tithe resume '{run_dir}'")
    assert "signal" in command
    done = trained_serial(run_dir)
    assert 3 <= done < STEPS
    assert query(run_dir, "SELECT MAX(serial) FROM checkpoint") == [(done,)]
    assert query(run_dir, "SELECT COUNT(*) FROM rollout_group WHERE state IN ('running', 'leased')") == [(0,)]
    resumed = launcher.run("resume", run_dir, "--json", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert resumed.answer()["steps"] == STEPS
    check_whole(run_dir)
    assert trained_tokens(run_dir) == trained_tokens(unbroken.run_dir)
    assert adapter_bytes(run_dir) == adapter_bytes(unbroken.run_dir)


def test_a_signal_answers_json_with_one_line_and_the_command(files, launcher, tmp_path) -> None:
    run_dir = tmp_path / "run"
    stopped = launcher.start("train", files.yaml, f"run.dir={run_dir}", "--json", cwd=tmp_path)
    stopped.when(lambda: events(run_dir) >= 1).signal(signal.SIGTERM).wait()
    assert stopped.code == 0, stopped.err
    answer = stopped.answer()
    assert answer["reason"] == "signal"
    assert answer["resume"] == f"tithe resume {run_dir}"


def test_a_second_signal_ends_at_once_and_the_run_can_still_be_resumed(files, launcher, tmp_path, unbroken) -> None:
    run_dir = tmp_path / "run"
    run = launcher.start("train", files.yaml, f"run.dir={run_dir}", cwd=tmp_path)
    run.when(lambda: trained_serial(run_dir) >= 2).signal(signal.SIGTERM)
    run.says("Stopping")
    if run.code is None:
        run.signal(signal.SIGTERM).wait()
    assert run.code in (0, -signal.SIGTERM)
    assert launcher.run("resume", run_dir, cwd=tmp_path).code == 0
    check_whole(run_dir)
    assert adapter_bytes(run_dir) == adapter_bytes(unbroken.run_dir)


# ------------------------------------------------------------------ refused publications


def test_a_run_whose_engine_serves_stale_prompts_stops_and_can_be_resumed(
    files, launcher, tmp_path, unbroken, monkeypatch, capsys
) -> None:
    """The probe refuses the first version that the cache outlives; nothing sampled under it was ever trained."""
    run_dir = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr("tithe.engines.shared.PromptCache", Forgetful)
        assert main(["train", str(files.yaml), f"run.dir={run_dir}"]) == 1
    err = capsys.readouterr().err
    assert re.search(
        r"^tithe: tiny-0-v1-\w{8} is refused \((mismatch|stale)\): .*the old version keeps serving", err, re.MULTILINE
    )
    assert json.loads((run_dir / "run.json").read_text())["status"] == "failed"
    resumed = launcher.run("resume", run_dir, cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    check_whole(run_dir)
    assert adapter_bytes(run_dir) == adapter_bytes(unbroken.run_dir)


# ------------------------------------------------------------------ kill -9


def kill_at_random(launcher: Launcher, run: Run, run_dir: Path, rng: random.Random) -> Run:
    """kill -9 somewhere within the next few things the run does."""
    target = events(run_dir) + rng.randrange(1, 14)
    run.when(lambda: events(run_dir) >= target)
    time.sleep(rng.random() * 0.03)
    if run.code is None:
        run.signal(signal.SIGKILL).wait()
    return run


def kill_and_resume(files_yaml: Path, launcher: Launcher, run_dir: Path, seed: int, kills: int, *extra: str) -> None:
    rng = random.Random(seed)
    run = launcher.start("train", files_yaml, f"run.dir={run_dir}", *extra, cwd=run_dir.parent)
    run.when((run_dir / "config.yaml").exists)
    for _ in range(kills):
        kill_at_random(launcher, run, run_dir, rng)
        if run.code == 0:
            break
        run = launcher.start("resume", run_dir, cwd=run_dir.parent)
        run.says("resume:")
    run.wait()
    assert run.code == 0, run.err


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 30))]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_synchronous_run_ends_as_if_unbroken(files, launcher, tmp_path, unbroken, seed) -> None:
    run_dir = tmp_path / "run"
    kill_and_resume(files.yaml, launcher, run_dir, seed, 3)
    check_whole(run_dir)
    check_within_bounds(run_dir, 0)
    assert trained_tokens(run_dir) == trained_tokens(unbroken.run_dir)
    assert adapter_bytes(run_dir) == adapter_bytes(unbroken.run_dir)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_asynchronous_run_loses_nothing_and_trains_nothing_twice(files, launcher, tmp_path, seed) -> None:
    run_dir = tmp_path / "run"
    file = files.write(
        "async", rl={"max_policy_update_lag": 2, "sync_every": 2}, run={"max_steps": STEPS, "checkpoint_every": 1}
    )
    kill_and_resume(file, launcher, run_dir, seed, 3)
    check_whole(run_dir)
    check_within_bounds(run_dir, 2)
    serials = [row["step"] for row in metric_rows(run_dir) if "loss" in row]
    assert serials == list(range(1, STEPS + 1)), "rows of batches that were trained again are replaced"
