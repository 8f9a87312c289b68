"""The simulator beside real runs of this project whose rollouts wait: slow rewards, tools, long tails.

    python -m benchmarks.simulator_vs_real            the table and a verdict, in about ten minutes on a quiet machine

Each setting is run twice on a tiny random model, synchronously and with asynchrony. All run at the same time, each in a
process of its own, so that they meet the same machine; they wait most of the time. `tithe.simulator` is given the
directory of the synchronous run alone (`measure_run`) and predicts both; compared are the gain of asynchrony and the
histogram of the ages of trained groups. Waiting is `time.sleep` in the reward's worker processes and `asyncio.sleep` in
an environment with a tool, so that the lane is idle for it. How long a prompt waits is a function of its name: the same
prompts wait equally long in both runs.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import importlib
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.output import commit
from tithe.config import CONFIG_FILE, RunConfig, dump_resolved, load_config, load_run
from tithe.metrics import read_rows
from tithe.pool import Pool, PoolReader, PromptSource
from tithe.simulator import Fixed, Outcome, histogram, measure_run, scenario_of_run, simulate, total_variation
from tithe.types import GenerateFn, GenerateRequest, PromptItem, Rollout
from tithe.utils.durable import write_text

REWARD = """
import hashlib, math, time

def waiting(name, mean_s):
    u = (int(hashlib.blake2b(name.encode(), digest_size=6).hexdigest(), 16) + 0.5) / 2**48
    return min(6 * mean_s, -mean_s * math.log(1 - u))

def by_prompt(item, text, token_ids, **info):
    time.sleep(waiting(item.id, {mean_s}))
    return sum(t % 2 == 0 for t in token_ids) / len(token_ids)

def by_length(item, text, token_ids, **info):
    time.sleep({token_s} * len(token_ids))
    return sum(t % 2 == 0 for t in token_ids) / len(token_ids)

def always(item, text, token_ids, **info):
    time.sleep({fixed_s})
    return sum(t % 2 == 0 for t in token_ids) / len(token_ids)

def at_once(item, text, token_ids, **info):
    return sum(t % 2 == 0 for t in token_ids) / len(token_ids)
"""
MEAN_S, TOKEN_S, FIXED_S = 6.0, 0.3, 3.0
"""Mean wait of a prompt, wait per token, and wait of every rollout, in the settings that have them."""
PROMPTS = 600
IDLE, GAIN, AGES = 0.5, 0.1, 0.1
"""What a synchronous run must be idle at least; bounds of the gain's error and of the ages' total variation."""


@dataclass(frozen=True)
class Setting:
    """One comparison: what waits, and which keys make it asynchronous. `tool_s` is the mean wait between two turns;
    `known_reward_s` is told to the simulator where workers are too few, because a queue is not a property of a rollout.
    """

    name: str
    reward: str
    keys: tuple[str, ...]
    late: tuple[str, ...]
    tool_s: float = 0.0
    known_reward_s: float | None = None


ENDINGS = ("rollout.max_new_tokens=64", "rollout.stop_strings=['1','2','3','4','5']")
"""Five of 128 tokens end a completion: lengths are nearly geometric."""
LAG_1 = ("rl.max_policy_update_lag=1", "reward.workers=16")
LAG_2 = ("rl.max_policy_update_lag=2", "reward.workers=24")
LAG_4 = ("rl.max_policy_update_lag=4", "engine.max_live_versions=8", "reward.workers=40")
FOUR = ("rl.max_policy_update_lag=2", "reward.workers=4")
SETTINGS = (
    Setting("slow reward, one step off", "by_prompt", (), LAG_1),
    Setting("slow reward, lag 4, sync_every 2", "by_prompt", (), (*LAG_4, "rl.sync_every=2")),
    Setting("judge by length, lag 2", "by_length", ENDINGS, LAG_2),
    Setting("tool between two turns, lag 2", "at_once", (), LAG_2, tool_s=MEAN_S),
    Setting("tool, partial rollouts (keep), lag 4", "at_once", (), (*LAG_4, "rollout.on_publish=keep"), tool_s=MEAN_S),
    Setting("four reward workers, lag 2", "always", (), FOUR, known_reward_s=FIXED_S),
)


def waiting_s(name: str, mean_s: float) -> float:
    """Exponential over names, at most six means: the reward file's own function."""
    u = (int(hashlib.blake2b(name.encode(), digest_size=6).hexdigest(), 16) + 0.5) / 2**48
    return min(6 * mean_s, -mean_s * math.log(1 - u))


