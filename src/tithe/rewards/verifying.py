"""Grades files of answers, tool calls and programs, and measures a grader on labelled cases (`tithe verify`)."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tithe.errors import DataError, UserError
from tithe.rewards.math_reward import gold_answer
from tithe.rewards.pool import RewardPool
from tithe.rewards.spec import SYMBOLIC_MATH, RewardResult, RewardSpec
from tithe.rewards.tool_use import WEIGHTS, read_calls, read_tools
from tithe.sandbox import Limits, Sandbox, parse_tests
from tithe.types import PromptItem

TIMEOUT_S: Final = 5.0
_SHOWN: Final = 20
_TOOL_USE: Final = "tithe.rewards.tool_use:score"

Row = tuple[int, Mapping[str, Any]]
"""Line number and what the line holds."""


@dataclass(frozen=True)
class Judged:
    """One row's verdict: 1, 0, or None for an abstention.

    >>> Judged(1, "equal as numbers", 0.0001).as_json()
    {'verdict': 1, 'reason': 'equal as numbers', 'seconds': 0.0001}
    """

    verdict: int | None
    reason: str
    seconds: float = 0.0
    parts: Mapping[str, float] | None = None

    def as_json(self) -> dict[str, object]:
        """As `tithe verify --json` prints it."""
        parts = {} if self.parts is None else {"parts": dict(self.parts)}
        return {"verdict": self.verdict, "reason": self.reason, "seconds": self.seconds, **parts}


JudgeFn = Callable[[Sequence[Row]], list[Judged]]


def read_rows(path: Path) -> list[Row]:
    """One JSON object per line. Raises `DataError` that names the first line that is none."""
    rows: list[Row] = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"cannot read the file: {error.strerror}", where=str(path)) from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise DataError(f"is not JSON: {error}", where=f"{path}:{number}") from error
        if not isinstance(row, dict):
            raise DataError("is no JSON object", where=f"{path}:{number}")
        rows.append((number, row))
    if not rows:
        raise DataError("the file holds no rows; one JSON object per line is needed", where=str(path))
    return rows


def judge_answers(
    rows: Sequence[Row], function: str = SYMBOLIC_MATH, *, workers: int, timeout_s: float
) -> list[Judged]:
    """Rows with `gold` and `text`. A gold that is no text, number or list of these is an abstention that names the
    row."""
    with _pool(RewardSpec(function=function, unreadable=0.0), workers, timeout_s) as pool:

        def submit(number: int, row: Mapping[str, Any]) -> Future[RewardResult] | Judged:
            if "gold" not in row or "text" not in row:
                return _missing(number, "gold and text")
            gold = _as_text(row["gold"])
            if gold is None:
                return Judged(None, f"row {number}: gold is {json.dumps(row['gold'])[:60]}, neither text nor number")
            return pool.submit(PromptItem(str(number), answer=gold), _as_text(row["text"]) or "")

        return _collect(rows, submit, lambda value: value)


def judge_tools(rows: Sequence[Row], *, workers: int, timeout_s: float) -> list[Judged]:
    """Rows with `text` and what is right: `calls` (or `gold`), `answer`, or both; `tools` and `format` where known.
    1 when choice, arguments and result all are right; `parts` says how far each is."""
    with _pool(RewardSpec(function=_TOOL_USE, weights={}), workers, timeout_s) as pool:

        def submit(number: int, row: Mapping[str, Any]) -> Future[RewardResult] | Judged:
            calls = row.get("calls", row.get("gold"))
            answer = row.get("answer")
            if "text" not in row or (calls is None and answer is None):
                return _missing(number, "text, and calls or answer")
            try:
                extra = {"tools": row.get("tools") or [], "format": row.get("format") or "auto"}
                read_tools(extra["tools"])
                if calls is not None:
                    read_calls(calls)
                    extra["calls"] = calls
            except UserError as error:
                return Judged(None, f"row {number}: {error}")
            item = PromptItem(str(number), answer=None if answer is None else _as_text(answer), extra=extra)
            return pool.submit(item, _as_text(row["text"]) or "")

        full = math.fsum(WEIGHTS.values())
        return _collect(rows, submit, lambda value: value >= full - 1e-9)


def judge_code(rows: Sequence[Row], *, workers: int, timeout_s: float) -> list[Judged]:
    """Rows with `code` and `tests` (see `sandbox.parse_tests`), run in the sandbox. Raises `UserError` where no sandbox
    can be had."""
    limits = Limits(wall_s=timeout_s, cpu_s=timeout_s)
    with Sandbox(slots=workers) as sandbox:
        waiting: list[tuple[Any, Judged | None]] = []
        for number, row in rows:
            try:
                if not isinstance(row.get("code"), str) or "tests" not in row:
                    raise DataError("has no code (text) and tests")
                tests = parse_tests(row["tests"])
            except DataError as error:
                waiting.append((None, Judged(None, f"row {number}: {error}")))
                continue
            waiting.append((sandbox.submit(row["code"], tests, limits), None))
        judged = []
        for future, at_once in waiting:
            if at_once is not None:
                judged.append(at_once)
                continue
            verdict = future.result()
            reward = None if verdict.reward is None else int(verdict.reward)
            told = f"{verdict.outcome}, {verdict.passed} of {verdict.total} tests"
            reason = f"{told}: {verdict.detail}" if verdict.detail else told
            judged.append(Judged(reward, reason, verdict.seconds))
        return judged


def summary(judged: Sequence[Judged]) -> dict[str, object]:
    """The answer of `tithe verify`: every row's verdict, and counts."""
    counts = Counter(one.verdict for one in judged)
    times = _times(judged)
    nothing = "" if counts[1] + counts[0] else "nothing was judged: no row has a verdict; the reasons follow\n"
    text = (
        f"{nothing}{len(judged)} rows: {counts[1]} right, {counts[0]} wrong, {counts[None]} without a verdict; "
        f"p99 {1e3 * times['p99_s']:.1f} ms\n"
        + "\n".join(f"{at:>6}  {_mark(one.verdict)}  {one.reason}" for at, one in enumerate(judged, start=1))
    )
    return {
        "rows": [one.as_json() for one in judged],
        "right": counts[1],
        "wrong": counts[0],
        "abstained": counts[None],
        **times,
        "text": text,
    }


