"""Questions about a plan: what frees bytes, what would make it fit, how few GPUs, how long, how many.

Every answer is found by planning again with one thing changed, so that it can never disagree with the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from tithe.arch import make_base
from tithe.planner.hardware import CPU_NAME, MAX_GPUS
from tithe.planner.memory import offloads
from tithe.planner.parallel import whole_bytes
from tithe.planner.plans import plan_memory
from tithe.planner.request import KV_BYTES, PlanRequest

MAX_CONTEXT: Final = 16 * 2**20
MAX_SEQUENCES: Final = 2**20


@dataclass(frozen=True)
class Suggestion:
    """One change, what it frees on the fullest GPU, and whether it is enough."""

    change: str
    option: str
    """What to write on the command line."""
    freed_bytes_per_gpu: int
    fits: bool
    costs: str
    """What is given up."""


def suggestions(request: PlanRequest) -> tuple[Suggestion, ...]:
    """Single changes that free bytes on the fullest GPU, most bytes first."""
    before = plan_memory(request).fullest.total_bytes
    found: list[Suggestion] = []
    for change, option, costs, changes in _candidates(request):
        after = plan_memory(replace(request, **changes))
        freed = before - after.fullest.total_bytes
        if freed > 0:
            found.append(Suggestion(change, option, freed, after.fits, costs))
    return tuple(sorted(found, key=lambda one: -one.freed_bytes_per_gpu))


def smallest_change(found: tuple[Suggestion, ...]) -> Suggestion | None:
    """Of the changes that make a plan fit, the one that frees least; None when no single one is enough."""
    enough = [one for one in found if one.fits]
    return min(enough, key=lambda one: one.freed_bytes_per_gpu) if enough else None


Candidate = tuple[str, str, str, dict[str, Any]]


def _candidates(request: PlanRequest) -> Iterator[Candidate]:
    yield from _base_candidates(request)
    if request.phase != "rollout":
        yield from _training_candidates(request)
    yield from _adapter_candidates(request)
    if request.phase != "train":
        yield from _cache_candidates(request)
    if request.context > 1024:
        half = {"context": request.context // 2, "prompt": request.prompt // 2, "new": request.new // 2}
        yield "half the context", f"--context {request.context // 2}", "rollouts are cut earlier", half
    if request.hardware.accelerator.name == CPU_NAME:
        return
    gpus = request.hardware.gpus
    if gpus * 2 <= MAX_GPUS:
        bigger = request.hardware.with_gpus(gpus * 2)
        yield "twice the GPUs", f"--hardware {bigger.name}", "twice the rent per hour", {"hardware": bigger}
    if request.layout == "shared" and not request.uses_tp:
        yield (
            "divide attention too",
            "--attention tp",
            "ranks exchange activations in every layer; no bitwise certificate",
            {"attention": "tp"},
        )
    if request.layout == "shared" and request.phase == "rl" and gpus > 1:
        separate = {"layout": "separate"}
        yield (
            "separate sides",
            "--layout separate",
            "a second copy of the base; a quarter of the GPUs only trains",
            separate,
        )


def _base_candidates(request: PlanRequest) -> Iterator[Candidate]:
    held = whole_bytes(request.spec, request.base)
    for name in ("fp8", "nvfp4", "int4", "mxfp4"):
        base = make_base(name, request.config)
        try:
            smaller = whole_bytes(request.spec, base) < held
        except ValueError:
            continue
        if smaller:
            yield f"base in {name}", f"--base {name}", "needs a release in that format, or quantizing", {"base": base}


def _training_candidates(request: PlanRequest) -> Iterator[Candidate]:
    if not request.recompute:
        costs = "one more forward per update"
        yield "recompute activations", "--recompute", costs, {"recompute": True}
    if request.micro_tokens > request.context:
        tokens = {"micro_batch_tokens": request.context}
        yield "one sequence a micro-batch", f"--micro-batch-tokens {request.context}", "smaller products", tokens
    if request.logits_rows > 256:
        yield "fewer rows of logits at once", "--logits-rows 256", "more, smaller products", {"logits_rows": 256}
    if not offloads(request) and request.optimizer_device != "host":
        host = {"optimizer_device": "host"}
        yield "optimizer state on the host", "--optimizer-device host", "its transfer in every step", host


def _adapter_candidates(request: PlanRequest) -> Iterator[Candidate]:
    if request.layout == "full":
        adapter = {"layout": "shared"}
        yield "train an adapter on a shared base", "--layout shared", "see the advice on adapters", adapter
        return
    if request.lora_targets != ("attention",):
        attention = {"lora_targets": ("attention",)}
        yield "adapter on attention only", "--lora-targets attention", "less capacity", attention
    if request.spec.is_moe and request.lora_experts == "per_expert":
        outer = {"lora_experts": "shared_outer"}
        yield "share the experts' outer matrices", "--lora-experts shared_outer", "less capacity per expert", outer
    if request.lora_r > 1:
        half = request.lora_r // 2
        yield "half the rank", f"--lora-r {half}", "less capacity", {"lora_r": half}
    if request.live_versions > 1:
        yield "one live version", "--live-versions 1", "sampling pauses at every publish", {"live_versions": 1}


def _cache_candidates(request: PlanRequest) -> Iterator[Candidate]:
    if KV_BYTES[request.kv_dtype] > 1:
        yield "cache in FP8", "--kv-dtype fp8", "sampler and trainer differ by the rounding", {"kv_dtype": "fp8"}
    if request.spec.window.layers and not request.windowed_kv:
        windowed = {"windowed_kv": True}
        yield "cache only what windows see", "--windowed-kv", "an engine with a cache for each kind of layer", windowed
    if request.sequences > 1:
        half = request.sequences // 2
        yield "half the live sequences", f"--sequences {half}", "fewer tokens per second", {"sequences": half}


def fewest_gpus(request: PlanRequest) -> int | None:
    """The least number of these cards on which the plan fits; None when no number does.

    More GPUs never need more memory each, so that halving the interval finds it.
    """
    if request.hardware.accelerator.name == CPU_NAME:
        return 1 if plan_memory(request).fits else None

    def fits(gpus: int) -> bool:
        if request.layout == "separate" and gpus < 2:
            return False
        # A fixed --tp would refuse other numbers: the fewest GPUs may divide matrices otherwise.
        return plan_memory(replace(request, hardware=request.hardware.with_gpus(gpus), tp=0, attention=how)).fits_gpu

    how = "tp" if request.uses_tp else "dp"
    return _least(fits, MAX_GPUS)


def longest_context(request: PlanRequest) -> int:
    """The longest context with everything else unchanged; 0 when none fits."""

    def too_long(tokens: int) -> bool:
        return not plan_memory(replace(request, context=tokens, prompt=0, new=0)).fits

    least = _least(too_long, MAX_CONTEXT)
    return MAX_CONTEXT if least is None else least - 1


def most_sequences(request: PlanRequest) -> int:
    """The most live sequences with everything else unchanged; 0 when not even one fits."""

    def too_many(count: int) -> bool:
        return not plan_memory(replace(request, sequences=count)).fits

    least = _least(too_many, MAX_SEQUENCES)
    return MAX_SEQUENCES if least is None else least - 1


def _least(holds: Callable[[int], bool], limit: int) -> int | None:
    """The least number from 1 to `limit` for which a property holds that never ceases once it holds."""
    low, high = 0, 1
    while high <= limit and not holds(high):
        low, high = high, high * 2
    if high > limit:
        if low >= limit or not holds(limit):
            return None
        high = limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
