"""What both benchmarks share: options, medians, the last line."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

NUMERIC_MODE_KEYS = ("compute", "compute_dtype", "attention")


def parse_options(description: str, *, rounds: int) -> argparse.Namespace:
    """Options of a benchmark; the defaults are the conditions that figures are quoted under."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print exactly one line with one JSON object")
    parser.add_argument("--rounds", type=int, default=rounds, help="interleaved rounds; the median counts")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens per completion, exactly")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads of every side")
    return parser.parse_args()


def commit() -> str:
    """The commit of this checkout, with ``-dirty`` when tracked files differ from it; ``unknown`` outside git."""
    root = Path(__file__).resolve().parent

    def git(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, check=False)

    head = git("rev-parse", "HEAD")
    if head.returncode != 0:
        return "unknown"
    return head.stdout.strip() + ("-dirty" if git("status", "--porcelain", "-uno").stdout.strip() else "")


def rates(answers: Sequence[Mapping[str, Any]], tokens: str = "tokens", seconds: str = "seconds") -> float:
    """Median tokens per second of a side's answers."""
    return median(answer[tokens] / answer[seconds] for answer in answers)


def numeric_mode(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that say under which numeric mode Tithe was measured, and of which commit."""
    return {**{key: facts[key] for key in NUMERIC_MODE_KEYS}, "commit": commit()}


def emit(result: Mapping[str, Any], *, as_json: bool) -> None:
    """Print the result: one line of JSON, or a table."""
    if as_json:
        print(json.dumps(result))
        return
    for key, value in result.items():
        print(f"{key:24} {round(value, 4) if isinstance(value, float) else value}")
