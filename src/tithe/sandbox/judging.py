"""From what came out of a box to a verdict. Runs in the host's process, where the right answers are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from tithe.sandbox.boxes import Box
from tithe.sandbox.cases import FunctionTest, StdioTest, plain_result, same_output, same_result
from tithe.sandbox.limits import Outcome, Verdict

LIMITS_HIT: Final = frozenset({Outcome.TIMEOUT, Outcome.MEMORY, Outcome.OUTPUT, Outcome.HARNESS})
"""Outcomes after which further tests of the same program are not worth their time."""

_SIGXCPU, _SIGKILL = 24, 9


def breach(box: Box) -> tuple[Outcome, str] | None:
    """The limit that ended a program, if one did."""
    assert box.report is not None
    for name, reader in (("standard output", box.stdout), ("standard error", box.stderr), ("results", box.results)):
        if reader.is_over:
            return Outcome.OUTPUT, f"more than {reader.bound >> 10} KiB of {name}"
    end, code = box.report["end"], box.report["code"]
    if end == "wall":
        return Outcome.TIMEOUT, f"stopped after {box.report['wall_s']:.1f} s"
    if end == "memory":
        return Outcome.MEMORY, f"its processes took {box.report['peak_mib']} MiB"
    if end == "exit" and code in (-_SIGXCPU, -_SIGKILL):
        return Outcome.TIMEOUT, f"stopped after {box.report['cpu_s']:.1f} s of processor time"
    if "MemoryError" in last_line(box):
        return Outcome.MEMORY, last_line(box)
    return None


def judge_script(box: Box) -> Verdict:
    """A script that is not compared with anything."""
    assert box.report is not None
    problem = breach(box)
    if problem is not None:
        return Verdict(problem[0], 0, 1, problem[1])
    ended_well = box.report["code"] == 0
    return Verdict(Outcome.PASSED, 1, 1) if ended_well else Verdict(Outcome.ERROR, 0, 1, _why(box))


def judge_stdio(box: Box, test: StdioTest, number: int) -> Verdict:
    """One test on standard input."""
    assert box.report is not None
    problem = breach(box)
    if problem is not None:
        return Verdict(problem[0], 0, 1, f"test {number}: {problem[1]}")
    if box.report["code"] != 0:
        return Verdict(Outcome.ERROR, 0, 1, f"test {number}: {_why(box)}")
    if same_output(test.stdout, box.stdout.text):
        return Verdict(Outcome.PASSED, 1, 1)
    return Verdict(Outcome.WRONG, 0, 1, f"test {number}: printed {box.stdout.text[-60:]!r}")


def together(verdicts: Sequence[Verdict], total: int) -> Verdict:
    """The verdict of all tests: the first that did not pass decides."""
    passed = sum(verdict.passed for verdict in verdicts)
    worst = next((verdict for verdict in verdicts if verdict.outcome is not Outcome.PASSED), None)
    if worst is not None:
        return Verdict(worst.outcome, passed, total, worst.detail)
    if total == 0:
        return Verdict(Outcome.HARNESS, 0, 0, "there are no tests")
    return Verdict(Outcome.PASSED, passed, total)


def judge_functions(box: Box, tests: Sequence[FunctionTest]) -> Verdict:
    """All calls of one program: results that did not come are as wrong as others."""
    lines = box.results.text.splitlines()
    verdicts = [_function(test, line, n) for n, (test, line) in enumerate(zip(tests, lines, strict=False), start=1)]
    problem = breach(box)
    if problem is not None and len(lines) < len(tests):
        verdicts.append(Verdict(problem[0], 0, 1, f"test {len(lines) + 1}: {problem[1]}"))
    elif len(lines) < len(tests):
        verdicts.append(Verdict(Outcome.ERROR, 0, 1, f"test {len(lines) + 1}: {_why(box)}"))
    return together(verdicts, len(tests))


def _function(test: FunctionTest, line: str, number: int) -> Verdict:
    """One result, which the program wrote and may be anything."""
    place = f"test {number} ({test.name})"
    try:
        answer = json.loads(line)
        if "value" not in answer:
            return Verdict(Outcome.ERROR, 0, 1, f"{place}: {answer['error']!s:.300}")
        is_right = same_result(test.expected, plain_result(answer["value"]))
    except (ValueError, TypeError, KeyError, RecursionError, AttributeError) as error:
        return Verdict(Outcome.WRONG, 0, 1, f"{place}: no result ({type(error).__name__})")
    if is_right:
        return Verdict(Outcome.PASSED, 1, 1)
    return Verdict(Outcome.WRONG, 0, 1, f"{place}: returned {line[:80]}")


def judge_asserts(program: Box, checker: Box) -> Verdict:
    """What the checker found. Only its own pipe counts, and only when it says how many tests there were."""
    rows = _rows(checker.results.text)
    problem = breach(program) or (breach(checker) if not rows or "done" not in rows[-1] else None)
    tests = [row for row in rows if "test" in row]
    passed = sum(row["passed"] for row in tests)
    if problem is not None:
        return Verdict(problem[0], passed, max(len(tests), 1), problem[1])
    if rows and "unusable" in rows[-1]:
        return Verdict(Outcome.HARNESS, 0, 0, f"the tests cannot be run: {rows[-1]['unusable']}")
    if not rows or rows[-1].get("done") != len(tests):
        return Verdict(Outcome.HARNESS, passed, len(tests), f"the tests did not end: {_why(checker)}")
    if not tests:
        return Verdict(Outcome.HARNESS, 0, 0, "the tests hold no assert and no test function")
    failed = next((row for row in tests if not row["passed"]), None)
    if failed is None:
        return Verdict(Outcome.PASSED, passed, len(tests))
    detail = f"{failed['test']}: {failed['detail']}"
    if "ProgramGone" in failed["detail"]:
        return Verdict(Outcome.ERROR, passed, len(tests), f"{detail}: {_why(program)}")
    kind = Outcome.WRONG if failed["detail"].startswith("AssertionError") else Outcome.ERROR
    return Verdict(kind, passed, len(tests), detail)


def _rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def last_line(box: Box) -> str:
    """The last line of standard error."""
    lines = box.stderr.text.strip().splitlines()
    return lines[-1][:300] if lines else ""


def _why(box: Box) -> str:
    assert box.report is not None
    code = box.report["code"]
    return last_line(box) or (f"ended by signal {-code}" if code < 0 else f"ended with status {code}")
