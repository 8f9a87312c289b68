"""Peak memory of a small run in Kimi-K2's shape, phase by phase, beside what the accounting predicts.

DeepSeek-V3's config class shrunk to 10 layers: latent attention, one dense layer, then 128 routed experts of which a
token takes 8, one shared; the experts in compressed-tensors INT4 groups of 32 as Kimi-K2-Thinking publishes them, more
than 500 MB of packed base. An adapter on attention samples, trains and publishes for a few steps on one rank.

    python -m benchmarks.kimi_shaped --json

What is measured is the high-water mark of resident memory in each phase, less the size after all imports; what is
predicted by `tithe.planner.cpu`. Weights are random and the same for every expert: bytes alone are looked at.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.output import commit, emit
from benchmarks.peer_env import ROOT, say

SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2560,
    "num_hidden_layers": 10,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 256,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "vocab_size": 4096,
    "tie_word_embeddings": False,
}
R = 32
TARGETS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
MICRO_BATCH_TOKENS = 512
LIVE_VERSIONS = 2
PREFILL_TOKENS = 256
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 48, 32
SAMPLES = 8


def build(directory: Path) -> None:
    """Write the checkpoint."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support.checkpoints_packed import build_large  # pyright: ignore[reportMissingImports] - tests/ is on the path now

    build_large(directory, "deepseek_v3", "int4-experts", **SIZES)


def measure(model: Path, steps: int) -> dict[str, Any]:
    """Run in this process: bytes after imports, and the high-water mark above them of each phase."""
    from benchmarks.tithe_side import Bench
    from tithe.config import load_config
    from tithe.types import RolloutGroup

    cfg = load_config(
        None,
        [
            f"model.path={model}",
            "model.compute=packed",
            "model.compute_dtype=bf16",
            "model.activation_checkpointing=true",
            "model.max_context=512",
            f"lora.r={R}",
            f"lora.target_modules=[{', '.join(TARGETS)}]",
            f"rl.samples_per_prompt={SAMPLES}",
            f"rl.batch_size_per_update={SAMPLES * PROMPTS}",
            f"rl.micro_batch_tokens={MICRO_BATCH_TOKENS}",
            "rl.kl_coef=0",
            f"rollout.max_new_tokens={NEW_TOKENS}",
            f"rollout.max_prompt_tokens={512 - NEW_TOKENS}",
            f"engine.max_running={SAMPLES * PROMPTS}",
            "engine.kv_memory_mib=64",
            f"engine.prefill_tokens_per_tick={PREFILL_TOKENS}",
            f"engine.max_live_versions={LIVE_VERSIONS}",
        ],
    )
    rng = random.Random(0)
    prompts = [[rng.randrange(4, 116) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS * (steps + 1))]
    workload = {"rollout_prompt_ids": prompts, "step_prompts": PROMPTS, "step_prompt_ids": prompts}
    peaks = Peaks()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(cfg, workload, Path(folder))
        with bench.session:
            peaks.end("load")
            for step in range(steps):
                own = prompts[step * PROMPTS : (step + 1) * PROMPTS]
                sampled = bench.generate(own, SAMPLES, NEW_TOKENS)
                peaks.end("rollout")
                groups: list[RolloutGroup] = [bench.group(i, own[i], row) for i, row in enumerate(sampled)]
                result = bench.learner.learn(groups, bench.serial)
                assert result is not None
                assert not result.skipped
                peaks.end("train")
                bench.serial += 1
                bench.publish()
                peaks.end("publish")
            decoder = bench.session.base.decoder
            facts = {
                "base_resident_bytes": decoder.resident_bytes(),
                "adapter_state_bytes": bench.session.trainer.memory_bytes(),
                **bench.facts(),
            }
    return {"after_imports_bytes": peaks.start_bytes, "peak_bytes": peaks.bytes, **facts}


class Peaks:
    """The largest resident size of this process in each phase, above what it had when this was made."""

    def __init__(self) -> None:
        gc.collect()
        self.start_bytes = _status("VmRSS")
        self.bytes: dict[str, int] = {}
        _forget_peak()

    def end(self, phase: str) -> None:
        """A phase is over; of one that comes again the largest counts."""
        peak = _status("VmHWM") - self.start_bytes
        self.bytes[phase] = max(peak, self.bytes.get(phase, 0))
        _forget_peak()


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"this kernel does not say {key}")


def _forget_peak() -> None:
    """Begin a new high-water mark at the present size (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def predict(model: Path) -> dict[str, int]:
    """Bytes by layer at the peak beyond imports, by `tithe.planner.cpu`."""
    from tithe.arch import checkpoint_base, read_checkpoint
    from tithe.planner.cpu import IMPORT_BYTES, cpu_side
    from tithe.planner.cpu_run import CpuRun

    checkpoint = read_checkpoint(model)
    run = CpuRun(
        spec=checkpoint.spec,
        base=checkpoint_base(checkpoint),
        prompt=PROMPT_TOKENS,
        new=NEW_TOKENS,
        rollouts=SAMPLES * PROMPTS,
        samples=SAMPLES,
        lora_r=R,
        lora_targets=TARGETS,
        micro_batch_tokens=MICRO_BATCH_TOKENS,
        recompute=True,
        max_context=512,
        max_running=SAMPLES * PROMPTS,
        prefill_tokens=PREFILL_TOKENS,
        live_versions=LIVE_VERSIONS - 1,
    )
    by_layer = {name: n_bytes for name, n_bytes in cpu_side(run).by_layer.items() if n_bytes}
    return by_layer | {"runtime": by_layer["runtime"] - IMPORT_BYTES}


def main() -> None:
    """Build, predict, measure in a process of its own, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print exactly one line with one JSON object")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps")
    parser.add_argument("--part", choices=("build", "measure"), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "build":
        build(options.model)
        return
    if options.part == "measure":
        print(json.dumps(measure(options.model, options.steps)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        say("writing the checkpoint")
        _part("build", model)
        _part("measure", model, "--steps", "1")  # compiles: no compiler shall be in what is measured
        result = json.loads(_part("measure", model, "--steps", str(options.steps)))
        predicted = predict(model)
    measured, total = max(result["peak_bytes"].values()), sum(predicted.values())
    emit(
        {
            "measured_bytes": measured,
            "predicted_bytes": total,
            "error": total / measured - 1,
            "predicted": predicted,
            **result,
            "commit": commit(),
        },
        as_json=options.json,
    )


def _part(name: str, model: Path, *more: str) -> str:
    command = [sys.executable, "-m", "benchmarks.kimi_shaped", "--part", name, "--model", str(model), *more]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main()
