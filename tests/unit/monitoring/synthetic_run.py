"""A run directory made of plausible numbers, in the formats that a run writes. No model is involved.

The pool is filled by plain SQL into the pool's own tables, so a report that no longer fits them fails its tests.
"""

import itertools
import json
import math
import random
import sqlite3
from pathlib import Path

from tithe.metrics import JsonlSink, bootstrap_ci
from tithe.pool.schema import DDL

GROUPS_PER_BATCH, SAMPLES = 4, 4

CONFIG = """\
model: {path: null, base_dtype: bf16, compute: packed, compute_dtype: auto, quantize: none}
lora: {r: 32, alpha: 64, dropout: 0.0, target_modules: [q_proj, k_proj, v_proj, o_proj]}
optimizer: {lr: 0.0002, weight_decay: 0.01, max_grad_norm: 1.0, lr_scheduler: cosine, warmup_steps: 5}
rl: {algorithm: grpo, kl_coef: 0.01, clip_range: 0.2, samples_per_prompt: 8, max_policy_update_lag: 2}
rollout: {temperature: 1.0, top_p: 1.0, max_new_tokens: 40, system_prompt: null}
task: {source: sums, eval_size: 60}
monitor: {progress: true, alarm_after: 3}
run: {name: sums-demo, seed: 7, max_steps: 60, eval_every: 20}
"""


def share(step: int, steps: int) -> float:
    """How far learning has come, 0 to 1."""
    return 1 / (1 + math.exp(-10 * (step / steps - 0.4)))


def train_row(step: int, steps: int, rng: random.Random) -> dict[str, float]:
    done = share(step, steps)
    step_s = rng.gauss(6.6 - 2.2 * done, 0.3)
    return {
        "reward_mean": rng.gauss(-0.15 + 1.05 * done, 0.06),
        "reward_std": 0.5 - 0.3 * done,
        "readable_rate": min(1.0, 0.72 + 0.28 * done + rng.gauss(0, 0.015)),
        "truncated_frac": max(0.0, 0.25 - 0.25 * done + rng.gauss(0, 0.01)),
        "completion_tokens_mean": rng.gauss(22 - 14 * done, 0.8),
        "kl_mean": max(0.0, rng.gauss(0.32 * done, 0.012)),
        "entropy": max(0.02, rng.gauss(1.3 - 1.05 * done, 0.04)),
        "clip_frac": max(0.0, rng.gauss(0.02, 0.006)),
        "loss": rng.gauss(0.004, 0.01),
        "grad_norm": max(0.05, rng.gauss(0.8 - 0.4 * done, 0.1)),
        "lr": 2e-4 * min(1.0, step / 5) * (0.5 + 0.5 * math.cos(math.pi * step / steps)),
        "groups": GROUPS_PER_BATCH,
        "dropped_groups": float(rng.random() < 0.04),
        "failures": 0,
        "skipped": 0,
        "age_mean": min(step - 1, rng.gauss(1.1, 0.15)),
        "age_max": min(step - 1, 2),
        "tok_per_s": max(0.0, rng.gauss(640, 25)),
        "version_gap": min(step - 1, rng.choice([1, 1, 1, 2])),
        "step_s": step_s,
        "wait_s": 0.5 * step_s,
        "train_s": 0.4 * step_s,
        "publish_s": 0.06 * step_s,
        "sample_s": 0.9 * step_s,
        "reward_s": 0.15 * step_s,
    }


def eval_values(step: int, steps: int, rng: random.Random, questions: int = 60) -> dict[str, float]:
    done = share(step, steps)
    values: dict[str, float] = {"step": step, "questions": questions, "samples_per_question": 4}
    for name, rate, samples in (("eval_sampled", 0.11 + 0.78 * done, 4), ("eval_greedy", 0.45 + 0.5 * done, 1)):
        answers = [[float(rng.random() < rate) for _ in range(samples)] for _ in range(questions)]
        interval = bootstrap_ci(answers, seed=step)
        values |= {name: interval.mean, f"{name}_lo": interval.lo, f"{name}_hi": interval.hi}
    return values | {"eval_readable": 0.74 + 0.26 * done, "eval_greedy_readable": 0.85 + 0.15 * done}


