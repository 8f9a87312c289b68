"""Judges are killed from outside, abstain when they fail, and must return rewards (B01, B03, B25, F15, M33)."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tithe.config.sampling import FormatRule as FormatRuleSettings
from tithe.config.sampling import RewardSettings
from tithe.errors import ConfigError, DataError, FailureCause
from tithe.rewards import FormatRule, RewardPool, RewardSpec, build_reward
from tithe.rewards.process import WorkerProcess
from tithe.types import PromptItem

ITEM = PromptItem("p-0", messages=({"role": "user", "content": "3+4?"},), answer="7", extra={"level": 2})

JUDGES = """
import asyncio, ctypes, os, subprocess, sys, time
import numpy as np

async def later(item, text, finish):
    await asyncio.sleep(0.001)
    return {"item": item.extra["level"], "finish": 1.0 if finish == "stop" else 0.0}

def plain(item, text):
    return len(text)

def keyword(item, text, *, token_ids):
    return sum(token_ids)

def slow(item, text):
    time.sleep(0.02)
    return 1

def needs_more(item, text, other):
    return 1

def judge(item, text, **info):
    if text == "loop":
        subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(60)  # sleeper of {os.getppid()}"])
    if text in ("loop", "spin"):
        while True:
            pass
    if text == "modules":
        return float(any(name in sys.modules for name in ("torch", "transformers", "pydantic")))
    return {
        "exit": lambda: os._exit(0),
        "sys.exit": lambda: sys.exit(0),
        "crash": lambda: ctypes.string_at(0),
        "memory": lambda: len(bytearray(8 << 30)),
        "raise": lambda: 1 / 0,
        "print": lambda: print("seen") or 1.0,
        "pid": lambda: float(os.getpid()),
        "none": lambda: None,
        "float32": lambda: np.float32(0.25),
        "int": lambda: 3,
        "parts": lambda: {"a": 1.0, "b": -0.5},
        "true": lambda: True,
        "numpy true": lambda: np.bool_(True),
        "list": lambda: [1.0],
        "three": lambda: (1.0, 2.0, 3.0),
        "array": lambda: np.ones(4),
        "text": lambda: "1.0",
        "inf": lambda: float("inf"),
        "nan": lambda: float("nan"),
        "empty": lambda: {},
        "bad part": lambda: {"a": 1.0, "b": True},
        "bad name": lambda: {1: 1.0},
    }.get(text, lambda: 1.0)()
"""


@pytest.fixture(scope="module")
def judges(tmp_path_factory):
    path = tmp_path_factory.mktemp("judges") / "judges.py"
    path.write_text(JUDGES)
    return path


@pytest.fixture(scope="module")
def pool(judges):
    with RewardPool(RewardSpec(f"{judges}:judge"), timeout_s=20.0) as pool:
        yield pool


def score(pool, text, **info):
    return pool.submit(ITEM, text, info).result(timeout=60)


@pytest.mark.parametrize(
    ("text", "value", "parts"),
    [
        ("float32", 0.25, {"reward": 0.25}),
        ("int", 3.0, {"reward": 3.0}),
        ("parts", 0.5, {"a": 1.0, "b": -0.5}),
        ("print", 1.0, {"reward": 1.0}),
        ("modules", 0.0, {"reward": 0.0}),
    ],
)
def test_numbers_and_named_parts_are_rewards(pool, text, value, parts):
    result = score(pool, text)
    assert (result.value, result.parts, result.failure) == (value, parts, None)


@pytest.mark.parametrize(
    "text",
    ["true", "numpy true", "list", "three", "array", "text", "inf", "nan", "empty", "bad part", "bad name"],
)
def test_anything_else_is_an_error_that_names_the_function(pool, text):
    with pytest.raises(ConfigError, match=r"judges\.py:judge returned .* once per completion") as caught:
        score(pool, text)
    assert caught.value.key == "reward.function"


def test_none_is_an_abstention_without_failure(pool):
    result = score(pool, "none")
    assert (result.value, result.failure) == (None, None)
    assert "abstained" in result.reason


def test_a_worker_killed_while_idle_costs_no_judgement(pool):
    worker = int(score(pool, "pid").value)
    os.kill(worker, signal.SIGKILL)
    assert ends_within(worker, 10.0)
    assert score(pool, "x").value == 1.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise", "ZeroDivisionError: division by zero"),
        ("memory", "MemoryError"),
        ("exit", "exit code 0"),
        ("sys.exit", "exit code 0"),
        ("crash", f"signal {signal.SIGSEGV.value}"),
    ],
)
def test_a_judge_that_fails_or_dies_abstains_and_the_next_text_is_judged(pool, text, message):
    result = score(pool, text)
    assert result.value is None
    assert result.failure.cause is FailureCause.REWARD
    assert message in result.failure.message
    assert score(pool, "x").value == 1.0


def children():
    """pid → state of this process's children."""
    pids = [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]
    return {pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids}


def commands():
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            yield path.read_bytes()


