"""What a reward that sleeps half a second costs: asynchronous (L = 1) and synchronous (L = 0) runs of the demo's model,
each beside the same run under an instant reward: ``python -m benchmarks.slow_reward``.

A slow reward hides behind sampling and training as long as there is something else to do. At L = 0 there is not at the
end of each batch: the tail between its last token and its last verdict is exposed. `exposed_s` is that time a batch, as
the difference of what the trainer waits for.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.output import emit

REWARDS = """
import time

def instant(item, text):
    return float(len(text) % 2)

def slow(item, text):
    time.sleep({sleep_s})
    return float(len(text) % 2)
"""
WARM_UP = 2


def run(folder: Path, name: str, reward: str, lag: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the trained batches after the first ones, of one run by the real command line."""
    overrides = {
        "run.dir": folder / name,
        "run.max_steps": options.batches + WARM_UP,
        "run.eval_every": "null",
        "task.source": "products",
        "task.eval_size": 2,
        "model.compute": "packed",
        "model.max_context": 256,
        "rollout.max_prompt_tokens": 128,
        "rollout.max_new_tokens": options.new_tokens,
        "rl.samples_per_prompt": 8,
        "rl.batch_size_per_update": options.rollouts,
        "rl.max_policy_update_lag": lag,
        "reward.function": f"{folder / 'rewards.py'}:{reward}",
        "reward.workers": options.workers,
        "monitor.progress": "false",
        "monitor.report": "false",
        "monitor.tensorboard": "false",
        "run.eval_samples_per_question": 1,
    }
    if options.model:
        overrides["model.path"] = options.model
    run_file = folder / "slow_reward.yaml"
    run_file.write_text("{}\n")
    changes = [f"{key}={value}" for key, value in overrides.items()]
    command = [sys.executable, "-m", "tithe.cli", "train", str(run_file), *changes]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode != 0:
        raise SystemExit(f"the run failed: {done.stderr[-2000:]}")
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    rows = [row for line in lines if "loss" in (row := json.loads(line))]
    return rows[WARM_UP:]


def compare(folder: Path, lag: int, options: argparse.Namespace) -> dict[str, Any]:
    """Rounds of an instant and a slow run one after the other. Of each round all seconds of the measured batches count,
    not a typical batch: where sampling overlaps with training, long and short batches take turns."""
    totals: dict[str, list[float]] = {"instant": [], "slow": []}
    waits: dict[str, list[float]] = {"instant": [], "slow": []}
    for turn in range(options.rounds):
        for reward in ("instant", "slow"):
            rows = run(folder, f"{reward}-{lag}-{turn}", reward, lag, options)
            for key, values in (("step_s", totals), ("wait_s", waits)):
                values[reward].append(sum(row[key] for row in rows) / len(rows))
    pairs = zip(totals["instant"], totals["slow"], strict=True)
    return {
        "instant_step_s": median(totals["instant"]),
        "slow_step_s": median(totals["slow"]),
        "throughput_lost": median(1 - instant / slow for instant, slow in pairs),
        "exposed_s": median(waits["slow"]) - median(waits["instant"]),
    }


def main() -> None:
    """Both lags, then one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print exactly one line with one JSON object")
    parser.add_argument("--sleep-s", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs at each lag; medians are reported")
    parser.add_argument("--batches", type=int, default=8, help="batches measured in each run")
    parser.add_argument("--rollouts", type=int, default=64, help="rollouts a batch")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--workers", type=int, default=16, help="reward.workers of all runs")
    parser.add_argument("--model", default="", help="model.path; the demo's when left out")
    options = parser.parse_args()
    result: dict[str, Any] = {"sleep_s": options.sleep_s, "workers": options.workers, "rollouts": options.rollouts}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rewards.py").write_text(REWARDS.format(sleep_s=options.sleep_s))
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        for lag in (1, 0):
            result |= {f"L{lag}_{key}": value for key, value in compare(folder, lag, options).items()}
    emit(result, as_json=options.json)


if __name__ == "__main__":
    main()
