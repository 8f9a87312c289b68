"""Programs a second through the code sandbox, by kind of test, all slots in use: ``python -m benchmarks.sandbox``."""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor

from tithe.sandbox import AssertTests, FunctionTest, Sandbox, StdioTest, Tests

PROGRAMS: dict[str, tuple[str, Tests]] = {
    "stdin": ("a, b = map(int, input().split())\nprint(a + b)", [StdioTest("2 3\n", "5\n")]),
    "functions": ("def add(a, b):\n    return a + b\n", [FunctionTest("add", [n, 1], n + 1) for n in range(10)]),
    "asserts": (
        "def add(a, b):\n    return a + b\n",
        AssertTests("\n".join(f"assert add({n}, 1) == {n + 1}" for n in range(10))),
    ),
}


def measure(sandbox: Sandbox, kind: str, count: int, threads: int) -> dict[str, float]:
    """Rate and latency of `count` programs of one kind; every one must pass."""
    code, tests = PROGRAMS[kind]
    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        verdicts = list(pool.map(lambda _: sandbox.run_tests(code, tests), range(count)))
    took = time.perf_counter() - began
    failed = [verdict for verdict in verdicts if verdict.reward != 1.0]
    if failed:
        raise SystemExit(f"{len(failed)} of {count} programs did not pass: {failed[0]}")
    seconds = sorted(verdict.seconds for verdict in verdicts)
    return {
        "programs_per_s": round(count / took, 1),
        "p50_ms": round(1000 * seconds[count // 2], 1),
        "p99_ms": round(1000 * seconds[int(count * 0.99)], 1),
    }


def main() -> None:
    """Print one line a kind, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--slots", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--mode", choices=["auto", "bubblewrap", "namespaces"], default="auto")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    began = time.perf_counter()
    with Sandbox(args.slots, args.mode) as sandbox:
        start_s = time.perf_counter() - began
        results = {kind: measure(sandbox, kind, args.programs, args.slots) for kind in PROGRAMS}
        mode = sandbox.mode
    if args.json:
        print(json.dumps({"mode": mode, "slots": args.slots, "start_s": round(start_s, 2), **results}))
        return
    print(f"{mode}, {args.slots} slots, started in {start_s:.2f} s")
    for kind, result in results.items():
        rate, p50, p99 = result["programs_per_s"], result["p50_ms"], result["p99_ms"]
        print(f"{kind:10} {rate:7.1f} programs/s   p50 {p50:.1f} ms   p99 {p99:.1f} ms")


if __name__ == "__main__":
    main()