def ends_within(pid, limit_s):
    """Whether a process is gone, or only waits to be reaped, within the limit."""
    status = Path(f"/proc/{pid}/stat")
    for _ in range(int(limit_s / 0.02)):
        try:
            if status.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def n_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.liveness
def test_endless_loops_are_killed_with_their_children_and_leave_no_zombie(judges):
    """B01, B03: the event loop keeps ticking, nothing is left behind, and the last text is judged all the same."""

    async def run(pool):
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.02)
                ticks += 1

        ticker = asyncio.create_task(tick())
        results = [await pool.score(ITEM, "loop") for _ in range(3)]
        last = await pool.score(ITEM, "x")
        ticker.cancel()
        return results, last, ticks

    before = n_descriptors()
    with RewardPool(RewardSpec(f"{judges}:judge"), timeout_s=0.3) as pool:
        pool.check()
        results, last, ticks = asyncio.run(run(pool))
        assert [result.failure.cause for result in results] == [FailureCause.TIMEOUT] * 3
        assert "reward.timeout_s = 0.3" in results[0].failure.message
        assert last.value == 1.0 or last.failure.cause is FailureCause.TIMEOUT
        assert ticks > 5
        assert pool.stats()["reward_timeouts"] >= 3
        assert "Z" not in children().values()
    assert n_descriptors() <= before + 1
    for _ in range(250):  # killed, but a process takes a moment to go
        if not (sleepers := [c for c in commands() if f"sleeper of {os.getpid()}".encode() in c]):
            break
        time.sleep(0.02)
    assert not sleepers


@pytest.mark.liveness
def test_the_limit_counts_from_the_start_and_not_from_the_queue(judges):
    """M33: 150 texts of 20 ms for two workers wait up to 1.5 s; the limit is 1 s."""
    with RewardPool(RewardSpec(f"{judges}:slow"), workers=2, timeout_s=1.0) as pool:
        pool.check()
        futures = [pool.submit(ITEM, str(number)) for number in range(150)]
        assert [future.result(timeout=60).value for future in futures] == [1.0] * 150