def write_metrics(directory: Path, steps: int, rng: random.Random) -> None:
    now_s = [0.0]
    sink = JsonlSink(directory / "metrics.jsonl", clock=lambda: now_s[0])
    (directory / "eval").mkdir()
    for step in range(steps + 1):
        if step:
            row = train_row(step, steps, rng)
            now_s[0] += row["step_s"]
            sink.write(step, row)
        if step % max(1, steps // 3) == 0:
            values = eval_values(step, steps, rng)
            sink.write(step, {name: value for name, value in values.items() if name != "step"})
            (directory / "eval" / f"step_{step:06d}.json").write_text(json.dumps(values))
    sink.close()


def write_pool(path: Path, batches: int, texts: dict[tuple[int, int, int], str]) -> None:
    """A pool with `batches` trained batches, one dropped and one running group."""
    connection = sqlite3.connect(path)
    connection.executescript(DDL)
    group_ids = itertools.count()

    def add_group(state, serial, batch=None, position=None, reason=None):
        group = next(group_ids)
        values = (group, f"sum-{group % 13}-{group * 5 % 13}", serial, state, serial, serial, batch, position, reason)
        connection.execute(
            "INSERT INTO rollout_group (group_id, prompt_id, lineage, admitted_serial, state, min_serial, max_serial, "
            "batch_serial, batch_position, reason, admitted_at_s) VALUES (?, ?, 0, ?, ?, ?, ?, ?, ?, ?, 0.0)",
            values,
        )
        return group

    def add_rollout(group, serial, sample, reward, text, cause=None):
        parts, finish = json.dumps({"answer": reward, "format": 0.0}), "length" if reward == -0.5 else "stop"
        connection.execute(
            "INSERT INTO rollout (group_id, sample, reward, reward_parts, reason, cause, finish, n_tokens, min_serial, "
            "max_serial, temperature, text) VALUES (?, ?, ?, ?, NULL, ?, ?, ?, ?, ?, 1.0, ?)",
            (group, sample, reward, parts, cause, finish, 3 + len(text) // 4, serial, serial, text),
        )

    for batch, position in itertools.product(range(1, batches + 1), range(GROUPS_PER_BATCH)):
        serial = max(0, batch - 2)
        group = add_group("trained", serial, batch, position)
        total = group % 13 + group * 5 % 13
        add_rollout(group, serial, 0, -0.5, texts.get((batch, position, 0), "Well, let"))
        for sample in range(1, SAMPLES):
            right = batch == batches or (position + sample) % 4 == 0
            text = f"The answer is {total if right else total + 1}."
            add_rollout(group, serial, sample, float(right), texts.get((batch, position, sample), text))
    add_rollout(add_group("dropped", batches, reason="stale"), batches, 0, None, "", cause="timeout")
    add_group("running", batches)
    connection.commit()
    connection.close()


PARITY = {
    "max_abs_dlogp": 0.0,
    "mean_abs_dlogp": 0.0,
    "noise_floor": 3.1e-4,
    "tokens": 2304,
    "base_max_abs_error": 0.0,
    "compute": "packed",
    "compute_dtype": "bf16",
    "attention": "tiled",
    "commit": "1a2b3c4",
}

PLANNED = {
    "base_resident_bytes": 98362432,
    "adapter_bytes": 39000000,
    "optimizer_bytes": 78000000,
    "kv_bytes": 134217728,
    "peak_pss_bytes": 870000000,
}

INFO = {
    "name": "sums-demo",
    "status": "finished",
    "reason": "all batches trained",
    "minutes": 6.4,
    "started_at": "2030-01-02T10:00:00Z",
    "finished_at": "2030-01-02T10:06:24Z",
    "tithe_version": "0.1.0",
    "commit": "1a2b3c4",
    "model": {"name": "SmolLM2-135M-Instruct", "architecture": "llama", "parameters": 134515008},
    "machine": {"cpu": "two cores", "threads": 2, "torch": "2.13.0"},
    "memory": {**PLANNED, "base_file_bytes": 98362432, "base_resident_bytes": 99100000, "peak_pss_bytes": 902000000},
    "memory_planned": PLANNED,
}

WEIGHTS = {"checkpoints/step_000060": 118_000, "adapters/sums-demo-0-v60": 19_500, "adapter": 19_500}


def write_run(directory: Path, *, steps: int = 60, texts: dict[tuple[int, int, int], str] | None = None) -> Path:
    """A finished run; `directory` must not exist. `texts` maps (batch, group of the batch, sample) to what the model
    wrote there; only the first and the last of its six batches are shown in a report.
    """
    directory.mkdir(parents=True)
    write_metrics(directory, steps, random.Random(7))
    write_pool(directory / "pool.sqlite", min(steps, 6), texts or {})
    (directory / "config.yaml").write_text(CONFIG)
    (directory / "parity.json").write_text(json.dumps(PARITY))
    (directory / "run.json").write_text(json.dumps(INFO))
    for name, size in WEIGHTS.items():
        (directory / name).mkdir(parents=True)
        (directory / name / "adapter_model.safetensors").write_bytes(bytes(size))
    return directory
