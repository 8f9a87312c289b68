"""Memory of this project's own runs on a processor: predicted by `tithe.planner.cpu`, measured in a fresh process.

Each setting is one new process, which opens a session as a run does and makes steps with completions of exact length:
sample, train, publish. Measured is the kernel's high-water mark of each of these, begun anew before it, minus the
resident size of that process after all imports; and, when a backward ends, the bytes of all live tensors by storage.
(A forked process begins without the library pages that its parent's size counts, a few hundred megabytes here.)
The first setting fits the one constant of the model (`PROCESS_BYTES`) and is not scored. A process that is not measured
goes before each kind of run, so that no compiler is in what is measured.

    python -m benchmarks.plan_vs_measured [--only NAME] [--json]
    python -m benchmarks.plan_vs_measured --write     its part of docs/planner-accuracy.md
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.planner_accuracy import OWN_RUNS, PAGE
from tithe.arch import ArchSpec, checkpoint_base, describe_checkpoint, find_demo_model
from tithe.planner.cpu import (
    freed_bytes,
    live_tensor_bytes,
    moments,
    peak_after_imports,
    persistent_bytes,
    process_bytes,
)
from tithe.planner.cpu_run import CpuRun, Micro

if TYPE_CHECKING:
    from tithe.config import RunConfig

DEMO = "demo"
STEPS = 2


@dataclass(frozen=True)
class Setting:
    """One run; every field is a key of the configuration or of the workload."""

    name: str
    model: str = DEMO
    r: int = 32
    targets: str = "all-linear"
    rollouts: int = 8
    samples: int = 8
    prompt: int = 40
    new: int = 32
    micro: int = 640
    recompute: bool = False
    compute: str = "packed"
    compute_dtype: str = "bf16"
    context: int = 2048
    experts: Literal["per_expert", "shared_outer"] = "per_expert"

    @property
    def kernels(self) -> tuple[str, ...]:
        """Settings that agree in these run the same kernels."""
        return self.model, self.compute, self.compute_dtype


ATTENTION = "q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj"
SETTINGS = (
    Setting("fitted: packed, r 32"),
    Setting("packed, r 128", r=128),
    Setting("packed, 24 rollouts, micro-batch 1280", rollouts=24, micro=1280),
    Setting("packed, 24 rollouts, micro-batch 1280, recomputed", rollouts=24, micro=1280, recompute=True),
    Setting("dequantized, r 32", compute="dequantized"),
    Setting("packed, long, recomputed", rollouts=4, samples=4, prompt=256, new=96, micro=2048, recompute=True),
    Setting("BF16 safetensors, 8 layers of 512", model="bf16", rollouts=24, micro=1280),
    Setting("packed, r 8, attention", r=8, targets="q_proj,k_proj,v_proj,o_proj"),
    Setting("packed, fp32 operands", compute_dtype="fp32"),
    Setting("mixture of 32 experts, adapter on every expert", model="mixture", r=8, rollouts=16),
    Setting("mixture, shared outer, recomputed", model="mixture", rollouts=16, recompute=True, experts="shared_outer"),
    Setting("latent attention and experts, recomputed", model="latent", rollouts=16, recompute=True, targets=ATTENTION),
)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": (
        "llama",
        {
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
        },
    ),
    "mixture": (
        "qwen3_moe",
        {
            "hidden_size": 512,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 256,
        },
    ),
    "latent": (
        "deepseek_v3",
        {
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "q_lora_rank": 192,
            "kv_lora_rank": 128,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
            "n_routed_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 256,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
}
"""Random checkpoints in BF16: (architecture, sizes)."""


def main() -> None:
    """Measure all settings and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of a setting's name")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help="write the table into docs/planner-accuracy.md")
    arguments = parser.parse_args()
    chosen = [one for one in SETTINGS if arguments.only in one.name]
    rows, warm = [], set[tuple[str, ...]]()
    for setting in chosen:
        if setting.kernels not in warm:
            warm.add(setting.kernels)
            _measured(setting)
        rows.append(_compare(setting))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    scored = [row for row in rows if not row["setting"].startswith("fitted")]
    errors = sorted(abs(row["error"]) for row in scored)
    summary = {"median_error": median(errors), "worst_error": errors[-1]} if errors else {}
    if arguments.json:
        print(json.dumps({"rows": rows, **summary}))
        return
    lines = list(_table(rows, summary))
    if arguments.write:
        before = PAGE.read_text()
        PAGE.write_text(before[: before.index(OWN_RUNS)] + "\n".join([OWN_RUNS, "", *NOTES, "", *lines, ""]))
    print("\n".join(lines))


