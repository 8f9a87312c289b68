"""How many answers a second are judged: plain numbers in process, bare and through the pool, and formulas in two worker
processes.

Run: ``python -m benchmarks.verify [--json] [--formulas 10000]``. No answer is judged twice: numbers, coefficients and
variables are drawn anew for each, golds repeat as the rollouts of a group do (eight answers to a question).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Callable

from tithe.rewards import RewardPool, RewardSpec, Verdict
from tithe.rewards.symbolic import Judgement, preload, verify, verify_plain
from tithe.types import PromptItem

GROUP = 8
Job = tuple[str, str, bool]
"""Gold, text, and whether the answer is right."""


def numbers(count: int, draw: random.Random) -> list[Job]:
    """Plain numbers in the forms that models give them."""
    forms = (r"So we get \boxed{%s}.", "The answer is %s.", "a line\n#### %s", r"\boxed{%s.0}", "it is = %s")
    jobs = []
    for at in range(count):
        gold = draw.randrange(10**6)
        answer = gold if draw.random() < 0.5 else draw.randrange(10**6)
        jobs.append((str(gold), forms[at % len(forms)] % answer, answer == gold))
    return jobs


def formulas(count: int, draw: random.Random) -> list[Job]:
    """Formulas of eight kinds, half of the answers right and in another notation than the gold."""
    kinds: tuple[Callable[[random.Random], tuple[str, str, str]], ...] = (
        _quadratic, _surd, _fraction, _trigonometric, _interval, _equation, _points, _matrix,
    )  # fmt: skip
    jobs: list[Job] = []
    while len(jobs) < count:
        kind = kinds[(len(jobs) // GROUP) % len(kinds)]
        seed = draw.random()
        for _ in range(GROUP):
            gold, right, wrong = kind(random.Random(seed))
            is_right = draw.random() < 0.5
            spaces = " " * draw.randint(0, 3)
            answer = spaces + (right if is_right else wrong)
            jobs.append((gold, rf"We find {draw.randrange(10**9)}: \boxed{{{answer}}}", is_right))
    return jobs[:count]


def _quadratic(draw: random.Random) -> tuple[str, str, str]:
    a, b = draw.randint(1, 10**4), draw.randint(1, 10**4)
    return f"(x+{a})(x-{b})", f"x^2+({a - b})x-{a * b}", f"x^2+({a - b})x+{a * b}"


def _surd(draw: random.Random) -> tuple[str, str, str]:
    n, k = draw.randint(2, 10**4), draw.randint(2, 99)
    return rf"{k}\sqrt{{{n}}}", rf"\sqrt{{{n * k * k}}}", rf"\sqrt{{{n * k * k + 1}}}"


def _fraction(draw: random.Random) -> tuple[str, str, str]:
    a, b = draw.randint(1, 10**4), draw.randint(1, 10**4)
    below = f"(x+{a})(x+{b})"
    gold = rf"\frac{{1}}{{x+{a}}}+\frac{{1}}{{x+{b}}}"
    return gold, rf"\frac{{2x+{a + b}}}{{{below}}}", rf"\frac{{2x+{a}}}{{{below}}}"


def _trigonometric(draw: random.Random) -> tuple[str, str, str]:
    n = draw.randint(2, 10**5)
    return rf"\sin^2 {n}x", rf"\frac{{1-\cos {2 * n}x}}{{2}}", rf"\frac{{1+\cos {2 * n}x}}{{2}}"


def _interval(draw: random.Random) -> tuple[str, str, str]:
    n = draw.randint(2, 10**5)
    return rf"[\sqrt{{{n}}}, \infty)", rf"x \ge \sqrt{{{n}}}", rf"x > \sqrt{{{n}}}"


def _equation(draw: random.Random) -> tuple[str, str, str]:
    a, b, c = (draw.randint(1, 10**4) for _ in range(3))
    return f"{a}x-{b}y+{c}=0", f"{2 * a}x+{2 * c}={2 * b}y", f"{2 * a}x+{c}={2 * b}y"


def _points(draw: random.Random) -> tuple[str, str, str]:
    a, b = draw.randint(1, 10**4), draw.randint(1, 10**4)
    root = rf"\sqrt{{{a}}}"
    right = rf"(\frac{{{a}}}{{{root}}}, \frac{{{2 * b}}}{{6}})"
    return rf"({root}, \frac{{{b}}}{{3}})", right, f"({root}, {b})"


def _matrix(draw: random.Random) -> tuple[str, str, str]:
    a, b = draw.randint(1, 10**4), draw.randint(1, 10**4)
    return (
        rf"\begin{{pmatrix}}{a}&\sqrt{{2}}\\{b}&1\end{{pmatrix}}",
        rf"\begin{{bmatrix}}{a}&\frac{{2}}{{\sqrt{{2}}}}\\{b}&1\end{{bmatrix}}",
        rf"\begin{{bmatrix}}{a}&\sqrt{{2}}\\{b + 1}&1\end{{bmatrix}}",
    )


def measure(jobs: list[Job], workers: int) -> dict[str, float]:
    """Judge all and compare with what is right."""
    items = [(PromptItem(str(at), answer=gold), text) for at, (gold, text, _) in enumerate(jobs)]
    with RewardPool(RewardSpec("symbolic_math"), workers=workers, timeout_s=10.0) as pool:
        warm = [pool.submit(PromptItem("w", answer=r"\sqrt{3}"), r"\boxed{\sqrt{2}}") for _ in range(4 * workers)]
        for future in warm:  # workers start, packages are loaded
            future.result()
        began_s = time.perf_counter()
        results = [future.result() for future in [pool.submit(item, text) for item, text in items]]
        elapsed_s = time.perf_counter() - began_s
    kinds = Counter(
        "abstained" if result.value is None else "agreed" if (result.value == 1.0) == is_right else "mistaken"
        for result, (_, _, is_right) in zip(results, jobs, strict=True)
    )
    seconds = sorted(result.seconds for result in results)
    return {
        "checks": len(jobs),
        "checks_per_s": len(jobs) / elapsed_s,
        "p99_ms": 1e3 * seconds[int(0.99 * (len(seconds) - 1))],
        "mistaken": kinds["mistaken"],
        "abstained": kinds["abstained"],
    }


def in_process(jobs: list[Job], judge: Callable[[str, str], Judgement | None]) -> dict[str, float]:
    """The speed of one thread, also by processor time, which other work on the machine disturbs less."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    verdicts = [judge(gold, text) for gold, text, _ in jobs]
    elapsed_s, elapsed_cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    right = [verdict is not None and verdict.verdict is Verdict.RIGHT for verdict in verdicts]
    mistaken = sum(one is not is_right for one, (_, _, is_right) in zip(right, jobs, strict=True))
    return {
        "checks": len(jobs),
        "checks_per_s": len(jobs) / elapsed_s,
        "checks_per_cpu_s": len(jobs) / elapsed_cpu_s,
        "mistaken": mistaken,
    }


def main() -> None:
    """Measure all and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--numbers", type=int, default=100_000, help="plain numbers judged (default 100000)")
    parser.add_argument("--formulas", type=int, default=10_000, help="formulas judged (default 10000)")
    parser.add_argument("--workers", type=int, default=2, help="worker processes (default 2)")
    args = parser.parse_args()
    draw = random.Random(0)
    preload()
    verify(r"\sqrt{3}", r"\boxed{\sqrt{2}}")
    result = {
        "numbers_in_process": in_process(numbers(args.numbers, draw), verify_plain),
        "numbers_through_pool": measure(numbers(args.numbers, draw), args.workers),
        "formulas_one_core": in_process(formulas(args.formulas // 4, draw), verify),
        "formulas": measure(formulas(args.formulas, draw), args.workers),
    }
    if args.json:
        print(json.dumps(result))
        return
    for name, row in result.items():
        print(name, "  ".join(f"{key} {value:.6g}" for key, value in row.items()))


if __name__ == "__main__":
    main()
