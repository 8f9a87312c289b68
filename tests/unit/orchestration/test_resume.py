"""A run that is killed or stopped and resumed: conservation always, bit for bit when synchronous."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tithe.errors import ResumeError, RunError
from tithe.orchestration import StopReason
from tithe.pool import PoolReader
from unit.orchestration.fakes import World

WORKER = Path(__file__).with_name("run_worker.py")
STEPS = 8


def launch(folder: Path, mode: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(WORKER), str(folder), mode, str(STEPS)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(WORKER.parents[2]), *sys.path])}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)


def finish(child: subprocess.Popen[bytes]) -> tuple[int, list[list[str]], str]:
    out, err = child.communicate(timeout=60)
    return child.returncode, [line.split() for line in out.decode().splitlines()], err.decode()


def run_to_the_end(folder: Path, mode: str) -> str:
    code, lines, err = finish(launch(folder, mode))
    assert code == 0, err
    assert lines[-1][:3] == ["ended", "max_steps", str(STEPS)]
    return lines[-1][3]


def kill_once(folder: Path, mode: str, lines: int) -> None:
    with launch(folder, mode) as child:
        assert child.stdout is not None
        for _ in range(lines):
            child.stdout.readline()
        child.kill()
        child.communicate()


def check_every_batch_is_whole_and_every_group_trained_once(folder: Path) -> None:
    with PoolReader(folder / "pool.sqlite") as reader:
        trained = reader.query(
            "SELECT batch_serial, batch_position, prompt_id FROM groups WHERE state = 'trained' ORDER BY 1, 2"
        )
        samples = reader.query("SELECT COUNT(*) AS n FROM rollouts WHERE state = 'trained' GROUP BY group_id")
    assert [(row["batch_serial"], row["batch_position"]) for row in trained] == [
        (serial, place) for serial in range(1, STEPS + 1) for place in range(3)
    ]
    assert len({row["prompt_id"] for row in trained}) == 3 * STEPS, "the first pass trains each prompt once"
    assert {row["n"] for row in samples} == {2}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    return run_to_the_end(folder, "sync")


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 40))])
def test_a_killed_synchronous_run_ends_with_the_very_same_weights(tmp_path, unbroken, seed):
    rng = random.Random(seed)
    for _ in range(2):
        kill_once(tmp_path, "sync", rng.randrange(1, 4 * STEPS))
    assert run_to_the_end(tmp_path, "sync") == unbroken
    check_every_batch_is_whole_and_every_group_trained_once(tmp_path)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 40))])
def test_a_killed_asynchronous_run_loses_no_group_and_trains_none_twice(tmp_path, seed):
    rng = random.Random(seed)
    for _ in range(2):
        kill_once(tmp_path, "async", rng.randrange(1, 4 * STEPS))
    run_to_the_end(tmp_path, "async")
    check_every_batch_is_whole_and_every_group_trained_once(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_cleanly_and_the_run_goes_on_as_if_nothing_had_been(tmp_path, unbroken, number):
    child = launch(tmp_path, "sync")
    assert child.stdout is not None
    for _ in range(14):  # in the middle of a batch
        child.stdout.readline()
    child.send_signal(number)
    code, lines, err = finish(child)
    assert code == 0, err
    assert "second signal" in err
    assert lines[-1][:2] == ["ended", "signal"]
    serial = int(lines[-1][2])
    with PoolReader(tmp_path / "pool.sqlite") as reader:
        assert reader.query("SELECT MAX(serial) AS serial FROM checkpoint") == [{"serial": serial}]
    assert run_to_the_end(tmp_path, "sync") == unbroken


def test_a_second_signal_stops_at_once(tmp_path):
    code = """
import time
from tithe.orchestration import RunControl, stop_on_signals
with stop_on_signals(RunControl()):
    print("ready", flush=True)
    while True: time.sleep(0.05)
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.readline()
        child.send_signal(signal.SIGTERM)
        while b"second signal" not in child.stderr.readline():
            pass
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=30)
    assert child.returncode == -signal.SIGINT


def test_versions_go_on_where_they_were(tmp_path):
    """D15, E09: after a checkpoint of batch 4 the next batch is 5, and the first version served is 4."""
    first = World(tmp_path, steps=4)
    first.run()
    second = World(tmp_path, steps=6)
    second.run()
    assert [v.serial for v in second.published] == [4, 5, 6]
    assert [step for step, _ in second.sink.named("loss")] == [5, 6]
    assert first.trainer.batches + second.trainer.batches == [[3 * i, 3 * i + 1, 3 * i + 2] for i in range(6)]


def test_early_stop_and_evaluations_survive_a_resume(tmp_path):
    scores = {0: 0.9, 2: 0.8, 4: 0.7, 6: 0.6}
    first = World(tmp_path, steps=4, eval_every=2, patience=3)
    first.score = lambda version: scores[version.version.serial]
    first.run()
    second = World(tmp_path, steps=20, eval_every=2, patience=3)
    second.score = first.score
    outcome = second.run()
    assert (outcome.reason, outcome.serial) == (StopReason.PATIENCE, 6)
    assert second.sink.named("eval_sampled") == [(6, 0.6)]


def test_a_checkpoint_of_another_batch_is_refused(tmp_path):
    World(tmp_path, steps=4).run()
    again = World(tmp_path, steps=6)
    with pytest.raises(ResumeError, match="no checkpoint 3"):
        again.pool.rewind_to_checkpoint(3)
    older = again.pool.checkpoints()[-1]
    assert older.serial == 2
    assert older.state["kl_coef"] == 0.01
    with pytest.raises(RunError, match="of batch 2, the pool stands at 4"):
        again.train.resume_from(older)
    again.close()
