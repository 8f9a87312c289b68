"""Honest programs pass whatever way they are tested, wrong ones fail with a reason, tests that say nothing abstain."""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import threading
import time

import pytest

from tithe.sandbox import AssertTests, FunctionTest, Limits, Outcome, StdioTest, parse_tests

ADD = [FunctionTest("add", [2, 3], 5), FunctionTest("add", [-1, 1], 0)]
RIGHT = "def add(a, b):\n    return a + b\n"


@pytest.mark.liveness
def test_an_endless_loop_is_stopped_while_the_event_loop_ticks(sandbox):
    async def run() -> tuple[list, float, float]:
        gaps, done = [], asyncio.Event()

        async def tick() -> None:
            last = time.monotonic()
            while not done.is_set():
                await asyncio.sleep(0.05)
                gaps.append(time.monotonic() - last)
                last = time.monotonic()

        ticker = asyncio.create_task(tick())
        loops = [sandbox.run_tests_async("while True: pass", ADD, Limits(wall_s=1)) for _ in range(4)]
        began = time.monotonic()
        verdicts = await asyncio.gather(*loops)
        took = time.monotonic() - began
        done.set()
        await ticker
        return verdicts, took, max(gaps)

    verdicts, took, gap = asyncio.run(run())
    assert [verdict.outcome for verdict in verdicts] == [Outcome.TIMEOUT] * 4
    assert took < 10
    assert gap < 1


def test_output_over_the_limit_is_no_wrong_answer_and_passes_with_a_larger_limit(sandbox):
    digits = "7" * 200_000
    program = "print('7' * 200_000)"
    verdict = sandbox.run_tests(program, [StdioTest("", digits)], Limits(output_kib=64))
    assert (verdict.outcome, verdict.reward) == (Outcome.OUTPUT, 0.0)
    assert sandbox.run_tests(program, [StdioTest("", digits[: 64 << 10])], Limits(output_kib=64)).reward == 0.0
    assert sandbox.run_tests(program, [StdioTest("", digits)], Limits(output_kib=256)).reward == 1.0


@pytest.mark.parametrize(
    "program",
    [
        "import sys\nsys.stdout.buffer.write(str(sum(map(int, input().split()))).encode())",
        "import sys\na, b = sys.stdin.buffer.read().split()\nprint(int(a) + int(b))",
        "import sys\nfor line in sys.stdin: print(sum(map(int, line.split())))",
        "from threading import Thread\nt = Thread(target=lambda: print(sum(map(int, input().split()))))\nt.start()",
        "if __name__ == '__main__':\n    print(sum(map(int, open(0).read().split())))\n    exit()",
        "import atexit\natexit.register(lambda: print(5))",
        "import asyncio\nasync def main(): print(5)\nasyncio.run(main())",
        "import sys\nsys.setrecursionlimit(100000)\ndef f(n): return n and 1 + f(n - 1)\nf(20000)\nprint(5)",
        "import tempfile\nwith tempfile.TemporaryFile() as file: file.write(b'5')\nprint(5)",
        "import multiprocessing\nwith multiprocessing.get_context('fork').Pool(2) as pool: print(sum(pool.map(int, input().split())))",
        "import numbers, sqlite3, zlib, random, datetime, bisect\nprint(5)",
    ],
)
def test_a_script_uses_the_interpreter_as_usual(sandbox, program):
    verdict = sandbox.run_tests(program, [StdioTest("2 3\n", "5\n")])
    assert verdict.outcome is Outcome.PASSED, verdict


def test_a_script_is_judged_by_what_it_prints_and_how_it_ends(sandbox):
    test = [StdioTest("", "5")]
    assert sandbox.run_tests("print(6)", test).outcome is Outcome.WRONG
    assert sandbox.run_tests("print(5)\nraise ValueError('late')", test).outcome is Outcome.ERROR
    verdict = sandbox.run_tests("import sys\nprint(5)\nsys.exit(3)", test)
    assert (verdict.outcome, verdict.detail) == (Outcome.ERROR, "test 1: ended with status 3")
    assert "SyntaxError" in sandbox.run_tests("print(5", test).detail


def test_each_test_on_standard_input_is_a_run_of_its_own_and_all_wrong_ones_are_run(sandbox):
    tests = [StdioTest(str(n), str(n * n)) for n in range(4)]
    verdict = sandbox.run_tests("n = int(input())\nprint(n * n if n != 2 else 0)", tests)
    assert (verdict.outcome, verdict.passed, verdict.total) == (Outcome.WRONG, 3, 4)
    assert verdict.detail.startswith("test 3")


