"""Memory of this project's own runs on a processor: predicted by `tithe.planner.cpu`, measured in a fresh process.

Each setting is one process, forked after all imports. It resets the kernel's high-water mark, opens a session as a run
does, and makes steps with completions of exact length: sample, train, publish. Measured is the mark minus the resident
size after imports, and, when a backward ends, the bytes of all live tensors by storage.
The first setting fits the one constant of the model (`PROCESS_BYTES`) and is not scored.

    python -m benchmarks.plan_vs_measured [--only NAME] [--json]
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tithe.arch import ArchSpec, checkpoint_base, describe_checkpoint, find_demo_model
from tithe.planner.cpu import CpuRun, Micro, live_tensor_bytes, peak_after_imports

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
)


def main() -> None:
    """Measure all settings and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of a setting's name")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    chosen = [one for one in SETTINGS if arguments.only in one.name]
    rows = []
    for setting in chosen:
        rows.append(_compare(setting))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    scored = [row for row in rows if not row["setting"].startswith("fitted")]
    errors = sorted(abs(row["error"]) for row in scored)
    summary = {"median_error": median(errors), "worst_error": errors[-1]} if errors else {}
    if arguments.json:
        print(json.dumps({"rows": rows, **summary}))
        return
    print("| setting | predicted MB | measured MB | error | live tensors: predicted | measured | error |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        print(
            f"| {row['setting']} | {row['predicted_bytes'] / 1e6:,.0f} | {row['measured_bytes'] / 1e6:,.0f} "
            f"| {row['error']:+.1%} | {row['predicted_tensor_bytes'] / 1e6:,.0f} "
            f"| {row['measured_tensor_bytes'] / 1e6:,.0f} | {row['tensor_error']:+.1%} |"
        )
    if summary:
        print(f"\nscored {len(scored)}: median error {summary['median_error']:.1%}, worst {summary['worst_error']:.1%}")


def _compare(setting: Setting) -> dict[str, Any]:
    measured = _measured(setting)
    run = _planned(setting, measured)
    predicted, tensors = peak_after_imports(run), live_tensor_bytes(run)
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
        "details": measured["details"],
    }


def _measured(setting: Setting) -> dict[str, Any]:
    """Run a setting in a process forked after all imports, before any thread of the kernels exists."""
    import benchmarks.tithe_side  # noqa: F401  everything that a run imports

    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=_answer, args=(setting, _status_bytes("VmRSS"), answers))
    process.start()
    measured = answers.get()
    process.join()
    if "error" in measured:
        raise RuntimeError(f"{setting.name}: {measured['error']}")
    return measured


def _answer(setting: Setting, after_imports: int, answers: Any) -> None:
    try:
        answers.put(_child(setting, after_imports))
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
        micro_batch_tokens=setting.micro,
        recompute=setting.recompute,
        is_packed=setting.compute == "packed",
        operand_bytes=2 if setting.compute_dtype == "bf16" else 4,
        max_context=setting.context,
        threads=measured["threads"],
    )


# ------------------------------------------------------------------ the measured process


def _child(setting: Setting, after_imports: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        model = _model(setting, Path(folder))
        _reset_peak()
        return _measure(setting, model, Path(folder), after_imports)


def _measure(setting: Setting, model: dict[str, Any], folder: Path, after_imports: int) -> dict[str, Any]:
    from benchmarks.tithe_side import Bench
    from tithe.config import load_config

    overrides = [
        f"model.compute={setting.compute}",
        f"model.compute_dtype={setting.compute_dtype}",
        f"model.activation_checkpointing={str(setting.recompute).lower()}",
        f"model.max_context={setting.context}",
        f"lora.r={setting.r}",
        f"rl.micro_batch_tokens={setting.micro}",
        f"rl.samples_per_prompt={setting.samples}",
        f"rl.batch_size_per_update={setting.rollouts}",
        f"rollout.max_new_tokens={setting.new}",
        "rl.kl_coef=0",
        "run.threads=2",
        *model["overrides"],
    ]
    if setting.targets != "all-linear":
        overrides.append(f"lora.target_modules=[{setting.targets}]")
    n = setting.rollouts // setting.samples
    prompts = [[(7 * i + j) % 97 + 20 for j in range(setting.prompt)] for i in range(2 * n)]
    workload = {"step_prompts": n, "step_prompt_ids": prompts, "rollout_prompt_ids": prompts}
    bench = Bench(load_config(None, overrides), workload, folder / "adapters")
    with bench.session:
        seen = _watch(bench)
        for _ in range(STEPS):
            _step(bench, setting)
        details = {name: _status_bytes(name) for name in ("VmHWM", "VmRSS")}
        decoder = bench.session.base.decoder
        details["base_resident_bytes"] = decoder.resident_bytes()
    return {
        "after_imports_bytes": after_imports,
        "peak_bytes": details["VmHWM"] - after_imports,
        "tensor_bytes": seen["tensor_bytes"],
        "rows": seen["rows"],
        "threads": 2,
        "config": model["config"],
        "details": details,
    }


def _step(bench: Any, setting: Setting) -> None:
    import benchmarks.tithe_side as side

    side.SAMPLES_PER_PROMPT = setting.samples
    bench.step(setting.new)


def _watch(bench: Any) -> dict[str, int]:
    """Count the live tensors at the end of the largest micro-batch's backward."""
    seen = {"tensor_bytes": 0, "rows": 0}
    passes = bench.session.trainer.passes
    original = passes.backward

    def backward(micro: Any, *rest: Any) -> None:
        original(micro, *rest)
        if len(micro.input_ids) >= seen["rows"]:
            seen["rows"] = len(micro.input_ids)
            seen["tensor_bytes"] = _tensor_bytes(bench.session.engine.pages)

    passes.backward = backward
    return seen


def _tensor_bytes(engine_pages: Any) -> int:
    """Bytes of the distinct storages of all live tensors; the engine's pages are given out as they are written."""
    import torch

    own = {engine_pages.keys.untyped_storage().data_ptr(), engine_pages.values.untyped_storage().data_ptr()}
    storages: dict[int, int] = {}
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor):  # isinstance would ask objects that warn
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(n_bytes for address, n_bytes in storages.items() if address not in own)


def _model(setting: Setting, folder: Path) -> dict[str, Any]:
    if setting.model == DEMO:
        return {"overrides": [], "config": None}
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from support.checkpoints import build_hf

    sizes = {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 2048,
    }
    directory = build_hf(folder / "model", "llama", **sizes)
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