NOTES = (
    "Generated by `python -m benchmarks.plan_vs_measured --write`: real runs on a processor (two threads, the demo's",
    "model unless another is named, two steps each), every one in a process of its own. Megabytes beyond the resident",
    "size after imports: the kernel's high-water mark, and all live tensors by storage when a backward ends. The first",
    "setting fits the one constant of the model (`PROCESS_BYTES`) and is not scored. Counted after looking at earlier",
    "tables: the file of shared outer matrices, in which every expert has them again; the tokenizer by its vocabulary;",
    "the room of the cast before the served one, which the allocator keeps. Live tensors have none of the last two.",
)


def _table(rows: list[dict[str, Any]], summary: dict[str, float]) -> Iterator[str]:
    yield "| setting | predicted MB | measured MB | error | live tensors: predicted | measured | error |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for row in rows:
        yield (
            f"| {row['setting']} | {row['predicted_bytes'] / 1e6:,.0f} | {row['measured_bytes'] / 1e6:,.0f} "
            f"| {row['error']:+.1%} | {row['predicted_tensor_bytes'] / 1e6:,.1f} "
            f"| {row['measured_tensor_bytes'] / 1e6:,.1f} | {row['tensor_error']:+.1%} |"
        )
    if summary:
        yield ""
        yield f"{len(rows) - 1} scored: median error {summary['median_error']:.1%}, worst {summary['worst_error']:.1%}."


def _compare(setting: Setting) -> dict[str, Any]:
    measured = _measured(setting)
    run = _planned(setting, measured)
    predicted, tensors = peak_after_imports(run), live_tensor_bytes(run)
    always = sum(persistent_bytes(run).values()) + sum(freed_bytes(run).values()) + process_bytes(run)
    return {
        "setting": setting.name,
        "predicted_bytes": predicted,
        "measured_bytes": measured["peak_bytes"],
        "error": predicted / measured["peak_bytes"] - 1,
        "predicted_tensor_bytes": tensors,
        "measured_tensor_bytes": measured["tensor_bytes"],
        "tensor_error": tensors / measured["tensor_bytes"] - 1,
        "rows": [Micro.of(run).rows, measured["rows"]],
        "after_imports_bytes": measured["after_imports_bytes"],
        "phases": {
            name: [always + sum(layers.values()), measured["phases"].get(name)] for name, layers in moments(run).items()
        },
        "details": measured["details"],
    }


def _measured(setting: Setting) -> dict[str, Any]:
    """Run a setting in a process of its own, which finds its model written."""
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        model = _model(setting, Path(folder))
        process = context.Process(target=_answer, args=(setting, model, Path(folder), answers))
        process.start()
        measured = answers.get()
        process.join()
    if "error" in measured:
        raise RuntimeError(f"{setting.name}: {measured['error']}")
    return measured


def _answer(setting: Setting, model: dict[str, Any], folder: Path, answers: Any) -> None:
    try:
        answers.put(_child(setting, model, folder))
    except BaseException as error:
        answers.put({"error": repr(error)})
        raise


def _planned(setting: Setting, measured: dict[str, Any]) -> CpuRun:
    """The planner's view: nothing of it is measured but what a run file says."""
    if setting.model == DEMO:
        checkpoint = describe_checkpoint(find_demo_model())
        spec, base = checkpoint.spec, checkpoint_base(checkpoint)
    else:
        from tithe.arch import published_base

        config = measured["config"]
        spec, base = ArchSpec.from_config(config), published_base(config)
    return CpuRun(
        spec=spec,
        base=base,
        prompt=setting.prompt,
        new=setting.new,
        rollouts=setting.rollouts,
        samples=setting.samples,
        lora_r=setting.r,
        lora_targets=tuple(setting.targets.split(",")),
        lora_experts=setting.experts,
        micro_batch_tokens=setting.micro,
        recompute=setting.recompute,
        is_packed=setting.compute == "packed",
        operand_bytes=2 if setting.compute_dtype == "bf16" else 4,
        max_context=setting.context,
        threads=measured["threads"],
    )


# ------------------------------------------------------------------ the measured process


def _child(setting: Setting, model: dict[str, Any], folder: Path) -> dict[str, Any]:
    import benchmarks.tithe_side  # noqa: F401  # pyright: ignore[reportUnusedImport] - everything that a run imports

    gc.collect()
    return _measure(setting, model, folder, _status_bytes("VmRSS"))


