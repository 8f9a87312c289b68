"""The code reward: which part of a reply is the program, and what its verdict is worth."""

from __future__ import annotations

import json

import pytest

from tithe.config import load_config
from tithe.rewards import RewardPool, build_reward
from tithe.rewards.code import LIMITS, find_program, reward_of
from tithe.sandbox import Outcome, Sandbox, SandboxUnavailableError, Verdict
from tithe.types import PromptItem

BLOCK = "```python\nprint(1)\n```"


@pytest.mark.parametrize(
    ("text", "program"),
    [
        (f"Here:\n{BLOCK}\nDone.", "print(1)\n"),
        ("```\nprint(1)\n```\n and better\n```py\nprint(2)\n```", "print(2)\n"),
        (f"{BLOCK}\nRun it:\n```bash\npython x.py\n```", "print(1)\n"),
        ("~~~python\nprint('''\n```\n''')\n~~~", "print('''\n```\n''')\n"),
        (f"<think>{BLOCK}</think>\nprint(3)", "\nprint(3)"),
        ("print(1)", "print(1)"),
        (f"{BLOCK}\n```python\nprint(2", None),
        ("The answer is 4.", None),
        ("```python\n```", None),
        ("", None),
        ("x = " + "(" * 5000, None),
        ("```" * 50000, None),
    ],
)
def test_the_program_is_the_last_complete_python_block(text, program):
    assert find_program(text) == program


def test_a_harness_that_failed_abstains_and_all_else_is_paid_or_not():
    assert reward_of(Verdict(Outcome.PASSED, 3, 3)) == {"tests": 1.0, "reason": "3/3 passed"}
    assert reward_of(Verdict(Outcome.TIMEOUT, 1, 3, "test 2")) == {"tests": 0.0, "reason": "1/3 timeout: test 2"}
    assert reward_of(Verdict(Outcome.HARNESS, 0, 0, "gone")) == {"reason": "harness failure: gone"}


def test_the_configurations_word_for_it_fits_the_defaults_of_its_workers():
    cfg = load_config(None, ["reward.function=code"])
    assert cfg.reward.function == "tithe.rewards.code:score"
    assert LIMITS.total_s + 1 < cfg.reward.timeout_s
    assert LIMITS.memory_mib < cfg.reward.memory_mib


def test_a_worker_judges_programs_in_the_sandbox_and_keeps_the_reason():
    try:
        Sandbox(1).close()
    except SandboxUnavailableError as error:
        pytest.skip(f"no sandbox of full strength here, and there is no weaker one: {error}")
    tests = json.dumps([{"name": "add", "args": [2, 3], "expected": 5}])
    rows = [
        (tests, "```python\ndef add(a, b):\n    return a + b\n```", 1.0, "1/1 passed"),
        (tests, "```python\ndef add(a, b):\n    return a - b\n```", 0.0, "0/1 wrong answer"),
        (tests, "I cannot.", 0.0, "no complete program"),
        ("assert add(1, 1) = 2", BLOCK, None, "cannot be run"),
        ("[1]", BLOCK, None, "no tests"),
    ]
    cfg = load_config(None, ["reward.function=code", "reward.timeout_s=60"])
    with RewardPool(build_reward(cfg.reward), timeout_s=60) as pool:
        for number, (answer, text, value, reason) in enumerate(rows):
            result = pool.submit(PromptItem(str(number), text="?", answer=answer), text).result()
            assert (result.value, result.failure) == (value, None), result
            assert reason in result.reason
        slow = PromptItem("slow", text="?", answer=tests, extra={"limits": {"wall_s": 0.3}})
        assert "timeout" in pool.submit(slow, "```\nwhile True: pass\n```").result().reason