def test_functions_are_found_at_the_top_in_a_class_and_as_a_method_of_solution(sandbox):
    solution = "class Solution:\n    def add(self, a, b): return a + b\n"
    assert sandbox.run_tests(solution, ADD).reward == 1.0
    assert sandbox.run_tests(solution, [FunctionTest("Solution.add", [2, 3], 5)]).reward == 1.0
    assert "defines no 'add'" in sandbox.run_tests("x = 1", ADD).detail


def test_a_hundred_tests_of_a_named_function_stay_tests_of_it_when_ten_are_taken(sandbox):
    tests = parse_tests({"fn_name": "add", "inputs": [[n, 1] for n in range(100)], "outputs": list(range(1, 101))})
    verdict = sandbox.run_tests(RIGHT, tests[::10])
    assert (verdict.reward, verdict.total) == (1.0, 10)


@pytest.mark.parametrize(
    ("returned", "expected", "is_right"),
    [
        ("(1, 2)", [1, 2], True),
        ("[1, 2]", [2, 1], False),
        ("True", 1, False),
        ("1", True, False),
        ("2.0", 2, True),
        ("0.1 + 0.2", 0.3, True),
        ("float('nan')", 0, False),
        ("None", 0, False),
        ("''", 0, False),
        ("{1: 'a'}", {"1": "a"}, True),
        ("{1, 2}", [1, 2], False),
        ("10 ** 4000", 10**4000, True),
        ("'\\ud800'", "\ud800", True),
    ],
)
def test_results_are_compared_as_json_values(sandbox, returned, expected, is_right):
    verdict = sandbox.run_tests(f"def f(): return {returned}", [FunctionTest("f", [], expected)])
    assert verdict.reward == float(is_right), verdict


ASSERTS = {
    "plain": "assert add(2, 3) == 5\nassert add(-1, 1) == 0",
    "imported": "from solution import add\nimport solution\nassert add(2, 3) == 5 == solution.add(1, 4)",
    "functions": "import pytest\ndef test_one():\n    assert add(2, 3) == 5\ndef test_two():\n    with pytest.raises(TypeError):\n        add(1, 'a')",
    "parametrized": "import pytest\n@pytest.mark.parametrize('a, b, c', [(2, 3, 5), (0, 0, 0)])\ndef test(a, b, c):\n    assert add(a, b) == c",
    "approx": "from pytest import approx\nassert add(0.1, 0.2) == approx(0.3)",
    "unittest": "import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n        self.assertEqual(add(2, 3), 5)",
    "class": "class TestAdd:\n    def test_it(self):\n        assert add(2, 3) == 5",
    "script": "if __name__ == '__main__':\n    assert add(2, 3) == 5",
    "runner": "import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n        self.assertEqual(add(2, 3), 5)\nif __name__ == '__main__':\n    unittest.main()",
    "helper": "def test_one(a, b, c):\n    assert add(a, b) == c\ntest_one(2, 3, 5)",
    "loop": "for a in range(5):\n    assert add(a, 1) == a + 1",
}


@pytest.mark.parametrize("kind", ASSERTS)
def test_asserts_of_every_kind_pass_the_right_program_and_fail_the_wrong_one(sandbox, kind):
    tests = AssertTests(ASSERTS[kind])
    right = sandbox.run_tests(RIGHT, tests)
    assert right.outcome is Outcome.PASSED, right
    assert sandbox.run_tests("def add(a, b):\n    return a - b if b else a\n", tests).reward == 0.0


def test_a_check_function_gets_the_entry_point_and_nothing_else_of_the_program(sandbox):
    tests = AssertTests("def check(candidate):\n    assert candidate(2, 3) == 5\n    assert helper is None", "add")
    program = RIGHT + "def helper(): pass\n"
    assert "NameError" in sandbox.run_tests(program, tests).detail
    good = AssertTests("def check(candidate):\n    assert candidate(2, 3) == 5", "add")
    assert sandbox.run_tests(program, good).reward == 1.0
    assert sandbox.run_tests("def plus(a, b): return a + b", good).reward == 0.0


WRONG_ONE = "def add(a, b): return 5\ndef main(n): return 1\n"


