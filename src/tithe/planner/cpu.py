"""Memory of this project's own run on a processor: what each buffer takes, as `tithe.models` and `trainer` make them.

A run's peak is one of four moments on top of what always stays (base, engine, adapter and its optimizer):

    sampling    cached keys and values of the live sequences
    training    everything a micro-batch keeps for its backward, one layer's gradients, scored targets
    stepping    gradients beside the adapter's old cast and its new one
    publishing  the adapter once more as a file and once more in the engine

Dense models and mixtures, grouped and latent attention: all that `tithe.models` runs, on one rank.
"""

from __future__ import annotations

from typing import Final

from tithe.planner.cpu_pass import (
    CHUNK_ROWS,
    backward_bytes,
    forward_bytes,
    kept_bytes,
    scoring_bytes,
    untouched_bytes,
)
from tithe.planner.cpu_run import PAGE, CpuRun, Micro
from tithe.planner.cpu_weights import (
    adapter_numbers,
    backward_adapter_bytes,
    base_bytes,
    forward_adapter_bytes,
    gradient_bytes,
    published_numbers,
)
from tithe.planner.layers import Layer, Side, finish
from tithe.planner.request import PlanRequest

PROCESS_BYTES: Final = 38_000_000
"""Beyond imports: library pages first touched by a run (20 MB seen), compiled kernels, threads' arenas, SQLite. Fitted
on the first setting of `benchmarks/plan_vs_measured`, which is not scored."""
TOKENIZER_BYTES: Final = 340
"""Of an entry of the vocabulary, with its merges: 16.7 MB were seen for the 49,152 of the demo's model."""
IMPORT_BYTES: Final = 417_000_000
"""Resident size after importing torch, numba and transformers. Seen with the pinned versions."""


def cpu_run(request: PlanRequest) -> CpuRun:
    """A request as one process: micro-batches of 640 tokens unless another number is asked for, 8 samples a prompt; of
    the live versions one is that which is just being published."""
    return CpuRun(
        spec=request.spec,
        base=request.base,
        prompt=request.prompt_tokens,
        new=request.new_tokens,
        rollouts=request.batch,
        lora_r=request.lora_r,
        lora_targets=request.lora_targets,
        lora_experts=request.lora_experts,
        micro_batch_tokens=request.micro_batch_tokens or 640,
        recompute=request.recompute,
        max_context=request.context,
        max_running=request.sequences,
        live_versions=max(1, request.live_versions - 1),
    )


def cpu_side(run: CpuRun) -> Side:
    """Every layer of the process at its peak, `runtime` with what imports take."""
    by_moment = moments(run)
    peak = max(by_moment, key=lambda name: sum(by_moment[name].values()))
    merged = dict(persistent_bytes(run))
    for part in (by_moment[peak], freed_bytes(run)):
        for name, n_bytes in part.items():
            merged[name] = merged.get(name, 0) + n_bytes
    source = f"tithe.models and tithe.trainer, buffer by buffer; the peak is {peak}"
    layers = [Layer(name, n_bytes, f"at the peak, {peak}", source) for name, n_bytes in merged.items()]
    known = "pinned versions on Linux; docs/planner.md"
    formula = f"{IMPORT_BYTES:,} + {PROCESS_BYTES:,} + {TOKENIZER_BYTES} × {run.spec.vocab_size:,} tokens"
    layers.append(Layer("runtime", IMPORT_BYTES + process_bytes(run), formula, known))
    return finish("all", 1, layers)


def process_bytes(run: CpuRun) -> int:
    """What a process holds beyond its imports and the model's buffers."""
    return PROCESS_BYTES + TOKENIZER_BYTES * run.spec.vocab_size


def freed_bytes(run: CpuRun) -> dict[str, int]:
    """Room of the engine's cast before the served one: freed only when the new one stood beside it, in pieces that are
    too small to be given back, it waits in glibc's heap for the next.

    Seen at rank 128 of the demo's model, whose cast has 81 MB: with MALLOC_MMAP_THRESHOLD_=262144, which keeps such
    pieces out of the heap, the peak is 110 MB lower."""
    return {"adapters": forward_adapter_bytes(run)}


