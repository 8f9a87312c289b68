"""Full-parameter training beside an adapter: one model, one job, one command, one table.

The demo's model as BF16 safetensors (converted as for the peers) learns products of numbers up to 12 by `tithe
capacity`: an adapter of rank 32 on the BF16 base, every parameter, the same adapter on an int4 base, and every
parameter with rollouts from int4 copies. Each run is a process of its own and sees the same questions and seed.

    python -m benchmarks.full_or_adapter

Prints a Markdown table (with --json one line: `tithe capacity`'s own answer, machine and commit).
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.output import commit
from benchmarks.peer_env import ensure_peer_environment, say

RANKS = "32"
EVERY = 4
"""Batches between two evaluations."""

RUN_FILE = """\
model: {{path: {model}, max_context: 128}}
lora: {{r: 32, alpha: 64}}
optimizer: {{lr: 3e-4}}
rl: {{samples_per_prompt: 8, batch_size_per_update: 64, max_policy_update_lag: 0, kl_coef: 0, micro_batch_tokens: 1024}}
rollout: {{max_new_tokens: 12, max_prompt_tokens: 96}}
task: {{source: products, eval_size: 32}}
engine: {{max_running: 64, kv_memory_mib: 64}}
run: {{max_steps: {steps}, eval_every: {every}, eval_samples_per_question: 4, checkpoint_every: {steps}}}
"""

HEAD = ("run", "learning rate", "held out, before > … > after", "peak MiB", "trained state MiB", "s/batch")
GAP = ("max gap", "mean gap")


def compare(steps: int) -> dict[str, Any]:
    """`tithe capacity`'s answer. Raises `SystemExit` with the end of its log when it fails."""
    peers = ensure_peer_environment()
    with tempfile.TemporaryDirectory(dir=peers.model_dir.parent) as scratch:
        run_file = Path(scratch) / "job.yaml"
        run_file.write_text(RUN_FILE.format(model=peers.model_dir, steps=steps, every=EVERY))
        command = [sys.executable, "-m", "tithe.cli", "capacity", str(run_file), "--ranks", RANKS, "--copy", "int4"]
        command += ["--json", f"run.dir={scratch}/runs"]
        answer = subprocess.run(command, stdout=subprocess.PIPE, check=False)
        if answer.returncode != 0:
            logs = [path.read_text()[-2000:] for path in Path(scratch).glob("runs/*/log.txt")]
            sys.exit("\n".join([answer.stdout.decode(), *logs]))
        return json.loads(answer.stdout)


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """The runs as a Markdown table. A gap is |trainer's - sampler's log-prob| of sampled tokens, in nats."""
    rows = [(*HEAD, *GAP), ("---",) * (len(HEAD) + len(GAP)), *(_row(run) for run in runs)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(run: Mapping[str, Any]) -> tuple[str, ...]:
    peak = run["peak_bytes"]
    gaps = (run["max_abs_dlogp"], run["mean_abs_dlogp"])
    return (
        run["name"],
        f"{run['lr']:g}",
        " > ".join(f"{value:.2f}" for _, value in run["held_out"]),
        "" if peak is None else f"{peak / 2**20:.0f}",
        f"{run['trained_state_bytes'] / 2**20:.0f}",
        f"{run['step_s']:.1f}",
        *("" if gap is None else f"{gap:.2g}" for gap in gaps),
    )


def machine() -> str:
    """What kind of machine this is: processor's name and number of cores."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    name = names[0].partition(":")[2].strip() if names else platform.machine()
    return f"{len(names)} cores, {name}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print exactly one line with one JSON object")
    parser.add_argument("--steps", type=int, default=12, help="batches of each run")
    options = parser.parse_args()
    answer = compare(options.steps)
    result = {**answer, "machine": machine(), "commit": commit()}
    if options.json:
        print(json.dumps(result))
        return
    say(f"{result['machine']}, {result['commit']}")
    print(table(answer["runs"]))


if __name__ == "__main__":
    main()
