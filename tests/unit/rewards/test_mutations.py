"""Random and mutated answers: none crashes the verifier, none holds it beyond its limit."""

import json
import random
from pathlib import Path

import pytest

from tithe.errors import FailureCause
from tithe.rewards import RewardPool, RewardSpec
from tithe.types import PromptItem

ROWS = [json.loads(line) for line in (Path(__file__).parent / "cases" / "math.jsonl").read_text().splitlines()]
TIMEOUT_S = 5.0
GRACE_S = 0.5
PIECES = [
    "^{99999999}", "^{9^{9^9}}", "!", "!!!", "9" * 300, "\\frac{1}{", "}", "{", "(", ")", "\\sqrt{",
    "\\sqrt[99999]{2}",
    "\\binom{99999}{5000}", "(x+y+z)^{24}", "\\cdot", "+", "-", "\\pm", ",", "\\cup", "[0,1)", "\\int_0^{\\infty}",
    " dx",
    "\\sum_{k=1}^{10^{9}}", "\\prod_{k=1}^{99999}", "\\lim_{x \\to 0}", "e^{e^{e^{e}}}", "\\ln 0", "\\tan(\\pi/2)",
    "\\frac{0}{0}", "10^{-999999}", "\\lfloor", "\\gcd(0,0)", "1000000!", "\\text{", "\\begin{pmatrix}", "&", "\\\\",
    "_2",
    "i^i", "|", "\\log_1 2", "x_{", "\x00", "\u0660", "½", "{@ 12 34 " * 300, "(" * 300, "\\left(" * 50, "\\sin" * 60,
    "a^" * 60, "-" * 500, "0.\\overline{" + "7" * 200 + "}", "=", "<", "\\le", "x", "\\pi",
]  # fmt: skip


def mutated(draw: random.Random) -> tuple[str, str]:
    """A labelled case with a few things done to its answer, or its gold too."""
    row = draw.choice(ROWS)
    gold, text = row["gold"], row["text"]
    for _ in range(draw.randint(1, 4)):
        text = _mutate(draw, text)
    if draw.random() < 0.3:
        gold = _mutate(draw, gold)
    return gold, text if draw.random() < 0.5 else rf"\boxed{{{text}}}"


def _mutate(draw: random.Random, text: str) -> str:
    at, other = sorted((draw.randint(0, len(text)), draw.randint(0, len(text))))
    return draw.choice(
        [
            text[:at] + draw.choice(PIECES) + text[at:],
            text[:at] + draw.choice(PIECES) + text[other:],
            text[:at] + text[other:],
            text[:other] + text[at:],
            text[:at] + text[at:other] * draw.randint(2, 40) + text[other:],
            "".join(draw.choice("0123456789+-*/^(){}=,.\\ xyei") for _ in range(draw.randint(1, 60))),
            text[:at] + chr(draw.randint(0, 0xD7FF)) + text[at:],
        ]
    )


def check(count: int, seed: int) -> None:
    draw = random.Random(seed)
    with RewardPool(RewardSpec("symbolic_math"), workers=2, timeout_s=TIMEOUT_S) as pool:
        jobs = [mutated(draw) for _ in range(count)]
        futures = [pool.submit(PromptItem(str(at), answer=gold), text) for at, (gold, text) in enumerate(jobs)]
        results = [future.result() for future in futures]
    late = [job for job, result in zip(jobs, results, strict=True) if result.seconds > TIMEOUT_S + GRACE_S]
    failures = [
        (job, result.reason)
        for job, result in zip(jobs, results, strict=True)
        if result.failure is not None and result.failure.cause is not FailureCause.TIMEOUT
    ]
    assert late == []
    assert failures == []
    assert sum(result.value is not None for result in results) > count // 2


@pytest.mark.liveness
def test_hundreds_of_mutated_answers_neither_crash_nor_hang():
    check(400, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_thousand_mutated_answers_neither_crash_nor_hang():
    check(10_000, seed=2)