def _configuration(setting: Setting, overrides: list[str]) -> RunConfig:
    from tithe.config import load_config

    own = [
        f"model.compute={setting.compute}",
        f"model.compute_dtype={setting.compute_dtype}",
        f"model.activation_checkpointing={str(setting.recompute).lower()}",
        f"model.max_context={setting.context}",
        f"lora.r={setting.r}",
        f"lora.expert_layout={setting.experts}",
        f"rl.micro_batch_tokens={setting.micro}",
        f"rl.samples_per_prompt={setting.samples}",
        f"rl.batch_size_per_update={setting.rollouts}",
        f"rollout.max_new_tokens={setting.new}",
        "rl.kl_coef=0",
        "run.threads=2",
        *overrides,
    ]
    if setting.targets != "all-linear":
        own.append(f"lora.target_modules=[{setting.targets}]")
    return load_config(None, own)


def _measure(setting: Setting, model: dict[str, Any], folder: Path, after_imports: int) -> dict[str, Any]:
    from benchmarks.tithe_side import Bench

    n = setting.rollouts // setting.samples
    prompts = [[(7 * i + j) % 97 + 4 for j in range(setting.prompt)] for i in range(STEPS * n)]
    workload = {"step_prompts": n, "step_prompt_ids": prompts, "rollout_prompt_ids": prompts}
    peaks = Peaks(after_imports)
    bench = Bench(_configuration(setting, model["overrides"]), workload, folder / "adapters")
    with bench.session:
        peaks.end("loading")
        seen = _watch(bench)
        for step in range(STEPS):
            _step(bench, setting, prompts[step * n : (step + 1) * n], peaks)
        base_bytes = bench.session.base.decoder.resident_bytes()
    return {
        "after_imports_bytes": after_imports,
        "peak_bytes": max(peaks.bytes.values()),
        "phases": peaks.bytes,
        "tensor_bytes": seen["tensor_bytes"],
        "rows": seen["rows"],
        "threads": 2,
        "config": model["config"],
        "details": {"base_resident_bytes": base_bytes, "largest": seen["largest"]},
    }


def _step(bench: Any, setting: Setting, prompts: list[list[int]], peaks: Peaks) -> None:
    sampled = bench.generate(prompts, setting.samples, setting.new)
    peaks.end("sampling")
    groups = [bench.group(i, prompts[i], row) for i, row in enumerate(sampled)]
    if bench.learner.learn(groups, bench.serial) is None:
        raise RuntimeError("nothing was learned")
    peaks.end("training")
    bench.serial += 1
    bench.publish()
    peaks.end("publishing")


class Peaks:
    """The largest resident size of this process in each phase, above what it had after its imports."""

    def __init__(self, after_imports: int) -> None:
        self.start_bytes, self.bytes = after_imports, dict[str, int]()
        _reset_peak()

    def end(self, phase: str) -> None:
        """A phase is over; of one that comes again the largest counts."""
        peak = _status_bytes("VmHWM") - self.start_bytes
        self.bytes[phase] = max(peak, self.bytes.get(phase, 0))
        _reset_peak()


def _watch(bench: Any) -> dict[str, Any]:
    """Count the live tensors at the end of the largest micro-batch's backward."""
    seen: dict[str, Any] = {"tensor_bytes": 0, "rows": 0, "largest": []}
    passes = bench.session.trainer.passes
    original = passes.backward

    def backward(micro: Any, *rest: Any) -> None:
        original(micro, *rest)
        if len(micro.input_ids) >= seen["rows"]:
            seen["rows"] = len(micro.input_ids)
            found = _storages(bench.session.engine.pages)
            seen["tensor_bytes"], seen["largest"] = sum(found), sorted(found, reverse=True)[:40]

    passes.backward = backward
    return seen


def _storages(engine_pages: Any) -> list[int]:
    """Bytes of each of the distinct storages of live tensors; the engine's pages are given out as they are written."""
    import torch

    own = {engine_pages.keys.untyped_storage().data_ptr(), engine_pages.values.untyped_storage().data_ptr()}
    storages: dict[int, int] = {}
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor):  # isinstance would ask objects that warn
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return [n_bytes for address, n_bytes in storages.items() if address not in own]


def _model(setting: Setting, folder: Path) -> dict[str, Any]:
    if setting.model == DEMO:
        return {"overrides": [], "config": None}
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from support.checkpoints import build_hf  # pyright: ignore[reportMissingImports] - tests/ is on the path now

    architecture, sizes = MODELS[setting.model]
    directory = build_hf(folder / "model", architecture, max_position_embeddings=2048, **sizes)
    config = json.loads((directory / "config.json").read_text())
    return {"overrides": [f"model.path={directory}"], "config": config}


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"the kernel does not tell {name}")


def _reset_peak() -> None:
    """Let the high-water mark begin again at what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    main()
