"""A run over ranks through the command line: the run of one rank, killed ranks, and going on on another number."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from support.checkpoints import build_hf
from support.launcher import Launcher, Run
from support.runs import RunFiles, metric_rows, query, trained_serial, trained_tokens

pytestmark = pytest.mark.integration

STEPS, GROUPS = 3, 2


@pytest.fixture(scope="module")
def file(files: RunFiles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of 4 experts, with adapters on all of them."""
    model = build_hf(tmp_path_factory.mktemp("moe") / "m", "qwen3_moe")
    run = {"max_steps": STEPS, "eval_every": None, "checkpoint_every": 1}
    return files.write("moe", model={"path": str(model)}, run=run)


@pytest.fixture(scope="module")
def alone(file: Path, launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    run = launcher.run("train", file, f"run.dir={run_dir}", cwd=run_dir.parent)
    assert run.code == 0, run.err
    return run_dir


def others(run: Run) -> dict[int, int]:
    """Rank → process of a run's ranks above 0."""
    found: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            before, _, after = (path / "stat").read_text().rpartition(")")
        except OSError:
            continue  # it has just ended
        name = before.partition("(")[2]
        if int(after.split()[1]) == run.pid and name.startswith("tithe-rank-"):
            found[int(name.removeprefix("tithe-rank-"))] = int(path.name)
    return found


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def adapter(run_dir: Path) -> dict[str, np.ndarray]:
    return load_file(run_dir / "adapter" / "adapter_model.safetensors")


def difference(mine: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    """The largest ‖mine − theirs‖ / ‖theirs‖ of a tensor."""
    assert mine.keys() == theirs.keys()
    return max(float(np.linalg.norm(mine[n] - t) / np.linalg.norm(t)) for n, t in theirs.items() if t.any())


# ------------------------------------------------------------------ the same run


def test_four_ranks_run_what_one_rank_runs(file: Path, alone: Path, launcher: Launcher, tmp_path: Path) -> None:
    """The first batch is sampled to the bit as on one rank. Later ones follow adapters whose gradients were summed in
    another order: masters differ by less than 5e-5 after three steps at lr 0.01 (5.4e-6 measured on two ranks).
    """
    run_dir = tmp_path / "run"
    run = launcher.run("train", file, f"run.dir={run_dir}", "run.ranks=4", "--json", cwd=tmp_path)
    assert run.code == 0, run.err
    assert run.answer()["max_abs_dlogp"] == 0.0, "trainer and sampler agree to the bit"
    first = GROUPS * 4
    assert trained_tokens(run_dir)[:first] == trained_tokens(alone)[:first]
    assert [row[:9] for row in trained_tokens(run_dir)] == [row[:9] for row in trained_tokens(alone)]
    assert difference(adapter(run_dir), adapter(alone)) < 5e-5
    rows, wanted = ([row for row in metric_rows(d) if "loss" in row] for d in (run_dir, alone))
    for mine, theirs in zip(rows, wanted, strict=True):
        assert mine["router_agreement"] == 1.0, "every replayed choice is the trainer's own"
        assert mine["ratio_max"] == 1.0
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
        assert mine["reward_mean"] == theirs["reward_mean"]
    mine, theirs = (json.loads((d / "run.json").read_text()) for d in (run_dir, alone))
    assert mine["model"] == theirs["model"], "the base's checksum is nobody's in particular"
    assert (mine["machine"]["ranks"], theirs["machine"]["ranks"]) == (4, 1)
    peaks = [mine["memory"][f"rank_{rank}_peak_rss_bytes"] for rank in range(4)]
    assert all(peak > 50e6 for peak in peaks), "a process with torch in it"
    assert rows[-1]["rank_peak_bytes"] == max(peaks)
    assert "rank_0_peak_rss_bytes" not in theirs["memory"]
    first, second = (next(r["eval_sampled"] for r in metric_rows(d) if "eval_sampled" in r) for d in (run_dir, alone))
    assert first == second


def test_parity_over_ranks_is_zero_and_says_their_number(file: Path, launcher: Launcher, tmp_path: Path) -> None:
    run = launcher.run("parity", file, "run.ranks=2", "--json", cwd=tmp_path)
    assert run.code == 0, run.err
    answer = run.answer()
    assert answer["ranks"] == 2
    assert answer["max_abs_dlogp"] == answer["mean_abs_dlogp"] == answer["dequantized_max_abs_dlogp"] == 0.0
    assert answer["noise_floor"] > 0
    assert answer["versions"] >= 2


def test_more_ranks_than_experts_are_refused(file: Path, launcher: Launcher, tmp_path: Path) -> None:
    run = launcher.run("train", file, f"run.dir={tmp_path / 'run'}", "run.ranks=5", cwd=tmp_path)
    assert run.code == 2
    assert "run.ranks = 5: the model has 4 experts" in run.err
    assert "Traceback" not in run.err
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------ ends


def until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 60.0
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a rank is left behind"
        time.sleep(0.01)


def test_a_run_survives_the_death_of_any_rank_on_any_number(file: Path, launcher: Launcher, tmp_path: Path) -> None:
    """Asynchronous. Rank 2 of 4 is killed; two ranks go on until all are terminated, then until rank 0 is killed; one
    rank ends it, with a larger lag.
    """
    run_dir, steps = tmp_path / "run", 10
    bounds = ("rl.max_policy_update_lag=1", "rl.max_sample_age=1", f"run.max_steps={steps}")
    run = launcher.start("train", file, f"run.dir={run_dir}", "run.ranks=4", *bounds, cwd=tmp_path)
    run.when(lambda: trained_serial(run_dir) >= 2)
    ranks = others(run)
    assert sorted(ranks) == [1, 2, 3]
    os.kill(ranks[2], signal.SIGKILL)
    assert run.wait().code == 1
    said = [line for line in run.err.splitlines() if line.startswith("tithe: ")]
    (line,) = [line for line in said if not line.startswith("tithe: warning: ")]
    assert "rank 2 was killed by SIGKILL" in line
    assert "tithe resume" in line
    assert "Traceback" not in run.err
    assert json.loads((run_dir / "run.json").read_text())["status"] == "failed"
    until_gone(list(ranks.values()))
    assert query(run_dir, "SELECT COUNT(*) FROM rollout_group WHERE state = 'dropped'") == [(0,)]

    def go_on(*changes: str) -> Run:
        done = trained_serial(run_dir)
        return launcher.start("resume", run_dir, *changes, cwd=tmp_path).when(lambda: trained_serial(run_dir) > done)

    run = go_on("run.ranks=2")
    (other,) = others(run).values()
    for pid in (run.pid, other):  # as a batch system does
        os.kill(pid, signal.SIGTERM)
    assert run.wait().code == 0, run.err
    assert "tithe resume" in run.out
    until_gone([other])

    run = go_on()
    (other,) = others(run).values()
    run.signal(signal.SIGKILL).wait()
    until_gone([other])

    run = go_on("run.ranks=1", "rl.max_policy_update_lag=3", "rl.max_sample_age=3").wait()
    assert run.code == 0, run.err
    trained = query(
        run_dir, "SELECT batch_serial, batch_position FROM rollout_group WHERE state = 'trained' ORDER BY 1, 2"
    )
    assert trained == [(serial, place) for serial in range(1, steps + 1) for place in range(GROUPS)]
    assert query(run_dir, "SELECT COUNT(*) FROM rollout_group WHERE state IN ('running', 'leased')") == [(0,)]


# ------------------------------------------------------------------ every parameter


def test_every_parameter_of_a_mixture_is_trained_over_ranks(
    files: RunFiles, launcher: Launcher, tmp_path: Path
) -> None:
    """Two ranks hold halves of weights and moments, and sample from copies whose experts they share. One is killed; one
    rank goes on to what it would have trained alone: the changes of tensors differ by less than 1e-3 of their norm
    (none measured: Adam divides out the last bits of a first gradient).
    """
    values = yaml.safe_load(files.yaml.read_text())
    del values["lora"]
    model = build_hf(tmp_path / "m", "qwen3_moe", dtype="float32")
    values["model"] |= {"path": str(model), "train": "full", "base_dtype": "fp32", "quantize": "none"}
    values["rl"]["router_replay"] = False
    values["optimizer"] = {"lr": 1e-3, "lr_scheduler": "constant", "warmup_steps": 0}
    values["run"] |= {"eval_every": None, "checkpoint_every": 1}
    file = tmp_path / "full.yaml"
    file.write_text(yaml.safe_dump(values))
    run_dir, alone = tmp_path / "run", tmp_path / "alone"

    run = launcher.start("train", file, f"run.dir={run_dir}", "run.ranks=2", "run.max_steps=200", cwd=tmp_path)
    run.when(lambda: trained_serial(run_dir) >= 2)
    ((_, other),) = others(run).items()
    os.kill(other, signal.SIGKILL)
    assert run.wait().code == 1
    assert "rank 1 was killed by SIGKILL" in run.err
    assert "Traceback" not in run.err
    until_gone([other])
    steps = f"run.max_steps={trained_serial(run_dir) + 1}"
    run = launcher.run("resume", run_dir, "run.ranks=1", steps, "--json", cwd=tmp_path)
    assert run.code == 0, run.err
    assert 0 < run.answer()["max_abs_dlogp"] < 1e-4, "transformers against the engine's copies"
    run = launcher.run("train", file, f"run.dir={alone}", steps, cwd=tmp_path)
    assert run.code == 0, run.err
    assert trained_tokens(run_dir)[: GROUPS * 4] == trained_tokens(alone)[: GROUPS * 4]
    start, mine, theirs = (load_file(d / "model.safetensors") for d in (model, run_dir / "model", alone / "model"))
    changes = [{name: trained[name] - tensor for name, tensor in start.items()} for trained in (mine, theirs)]
    assert all(change.any() for change in changes[1].values())
    assert difference(*changes) < 1e-3
    rows, wanted = ([row for row in metric_rows(d) if "loss" in row] for d in (run_dir, alone))
    for mine, theirs in zip(rows, wanted, strict=True):
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
        assert mine["entropy"] == pytest.approx(theirs["entropy"], rel=1e-4)