class ToolEnv:
    """Two turns with a tool between them that takes its time and answers a few tokens. Rewards even tokens."""

    ANSWER = (20, 21, 22, 23)

    def __init__(self, mean_s: float) -> None:
        self._mean_s = mean_s

    async def rollout(self, item: PromptItem, request: GenerateRequest, generate: GenerateFn) -> Rollout:
        """Draw, wait, draw again."""
        half = replace(request.params, max_new_tokens=request.params.max_new_tokens // 2)
        first = await generate(replace(request, params=half))
        await asyncio.sleep(waiting_s(item.id, self._mean_s))
        prompt = (*request.prompt_ids, *first.token_ids.tolist(), *self.ANSWER)
        again = replace(half, sample=half.sample + 1000)  # other random numbers than the first turn's
        second = await generate(GenerateRequest(prompt, again, request.adapter))
        n = len(self.ANSWER)
        told = np.zeros(n, np.float32)
        ids = np.concatenate([first.token_ids, np.array(self.ANSWER, np.int32), second.token_ids])
        mask = np.concatenate([np.ones(len(first.token_ids)), np.zeros(n), np.ones(len(second.token_ids))])
        right = float(np.mean(ids[mask > 0] % 2 == 0))
        return Rollout(
            sample=request.params.sample,
            token_ids=ids,
            loss_mask=mask.astype(np.bool_),
            logp=np.concatenate([first.logp, told, second.logp]),
            logp_behaviour=np.concatenate([first.logp_behaviour, told, second.logp_behaviour]),
            serials=np.concatenate([first.serials, np.full(n, first.serials[-1], np.int32), second.serials]),
            temperature=request.params.temperature,
            finish=second.finish,
            reward=right,
            reward_parts={"even": right},
        )


@dataclass(frozen=True)
class Real:
    """What a run's files say after its pipeline has filled."""

    step_s: float
    idle_frac: float
    ages: dict[int, float]
    gaps: dict[int, float]
    groups: int
    """Trained groups whose ages are counted."""


def write_files(folder: Path, steps: int) -> Path:
    """Model, rows, reward and run file; the run file's path."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from support.runs import write_run_files  # pyright: ignore[reportMissingImports] - tests/ is on the path now

    files = write_run_files(folder)
    rows = [{"prompt": f"the answer {i} + {i} =", "answer": 2 * i} for i in range(PROMPTS)]
    files.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files.reward.write_text(REWARD.format(mean_s=MEAN_S, token_s=TOKEN_S, fixed_s=FIXED_S))
    return files.write(
        "bench",
        rl={"samples_per_prompt": 4, "batch_size_per_update": 8, "micro_batch_tokens": 640},
        model={"max_context": 256},
        rollout={"max_new_tokens": 16},
        reward={"timeout_s": 200.0},
        optimizer={"lr": 1e-3, "lr_scheduler": "constant"},
        engine={"max_running": 64, "kv_memory_mib": 16},
        run={"max_steps": steps, "eval_every": None, "checkpoint_every": steps},
    )


def real_run(cfg: RunConfig, run_dir: Path, setting: Setting) -> None:
    """Train without evaluations, in this process. Needs torch, which comparing does not."""
    from tithe.build.loops import train_and_roll
    from tithe.build.record import RunRecord
    from tithe.build.session import open_session

    run_dir.mkdir(parents=True)
    with open_session(cfg) as session, Pool.create(run_dir / "pool.sqlite", cfg.run.name) as pool:
        if setting.tool_s:
            session.player = replace(session.player, env=ToolEnv(setting.tool_s))
        pool.bind_prompts(PromptSource(list(session.items()), cfg.run.seed))
        write_text(run_dir / CONFIG_FILE, dump_resolved(session.cfg))
        train_and_roll(session, run_dir, pool, None, RunRecord(run_dir, session), evaluating=False)


def read_run(run_dir: Path, warm: int, last: int) -> Real:
    """Step time, idle share of the lane, ages and version gaps of batches `warm` + 1 to `last`."""
    rows = read_rows(run_dir / "metrics.jsonl").rows
    train = {row["step"]: row for row in rows if row["kind"] == "train"}
    rollout = {row["step"]: row for row in rows if row["kind"] == "rollout" and "version_gap" in row}
    late = [step for step in train if warm < step <= last and step in rollout]
    span_s = train[max(late)]["t_s"] - train[warm]["t_s"]
    lane_s = sum(train[s]["publish_s"] + rollout[s]["decode_s"] + rollout[s]["prefill_s"] for s in late)
    with PoolReader(run_dir / "pool.sqlite") as reader:
        ages = [
            int(row["age"])
            for row in reader.query("SELECT age, batch_serial FROM groups WHERE state = 'trained'")
            if warm < row["batch_serial"] <= last
        ]
    gaps = [int(rollout[s]["version_gap"]) for s in late]
    trained_s = sum(train[s]["train_s"] for s in late)
    idle = 1 - (lane_s + trained_s) / span_s
    return Real(span_s / len(late), idle, histogram(ages), histogram(gaps), len(ages))


def predict(sync_dir: Path, cfg: RunConfig, setting: Setting, steps: int) -> Outcome:
    """The outcome of a run under `cfg`, from the synchronous run's directory."""
    measured = measure_run(sync_dir, load_run(sync_dir))
    scenario = scenario_of_run(cfg, measured, steps=steps)
    if setting.known_reward_s is None:
        # lengths are drawn anew when a prompt is put back; the waits of the other settings are the prompts' own
        by = replace(scenario.workload, measured_by="sample" if setting.reward == "by_length" else "prompt")
        return simulate(replace(scenario, workload=by, reward_workers=None, reward_timeout_s=None))
    groups = tuple(replace(group, outside_s=0.0) for group in measured.groups)
    work = replace(scenario.workload, measured=groups, reward_s=Fixed(setting.known_reward_s))
    return simulate(replace(scenario, workload=work))


def keys_of(setting: Setting, run_file: Path, which: str, steps: int) -> list[str]:
    """Overrides of one of a setting's two runs."""
    reward = f"reward.function={run_file.parent / 'reward.py'}:{setting.reward}"
    workers = 4 if setting.known_reward_s else 8
    late = ("rl.max_policy_update_lag=0", f"reward.workers={workers}") if which == "sync" else setting.late
    return [reward, *setting.keys, *late, f"run.max_steps={steps}"]


def run_one(setting: Setting, run_file: Path, folder: Path, which: str, steps: int) -> None:
    """One real run."""
    real_run(load_config(run_file, keys_of(setting, run_file, which, steps)), folder / which, setting)
    print(f"{setting.name}, {which}: done", file=sys.stderr, flush=True)


def compare(setting: Setting, run_file: Path, folder: Path, steps: int) -> dict[str, Any]:
    """Both real runs beside both predictions, over as many batches: those for the same prompts."""
    real: dict[str, Real] = {}
    guess: dict[str, Outcome] = {}
    rows = read_rows(folder / "sync" / "metrics.jsonl").rows
    last = max(row["step"] for row in rows if row["kind"] == "rollout")
    for which in ("sync", "late"):
        cfg = load_config(run_file, keys_of(setting, run_file, which, steps))
        guess[which] = predict(folder / "sync", cfg, setting, last)
        real[which] = read_run(folder / which, guess[which].warm_batches, last)
    ratio = real["sync"].step_s / real["late"].step_s
    guessed = guess["sync"].step_s / guess["late"].step_s
    return {
        "setting": setting.name,
        "sync_idle_frac": real["sync"].idle_frac,
        "sync_step_s": real["sync"].step_s,
        "sync_step_simulated_s": guess["sync"].step_s,
        "async_step_s": real["late"].step_s,
        "async_step_simulated_s": guess["late"].step_s,
        "ratio": ratio,
        "ratio_simulated": guessed,
        "ratio_error_frac": guessed / ratio - 1,
        "age_distance_tv": total_variation(real["late"].ages, guess["late"].age_histogram()),
        "gap_distance_tv": total_variation(real["late"].gaps, guess["late"].gap_histogram()),
        "ages": {str(age): share for age, share in real["late"].ages.items()},
        "ages_simulated": {str(age): share for age, share in guess["late"].age_histogram().items()},
        "gaps": {str(gap): share for gap, share in real["late"].gaps.items()},
        "gaps_simulated": {str(gap): share for gap, share in guess["late"].gap_histogram().items()},
        "groups": real["late"].groups,
        "dropped_simulated": guess["late"].pool.left["stale"],
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| setting | idle when sync | step s, sync → async | gain | simulated | error | age TV | groups | gap TV |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['setting']} | {r['sync_idle_frac']:.0%} | {r['sync_step_s']:.2f} → {r['async_step_s']:.2f} "
        f"| {r['ratio']:.2f} | {r['ratio_simulated']:.2f} | {r['ratio_error_frac']:+.1%} "
        f"| {r['age_distance_tv']:.3f} | {r['groups']} | {r['gap_distance_tv']:.3f} |"
        for r in rows
    ]
    return "\n".join(lines)