def measure(rows: Sequence[Row], judge: JudgeFn, *, check_golds: bool) -> dict[str, object]:
    """The answer of `tithe verify --lab`: how a grader does on rows that carry the right verdict (`verdict` or `label`:
    1, 0, or null where it has to abstain).

    Rates are shares of the wrong rows that passed and of the right rows that failed; abstentions are told apart from
    both. With `check_golds` every gold is graded as its own answer and has to be right.
    """
    labels = [_label(number, row) for number, row in rows]
    judged = judge(rows)
    wrong = [at for at, label in enumerate(labels) if label != 1]
    right = [at for at, label in enumerate(labels) if label == 1]
    passed = [at for at in wrong if judged[at].verdict == 1]
    failed = [at for at in right if judged[at].verdict == 0]
    abstained = [at for at, label in enumerate(labels) if judged[at].verdict is None and label is not None]
    unselfed = _own_answers(rows, labels, judge) if check_golds else []
    result: dict[str, object] = {
        "cases": len(rows),
        "false_positives": len(passed),
        "false_negatives": len(failed),
        "abstentions": len(abstained),
        "false_positive_rate": len(passed) / max(1, len(wrong)),
        "false_negative_rate": len(failed) / max(1, len(right)),
        "abstention_rate": len(abstained) / max(1, sum(label is not None for label in labels)),
        "golds_that_fail_themselves": unselfed,
        **_times(judged),
        "mistakes": [
            {"row": rows[at][0], "expected": labels[at], **judged[at].as_json()}
            for at in [*passed, *failed, *abstained][:_SHOWN]
        ],
    }
    lines = [f"{key:<28}{value:.6g}" for key, value in result.items() if isinstance(value, int | float)]
    lines += [
        f"row {rows[at][0]}: expected {labels[at]}, got {judged[at].verdict} ({judged[at].reason})" for at in passed
    ]
    lines += [
        f"row {rows[at][0]}: expected {labels[at]}, got {judged[at].verdict} ({judged[at].reason})" for at in failed
    ]
    lines += [f"gold {gold!r:.80} does not grade itself as right" for gold in unselfed]
    return {**result, "text": "\n".join(lines)}


def _own_answers(rows: Sequence[Row], labels: Sequence[int | None], judge: JudgeFn) -> list[str]:
    """Golds that are wrong when given as answers."""
    golds = {
        gold: number
        for (number, row), label in zip(rows, labels, strict=True)
        if label is not None and (gold := _as_text(row.get("gold")))
    }
    asked = [(number, {"gold": gold, "text": rf"\boxed{{{gold_answer(gold)}}}"}) for gold, number in golds.items()]
    return [str(row["gold"]) for (_, row), one in zip(asked, judge(asked), strict=True) if one.verdict != 1]


def _label(number: int, row: Mapping[str, Any]) -> int | None:
    label = row.get("verdict", row.get("label"))
    if label not in (0, 1, None) or ("verdict" not in row and "label" not in row):
        raise DataError(f"row {number} carries the verdict {label!r}; --lab needs verdict: 1, 0 or null")
    return None if label is None else int(label)


@contextmanager
def _pool(spec: RewardSpec, workers: int, timeout_s: float) -> Iterator[RewardPool]:
    with RewardPool(spec, workers=workers, timeout_s=timeout_s) as pool:
        yield pool


def _collect(
    rows: Sequence[Row],
    submit: Callable[[int, Mapping[str, Any]], Future[RewardResult] | Judged],
    is_right: Callable[[float], float | bool],
) -> list[Judged]:
    """Hand every row in, then wait for all."""
    submitted = [submit(number, row) for number, row in rows]
    judged = []
    for one in submitted:
        if isinstance(one, Judged):
            judged.append(one)
            continue
        result = one.result()
        parts = {name: value for name, value in result.parts.items() if name != "answer"} or None
        verdict = None if result.value is None else int(bool(is_right(result.value)))
        judged.append(Judged(verdict, result.reason, result.seconds, parts))
    return judged


def _missing(number: int, what: str) -> Judged:
    return Judged(None, f"row {number}: it needs {what}")


def _as_text(value: object) -> str | None:
    """Text as it stands, a number as JSON writes it, a list of these with commas; None for anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return json.dumps(value) if math.isfinite(value) else None
    if isinstance(value, list) and value:
        items = [_as_text(item) for item in value]
        return None if None in items else ", ".join(item for item in items if item is not None)
    return None


def _times(judged: Sequence[Judged]) -> dict[str, float]:
    seconds = sorted(one.seconds for one in judged)
    return {"p50_s": _quantile(seconds, 0.5), "p99_s": _quantile(seconds, 0.99), "max_s": seconds[-1]}


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def _mark(verdict: int | None) -> str:
    return {1: "right", 0: "wrong"}.get(verdict, "  -  ") if verdict is not None else "  -  "