@pytest.mark.parametrize(
    "under",
    [
        "assert domain(1) == 2",
        "assert main(1) == 2",
        "main()",
        "sys.exit(main())",
        "start()",
    ],
)
@pytest.mark.parametrize("runner", ["", "import unittest\n", "from pytest import main as run\n"])
def test_what_stands_in_a_main_block_is_run_whatever_it_is_called(sandbox, under, runner):
    own = "import sys\ndef domain(n): return main(n)\n"
    if under.endswith(("main()", "main())")):
        own += "def main():\n    assert add(1, 1) == 2\n    return 0\n"
    elif under == "start()":
        own += "def start():\n    assert add(1, 1) == 2\n"
    tests = f"{runner}{own}assert add(2, 3) == 5\nif __name__ == '__main__':\n    {under}\n"
    assert sandbox.run_tests(WRONG_ONE, AssertTests(tests)).reward == 0.0


@pytest.mark.parametrize(
    "runner",
    [
        "import unittest as u\nif __name__ == '__main__':\n    u.main()",
        "from unittest import main\nif __name__ == '__main__':\n    main(verbosity=2)",
        "from pytest import main as run\nimport sys\nif __name__ == '__main__':\n    sys.exit(run([__file__]))",
        "import pytest\ndef main():\n    pytest.main()\nif __name__ == '__main__':\n    main()",
        "import unittest\nunittest.main()",
    ],
)
def test_the_start_of_a_runner_is_left_out_under_every_name_and_in_every_place(sandbox, runner):
    tests = AssertTests(f"def test_it():\n    assert add(2, 3) == 5\n{runner}\n")
    verdict = sandbox.run_tests(RIGHT, tests)
    assert (verdict.outcome, verdict.reward) == (Outcome.PASSED, 1.0), verdict
    assert sandbox.run_tests("def add(a, b): return 0", tests).reward == 0.0


SUM = "def sum(a, b): return a + b if a + b != 25 else 6\n"
SUM_CHECK = "def check(candidate):\n    assert candidate(10, 15) == 6"


@pytest.mark.parametrize(
    ("tests", "entry"),
    [
        ("assert sum(10, 15) == 6\nassert sum(1, b=2) == 3", None),
        ("def test_sum():\n    assert 6 == sum(10, 15) and isinstance(sum(1, 2), int)", None),
        ("from solution import *\nassert sum(10, 15) == 6", None),
        ("from solution import sum\nassert sum(10, 15) == 6", None),
        ("import solution\nassert solution.sum(10, 15) == 6", None),
        ("x = sum(10, 15)\nassert x == 6", "sum"),
        ("assert abs(sum(10, 15)) == 6", "sum"),
        (SUM_CHECK, "sum"),
    ],
)
def test_a_function_that_is_called_as_a_built_in_one_is_the_programs(sandbox, tests, entry):
    verdict = sandbox.run_tests(SUM, AssertTests(tests, entry))
    assert (verdict.outcome, verdict.reward) == (Outcome.PASSED, 1.0), verdict
    assert sandbox.run_tests("def sum(a, b): return 0\ndef abs(x): return 6", AssertTests(tests, entry)).reward == 0.0
    assert sandbox.run_tests("x = 1", AssertTests(tests, entry)).reward == 0.0


def test_python_s_own_function_is_never_judged_in_a_programs_place(sandbox):
    for entry in (None, "max"):
        verdict = sandbox.run_tests("x = 1", AssertTests("assert max(1, 2) == 2", entry))
        assert (verdict.reward, "defines no 'max'" in verdict.detail) == (0.0, True)


@pytest.mark.parametrize(
    ("tests", "entry"),
    [
        ("x = sum(10, 15)\nassert x == 6", None),
        ("assert abs(sum(10, 15)) == 6", None),
        ("assert sum(10, 15) == 6\nassert abs(-1) == 1", None),
        ("def check(candidate):\n    assert candidate([1, 2]) == sum([1, 2])", "sum"),
    ],
)
def test_a_built_in_name_that_may_be_tool_or_tested_makes_the_verdict_abstain(sandbox, tests, entry):
    verdict = sandbox.run_tests("def sum(a, b=0): return 6", AssertTests(tests, entry))
    assert (verdict.outcome, verdict.reward) == (Outcome.HARNESS, None)
    assert "'sum' in them may be Python's own or the program's" in verdict.detail


CLASSES = """
class Empty(ValueError): pass
class Stack:
    limit = 3
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item); return self
    def pop(self):
        if not self.items: raise Empty("nothing there")
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __eq__(self, other): return isinstance(other, Stack) and self.items == other.items
    def __getitem__(self, place): return self.items[place]
    def __enter__(self): return self
    def __exit__(self, *_): self.items.clear()
def reverse(items): items.reverse()
def count(mapping, key): mapping[key] = mapping.get(key, 0) + 1
def apply(function, values): return [function(value) for value in values]
def numbers(n):
    for i in range(n): yield i
"""