def peak_after_imports(run: CpuRun) -> int:
    """Bytes of the peak beyond the resident size after imports: what `benchmarks/plan_vs_measured` measures."""
    return cpu_side(run).total_bytes - IMPORT_BYTES


def moments(run: CpuRun) -> dict[str, dict[str, int]]:
    """Moment → layer → bytes on top of what stays."""
    return {
        "sampling": sampling_bytes(run),
        "training": training_bytes(run),
        "stepping": stepping_bytes(run),
        "publishing": publishing_bytes(run),
    }


def live_tensor_bytes(run: CpuRun) -> int:
    """Bytes of all storages that are alive when a backward ends, the engine's own pages left out.

    Storage is what was asked for: rows that are never written count, and one layer's gradients have gone.
    """
    micro = Micro.of(run)
    slots = 1 if run.recompute else run.spec.n_layers
    asked = _engine_forward(run, run.max_running + run.prefill_tokens) - _engine_forward(run, _engine_rows(run))
    unwritten = untouched_bytes(run, run.max_running + run.prefill_tokens)
    unwritten += untouched_bytes(run, micro.rows, slots=slots)
    logits = 4 * run.spec.vocab_size * max(0, 64 - run.running)
    scored = micro.targets * run.spec.hidden_size * (4 + 4 + 4)
    moment = training_bytes(run)["gradients"] + kept_bytes(run, micro) + scored + micro.pages * _page_bytes(run)
    return sum(persistent_bytes(run).values()) + asked + unwritten + logits + moment


def persistent_bytes(run: CpuRun) -> dict[str, int]:
    """What stays through a run."""
    spec = run.spec
    tables = 4 * run.max_context * spec.rotary_dim  # cosines and sines of half the rotated dimensions
    parameters = adapter_numbers(run)
    return {
        "base": base_bytes(run) + tables,
        "masters": 4 * parameters,
        "optimizer": 8 * parameters,
        "adapters": run.live_versions * forward_adapter_bytes(run) + backward_adapter_bytes(run),
        "buffers": _engine_forward(run, _engine_rows(run)),
        "logits": 4 * spec.vocab_size * (run.running + min(CHUNK_ROWS, max(Micro.of(run).targets, 64))),
    }


def _engine_forward(run: CpuRun, rows: int) -> int:
    """The engine's forward, whose table has a slot for each running sequence and two for its prompts."""
    return forward_bytes(run, rows, longest=run.max_context, sequences=3 * run.max_running + 2)


def _engine_rows(run: CpuRun) -> int:
    """Rows of the fullest tick: prompts of a batch, and one of every live sequence."""
    return min(run.max_running + run.prefill_tokens, run.prompts * run.prompt + run.running)


def sampling_bytes(run: CpuRun) -> dict[str, int]:
    """Pages of the prompts and of the sequences that run at once."""
    prompts = -(-run.running // run.samples)
    own = -(-(run.prompt + run.new) // PAGE) - run.prompt // PAGE
    pages = prompts * -(-run.prompt // PAGE) + run.running * own
    return {"kv_cache": pages * _page_bytes(run)}


def _page_bytes(run: CpuRun) -> int:
    return PAGE * run.spec.n_layers * run.sizes.cached * run.operand_bytes


def training_bytes(run: CpuRun) -> dict[str, int]:
    """One micro-batch from its forward to the end of its backward, gradients of the batch so far included."""
    micro = Micro.of(run)
    moving = max(scoring_bytes(run, micro), backward_bytes(run, micro))
    idle = run.prompts * -(-run.prompt // PAGE)  # prompts stay cached
    return {
        "gradients": gradient_bytes(run),
        "activations": kept_bytes(run, micro) + moving,
        "kv_cache": (micro.pages + idle) * _page_bytes(run),
    }


def stepping_bytes(run: CpuRun) -> dict[str, int]:
    """Gradients are alive until the new masters are cast, and the old cast until the new one is."""
    return {"gradients": gradient_bytes(run), "adapters": backward_adapter_bytes(run)}


def publishing_bytes(run: CpuRun) -> dict[str, int]:
    """The published file's tensors in memory, read again by the engine, and one version more."""
    return {"buffers": 8 * published_numbers(run), "adapters": forward_adapter_bytes(run)}