def verdict(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How many settings are as near as they should be, and idle enough to say anything."""
    return {
        "settings": len(rows),
        "idle_half_or_more": sum(row["sync_idle_frac"] >= IDLE for row in rows),
        "gain_within_bound": sum(abs(row["ratio_error_frac"]) <= GAIN for row in rows),
        "ages_within_bound": sum(row["age_distance_tv"] <= AGES for row in rows),
    }


def main() -> None:
    """Run all settings, or those whose number is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print exactly one line with one JSON object")
    parser.add_argument("--steps", type=int, default=36, help="batches of each run (default 36)")
    parser.add_argument("--only", type=int, action="append", help="number of a setting, from 0; may be repeated")
    parser.add_argument("--keep", type=Path, help="folder for the run directories (default: a temporary one)")
    parser.add_argument("--compare-only", action="store_true", help="the runs are in --keep already")
    options = parser.parse_args()
    numbers = options.only or range(len(SETTINGS))
    started, load = time.monotonic(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        root = options.keep or Path(scratch)
        root.mkdir(parents=True, exist_ok=True)
        run_file = write_files(root, options.steps)
        work = [(SETTINGS[i], run_file, root / f"setting-{i}") for i in numbers]
        runs = [(*one, which, options.steps) for one in work for which in ("sync", "late")]
        if not options.compare_only:
            importlib.import_module("tithe.build")  # once, before the fork, and before anything is computed
            with multiprocessing.get_context("fork").Pool(len(runs), maxtasksperchild=1) as pool:
                pool.starmap(run_one, runs, chunksize=1)
        rows = [compare(*one, options.steps) for one in work]
    facts = {
        "commit": commit(),
        "steps": options.steps,
        "load_average_before": load,
        "load_average_after": os.getloadavg()[0],
        "wall_s": round(time.monotonic() - started),
        **verdict(rows),
    }
    if options.json:
        print(json.dumps({**facts, "settings_compared": rows}))
    else:
        print(table(rows))
        print("\n" + ", ".join(f"{name} {value}" for name, value in facts.items()))


if __name__ == "__main__":
    main()
