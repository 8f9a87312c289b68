"""Does every algorithm learn: the same small model, the same quick task, equal samples, several seeds, one plot.

    python -m benchmarks.learning --json                    # the tiny random model, minutes
    python -m benchmarks.learning --model demo --seeds 1    # the demo's 135M model on sums, hours

The tiny model has two layers and random weights; its reward is the share of even token ids, which begins near one half
and can reach 1. Every algorithm runs at its own defaults, synchronously, on equally many trained rollouts. Beside them
GRPO runs asynchronously at lags 0, 1, 4 and 16 (a new policy is published only every `lag` batches, and samples may be
as old), without correction and with truncated importance sampling.

Keys: per algorithm `start`, `end` (held-out score, sampled at temperature 1, mean over seeds), `end_min`, `end_max`,
`samples` (rollouts trained); `lags`: the same by `<correction> lag <n>`; `plot`: the page with the curves.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.learning_plot import Curve, page
from benchmarks.output import commit
from tithe.config import load_config
from tithe.config.algorithms import ALGORITHMS
from tithe.metrics import read_rows
from tithe.utils.durable import write_text

TESTS = Path(__file__).resolve().parent.parent / "tests"
LAGS = (0, 1, 4, 16)
CORRECTIONS = ("none", "tis")

TINY = (
    "optimizer.lr=0.01",
    "optimizer.lr_scheduler=constant",
    "rl.batch_size_per_update=32",
    "rl.samples_per_prompt=8",
    "rl.micro_batch_tokens=512",
    "engine.max_running=32",
    "run.eval_samples_per_question=8",
    "task.eval_size=8",
)
DEMO = (
    "model.compute=packed",
    "task.source=sums",
    "optimizer.lr=3e-4",
    "rollout.max_new_tokens=24",
    "rollout.max_prompt_tokens=128",
    "model.max_context=256",
    "rl.batch_size_per_update=32",
    "task.eval_size=24",
)
QUIET = ("monitor.progress=false", "monitor.tensorboard=false", "monitor.report=false", "run.eval_every=null")


@dataclass(frozen=True)
class Outcome:
    """One run: held-out scores before and after, the mean reward of each batch, rollouts trained."""

    start: float
    end: float
    rewards: list[float]
    samples: int


def train_once(options: argparse.Namespace, base: Path | None, name: str, changes: Sequence[str], seed: int) -> Outcome:
    """One run, in this process."""
    from tithe.build import train

    run_dir = options.out / "runs" / f"{name.replace(' ', '-')}-{seed}"
    own = TINY if options.model == "tiny" else DEMO
    fixed = [f"run.dir={run_dir}", f"run.seed={seed}", f"run.max_steps={options.batches}", "run.checkpoint_every=1000"]
    fixed += ["rl.max_policy_update_lag=0"]
    cfg = load_config(base, [*own, *QUIET, *fixed, *changes])
    began = time.perf_counter()
    train(cfg, run_dir)
    rows = [dict(row) for row in read_rows(run_dir / "metrics.jsonl").rows]
    scores = [row["eval_sampled"] for row in rows if "eval_sampled" in row]
    rewards = [row["reward_mean"] for row in rows if "reward_mean" in row]
    outcome = Outcome(scores[0], scores[-1], rewards, len(rewards) * cfg.rl.batch_size_per_update)
    seconds = time.perf_counter() - began
    print(f"[bench] {name}, seed {seed}: {outcome.start:.3f} > {outcome.end:.3f}, {seconds:.0f} s", file=sys.stderr)
    return outcome


def several(options: argparse.Namespace, base: Path | None, name: str, changes: Sequence[str]) -> list[Outcome]:
    """One run a seed."""
    return [train_once(options, base, name, changes, seed) for seed in range(options.seeds)]


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What is reported of an algorithm."""
    ends = [outcome.end for outcome in outcomes]
    return {
        "start": mean(outcome.start for outcome in outcomes),
        "end": mean(ends),
        "end_min": min(ends),
        "end_max": max(ends),
        "samples": outcomes[0].samples,
    }


def lag_changes(lag: int, correction: str) -> list[str]:
    """A run whose samples may be `lag` batches old, and mostly are."""
    changes = ["rl.algorithm=grpo", f"rl.max_policy_update_lag={lag}", f"rl.sync_every={max(1, lag)}"]
    return [*changes, f"rl.correction={correction}", f"rl.rollout_buffer_size={32 * (lag + 1)}"]


def tiny_base(folder: Path) -> Path:
    """The run file of the tests' tiny model."""
    sys.path.insert(0, str(TESTS))
    from support.runs import write_run_files

    folder.mkdir(parents=True, exist_ok=True)
    return write_run_files(folder).yaml


def curves(outcomes: Mapping[str, Sequence[Outcome]]) -> list[Curve]:
    """One curve a name, with the spread of its seeds."""
    return [Curve(name, [one.rewards for one in several_seeds]) for name, several_seeds in outcomes.items()]


def parse() -> argparse.Namespace:
    """Options; the defaults are the conditions that figures are quoted under."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print exactly one line with one JSON object")
    parser.add_argument("--model", choices=("tiny", "demo"), default="tiny", help="what is trained")
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS), help="names, with commas; empty for none")
    parser.add_argument(
        "--lags", default=",".join(map(str, LAGS)), help="lags of the asynchronous runs; empty for none"
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--batches", type=int, default=48, help="batches of 32 rollouts a run")
    parser.add_argument("--out", type=Path, default=Path("runs/learning"), help="a new folder for runs and plot")
    return parser.parse_args()


def main() -> None:
    """Train, compare, draw."""
    options = parse()
    options.out.mkdir(parents=True, exist_ok=False)
    base = tiny_base(options.out / "tiny") if options.model == "tiny" else None
    names = [name for name in options.algorithms.split(",") if name]
    algorithms = {name: several(options, base, name, [f"rl.algorithm={name}"]) for name in names}
    lags: dict[str, list[Outcome]] = {}
    for lag in (int(text) for text in options.lags.split(",") if text):
        for correction in CORRECTIONS:
            name = f"{correction} lag {lag}"
            lags[name] = several(options, base, name, lag_changes(lag, correction))
    plot = options.out / "learning.html"
    write_text(plot, page(f"{options.model} model, {options.seeds} seeds", curves(algorithms), curves(lags)))
    result: dict[str, Any] = {name: summary(outcomes) for name, outcomes in algorithms.items()}
    result |= {"lags": {name: summary(outcomes) for name, outcomes in lags.items()}}
    result |= {"model": options.model, "seeds": options.seeds, "plot": str(plot), "commit": commit()}
    write_text(options.out / "learning.json", json.dumps(result, indent=1))
    if options.json:
        print(json.dumps(result))
        return
    for name, row in [*((n, result[n]) for n in names), *result["lags"].items()]:
        print(f"{name:24} {row['start']:.3f} > {row['end']:.3f}  ({row['end_min']:.3f} to {row['end_max']:.3f})")
    print(plot)


if __name__ == "__main__":
    main()