def test_asserts_use_a_programs_classes_exceptions_generators_and_callbacks(sandbox):
    tests = """
import pytest
s = Stack().push(1).push(2)
assert len(s) == 2 and list(s) == [1, 2] and s[0] == 1 and 2 in s and 5 not in s
assert s == Stack().push(1).push(2) and s != Stack() and s.limit == 3 and isinstance(s, Stack)
assert s.pop() == 2
with pytest.raises(Empty, match="nothing"):
    Stack().pop()
try:
    Stack().pop()
except ValueError as error:
    assert str(error) == "nothing there"
with s as t:
    t.push(4)
assert not list(s)
x = [1, 2, 3]
reverse(x)
assert x == [3, 2, 1]
m = {}
count(m, "a")
count(m, "a")
assert m == {"a": 2}
assert apply(lambda v: v * v, [1, 2, 3]) == [1, 4, 9]
assert list(numbers(3)) == [0, 1, 2] and sum(numbers(4)) == 6
"""
    verdict = sandbox.run_tests(CLASSES, AssertTests(tests))
    assert (verdict.outcome, verdict.passed) == (Outcome.PASSED, verdict.total), verdict


@pytest.mark.parametrize("kind", ["FileNotFoundError", "OSError", "MemoryError", "UnicodeDecodeError", "StopIteration"])
def test_every_exception_of_the_language_arrives_as_itself(sandbox, kind):
    made = "UnicodeDecodeError('utf-8', b'x', 0, 1, 'why')" if kind == "UnicodeDecodeError" else f"{kind}(2, 'why')"
    program = f"class Odd:\n    def __next__(self): raise {made}\ndef odd(): return Odd()"
    tests = f"import pytest\nwith pytest.raises({kind}, match='why'):\n    next(odd())"
    verdict = sandbox.run_tests(program, AssertTests(tests))
    assert verdict.outcome is Outcome.PASSED, verdict


@pytest.mark.parametrize(
    "tests",
    [
        "import pytest\n@pytest.fixture\ndef x(): pass\ndef test(x): assert x",
        "import numpy\nassert numpy.all(add(1, 2) == 3)",
        "assert add(1, 2) = 3",
        "x = 1",
        "'only words'",
        "print(add(2, 3))",
        "def test_it(tmp_path):\n    assert add(2, 3) == 5",
        "assert add(iter([]), 2)",
    ],
)
def test_tests_that_cannot_be_run_abstain(sandbox, tests):
    verdict = sandbox.run_tests(RIGHT, AssertTests(tests))
    assert (verdict.outcome, verdict.reward) == (Outcome.HARNESS, None)
    assert verdict.detail


def test_two_hundred_programs_from_many_threads_beside_busy_ones(sandbox):
    stop = threading.Event()
    busy = [
        threading.Thread(target=lambda: [hashlib.sha256(bytes(1 << 20)) for _ in iter(stop.is_set, True)])
        for _ in range(8)
    ]
    for thread in busy:
        thread.start()

    async def grade() -> list:
        crash = "import ctypes\ndef add(a, b): ctypes.string_at(0)"
        programs = [RIGHT if n % 20 else crash for n in range(200)]
        return await asyncio.gather(*(sandbox.run_tests_async(program, ADD) for program in programs))

    try:
        verdicts = asyncio.run(grade())
    finally:
        stop.set()
        for thread in busy:
            thread.join()
    assert [verdict.reward for verdict in verdicts] == [float(bool(n % 20)) for n in range(200)]
    assert verdicts[0].detail == f"test 1: ended by signal {11}"


def test_a_limit_counts_from_the_programs_start_and_not_from_the_queue(sandbox):
    program = "import time\ntime.sleep(0.6)\ndef add(a, b): return a + b"
    waiting = [sandbox.submit(program, ADD, Limits(wall_s=3)) for _ in range(24)]
    assert [future.result().reward for future in waiting] == [1.0] * 24


def test_a_program_that_takes_many_processors_is_stopped_by_its_processor_time(sandbox):
    verdict = sandbox.run_tests("while True: pass", ADD, Limits(wall_s=30, cpu_s=1))
    assert verdict.outcome is Outcome.TIMEOUT
    assert "processor time" in verdict.detail


def test_this_process_keeps_its_own_capabilities_and_namespaces(sandbox):
    libc = ctypes.CDLL(None)
    assert libc.prctl(39, 0, 0, 0, 0) == 0, "no_new_privs was set in the harness itself"
    assert libc.prctl(21, 0, 0, 0, 0) == 0, "the harness itself is filtered"