def test_any_thread_and_any_event_loop_may_ask(judges):
    """B25: busy threads beside it, one loop per thread."""
    totals = []

    def ask(pool):
        async def several():
            return await asyncio.gather(*(pool.score(ITEM, "x" * number) for number in range(10)))

        totals.append(sum(result.value for result in asyncio.run(several())))

    with RewardPool(RewardSpec(f"{judges}:plain"), workers=2) as pool:
        threads = [threading.Thread(target=ask, args=(pool,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert totals == [45.0] * 4


def test_information_reaches_functions_that_ask_for_it(judges):
    with RewardPool(RewardSpec(f"{judges}:later")) as pool:
        result = score(pool, "x", finish="stop", token_ids=[1, 2])
        assert result.parts == {"item": 2.0, "finish": 1.0}
    with RewardPool(RewardSpec(f"{judges}:keyword")) as pool:
        assert score(pool, "x", finish="stop", token_ids=[1, 2]).value == 3.0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("{}:nothing", "has no function 'nothing'"),
        ("{}:jugde", "did you mean judge"),
        ("{}:needs_more", "must be callable as"),
        ("/nowhere/judges.py:judge", "there is no file"),
        ("no_such_module:f", "No module named"),
    ],
)
def test_a_function_that_cannot_be_used_is_an_error_at_the_start(judges, function, message):
    with RewardPool(RewardSpec(function.format(judges))) as pool, pytest.raises(ConfigError, match=message):
        pool.check()


def test_a_module_that_ends_the_process_on_import_is_an_error(tmp_path):
    (tmp_path / "bad.py").write_text("import os; os._exit(3)")
    spec = RewardSpec(f"{tmp_path / 'bad.py'}:f")
    with RewardPool(spec) as pool, pytest.raises(ConfigError, match=r"ended while it loaded .*exit code 3"):
        pool.check()


@pytest.mark.liveness
def test_catastrophic_patterns_are_killed_and_others_are_paid():
    rules = (FormatRule(r"^(a+)+$", 0.5), FormatRule(r"(?s)^<b>.*</b>$", 0.25))
    with RewardPool(RewardSpec(format_rules=rules), timeout_s=1.0) as pool:
        pool.check()
        result = score(pool, "<b>7</b>")
        assert result.record() == {
            "answer": 1.0, "format.1": 0.0, "format.2": 0.25, "fact.right": 1.0, "fact.readable": 1.0,
        }  # fmt: skip
        assert result.value == 1.25
        assert score(pool, "a" * 60 + "!").failure.cause is FailureCause.TIMEOUT


@pytest.mark.parametrize("in_process", [True, False])
def test_the_math_reward_is_the_same_in_process_and_in_a_worker(in_process):
    spec = RewardSpec(right=2.0, wrong=0.5, unreadable=-1.0)
    with RewardPool(spec, in_process=in_process) as pool:
        pool.check()
        assert [score(pool, text).value for text in ("7", "8", "?")] == [2.0, 0.5, -1.0]
        facts = [score(pool, text).facts for text in ("7", "8", "?")]
        assert [(f["right"], f["readable"]) for f in facts] == [(1.0, 1.0), (0.0, 1.0), (0.0, 0.0)]
        nothing = pool.submit(PromptItem("x", answer=None), "7").result(timeout=60)
        assert (nothing.value, nothing.failure) == (None, None)
        assert pool.stats()["reward_worker_starts"] == (0.0 if in_process else 1.0)
        before_s, last = pool.stats()["reward_s"], score(pool, "7")
        assert last.seconds > 0
        assert pool.stats()["reward_s"] == pytest.approx(before_s + last.seconds)


def test_closing_cancels_what_is_queued_and_running(judges):
    before = set(children())
    pool = RewardPool(RewardSpec(f"{judges}:judge"), timeout_s=60.0)
    pool.check()
    assert set(children()) > before
    running, queued = pool.submit(ITEM, "loop"), pool.submit(ITEM, "x")
    while not running.running():
        time.sleep(0.005)
    pool.close()
    pool.close()
    late = pool.submit(ITEM, "x")
    for future in (running, queued, late):
        assert future.result(timeout=10).failure.cause is FailureCause.CANCELLED
    assert set(children()) == before


def test_an_abandoned_question_is_not_judged(judges):
    async def run(pool):
        blocked = asyncio.create_task(pool.score(ITEM, "x"))
        abandoned = asyncio.create_task(pool.score(ITEM, "x"))
        await asyncio.sleep(0)
        abandoned.cancel()
        await blocked

    with RewardPool(RewardSpec(f"{judges}:slow")) as pool:
        asyncio.run(run(pool))
        assert score(pool, "y").value == 1.0
        assert pool.stats()["reward_scored"] in (2.0, 3.0)


def test_rows_that_json_cannot_carry_are_named(pool):
    with pytest.raises(DataError, match="prompt odd"):
        pool.submit(PromptItem("odd", extra={"x": {1, 2}}), "x")
    with pytest.raises(DataError, match="prompt odd"):
        pool.submit(PromptItem("odd", extra={"x": np.float32(1)}), "x")


def test_what_functions_print_can_be_kept(judges, tmp_path):
    with RewardPool(RewardSpec(f"{judges}:judge"), log_path=tmp_path / "judges.log") as pool:
        score(pool, "print")
    assert "seen" in (tmp_path / "judges.log").read_text()


@pytest.mark.liveness
def test_workers_die_with_a_killed_run(judges):
    script = (
        "import sys, time; from tithe.rewards import *; from tithe.types import PromptItem\n"
        f"pool = RewardPool(RewardSpec({str(judges) + ':judge'!r}), timeout_s=300)\n"
        "print(int(pool.submit(PromptItem('x'), 'pid').result().value), flush=True)\n"
        "pool.submit(PromptItem('x'), 'spin'); time.sleep(300)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=env) as run:
        worker = int(run.stdout.readline())
        run.kill()
    assert ends_within(worker, 10.0)


def test_the_spec_follows_the_configuration():
    settings = RewardSettings(right=3.0, format_rules=(FormatRuleSettings(pattern="x", weight=0.5),))
    spec = build_reward(settings)
    assert (spec.right, spec.format_rules) == (3.0, (FormatRule("x", 0.5),))
    assert RewardSpec.from_json(spec.to_json()) == spec
    assert not spec.is_simple
    bare = build_reward(settings, shaping="none")
    assert (bare.unreadable, bare.format_rules, bare.is_simple) == (bare.wrong, (), True)


def test_a_worker_that_sends_no_message_is_replaced_and_nobody_waits_for_ever(judges, monkeypatch):
    def garbage(self, job, timeout_s):
        raise ValueError("not JSON")

    with RewardPool(RewardSpec(f"{judges}:judge")) as pool:
        with monkeypatch.context() as patched:
            patched.setattr(WorkerProcess, "ask", garbage)
            lost = pool.submit(ITEM, "int").result(timeout=60)
        assert (lost.value, lost.failure.cause) == (None, FailureCause.REWARD)
        assert pool.submit(ITEM, "int").result(timeout=60).value == 3.0


PREPARED = """
from tithe.errors import DataError
from tithe.rewards import prepared
ready = []

def judge(item, text):
    return len(ready)

judge = prepared(lambda: ready.append(1))(judge)

def refused(item, text):
    return 1

def refuse():
    raise DataError("there is no model")

refused.prepare = refuse
"""


def test_a_function_is_prepared_once_before_the_first_text(tmp_path):
    (tmp_path / "prepared.py").write_text(PREPARED)
    with RewardPool(RewardSpec(f"{tmp_path}/prepared.py:judge")) as pool:
        assert [pool.submit(ITEM, "x").result(timeout=60).value for _ in range(2)] == [1.0, 1.0]
    with (
        RewardPool(RewardSpec(f"{tmp_path}/prepared.py:refused")) as pool,
        pytest.raises(ConfigError, match="no model"),
    ):
        pool.check()
