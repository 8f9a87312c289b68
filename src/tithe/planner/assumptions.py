"""What every plan takes for granted, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from tithe.planner.cpu import IMPORT_BYTES, cpu_run, process_bytes
from tithe.planner.hardware import CPU_NAME
from tithe.planner.layers import COLLECTIVE_BYTES, FRAGMENTATION, PAGE_TOKENS, PREFILL_TOKENS, RUNTIME_BYTES
from tithe.planner.request import TRAIN_SHARE, PlanRequest

_RATES: Final = {"sampling": "decode_flops", "training": "train_flops_attention"}
"""What has a speed of its own, and a factor that every calibration of it replaces."""


def not_measured(calibrated: Mapping[str, str]) -> tuple[str, ...]:
    """What of a step goes at a rate that no run has measured, by the factors that a run replaced."""
    return tuple(name for name, factor in _RATES.items() if factor not in calibrated)


def assumptions(request: PlanRequest, calibrated: Mapping[str, str] | None = None) -> Iterator[str]:
    """One sentence each; only those that touch the request. `calibrated`: what a run replaced, and which."""
    if request.hardware.accelerator.name == CPU_NAME:
        yield from _on_processors(request, calibrated or {})
        return
    yield (
        f"{RUNTIME_BYTES:,} bytes of CUDA context and libraries and {COLLECTIVE_BYTES:,} bytes of collective buffers "
        f"on every GPU (NVIDIA aiconfigurator); the whole of the card's memory is the budget"
    )
    yield f"{FRAGMENTATION:.0%} of what each step allocates anew is lost to fragmentation"
    yield "prices are rents seen in public on the date beside them; reward workers' CPUs, storage and egress are free"
    if request.phase != "train":
        yield (
            f"all {request.sequences:,} live sequences are as long as the context at once; pages hold {PAGE_TOKENS} "
            f"tokens; no prompt is shared; a prefill has at most {PREFILL_TOKENS:,} tokens"
        )
        yield f"lengths are lognormal, σ = {request.length_sigma:.2f} (0.99: a 99th percentile of ten times the median)"
        if not request.windowed_kv and (request.spec.window.layers or any(one.window for one in request.spec.others)):
            yield "pages hold every layer, also those that look through a window, as in Tithe's engine"
    if request.phase != "rollout":
        yield "residual stream, norms, softmax and logits in float32, operands of products in two bytes"
        yield (
            f"one micro-batch of {request.micro_tokens:,} tokens on each rank at a time"
            + (", activations recomputed layer by layer" if request.recompute else ", activations of all layers kept")
        )
    if request.spec.is_moe:
        yield "experts are chosen evenly and independently; skewed routing reads fewer and loads ranks unevenly"
    if request.layout == "separate" and request.phase == "rl":
        yield f"{TRAIN_SHARE:.0%} of the GPUs train, the others sample (AReaL); the slower side decides"
    if request.layout == "full":
        yield "training state is divided over all GPUs; the engine's copy sleeps on the host while training"
    if request.layout == "shared" and request.phase == "rl":
        yield "sampling and training take turns on one compute lane; waiting for rewards is not hidden"
    if request.spec.n_mtp_layers:
        yield f"{request.spec.n_mtp_layers} layer(s) for predicting further tokens are not loaded and not counted"
    if request.reference:
        yield "a reference policy is scored once per trained token"
    if request.reward_model or request.critic != "none":
        yield "reward models and critics are counted in memory alone; their time is what --reward-s says"


def _on_processors(request: PlanRequest, calibrated: Mapping[str, str]) -> Iterator[str]:
    """A plan counts this project's own process there, buffer by buffer."""
    run = cpu_run(request)
    yield (
        f"{IMPORT_BYTES:,} bytes after imports and {process_bytes(run):,} of kernels, tokenizer and arenas, of the "
        f"pinned versions on Linux; {run.threads} threads"
    )
    yield (
        f"batches of {run.rollouts:,} rollouts, {run.samples} to a prompt, each as long as the mean; micro-batches of "
        f"{run.micro_batch_tokens:,} tokens; {run.live_versions + 1} published adapters at once"
    )
    yield "activations " + ("recomputed layer by layer" if run.recompute else "of all layers kept")
    nominal = not_measured(calibrated)
    if nominal:
        what = "speed" if len(nominal) == 2 else f"speed of {nominal[0]}"
        yield f"{what} is nominal, a tenth of a teraflop per second: calibrate it with a run (--calibrate)"
    for name, factor in _RATES.items():
        if factor in calibrated:
            yield f"speed of {name} as in {calibrated[factor]}"
    yield "the reference policy is the base without its adapter, scored micro-batch by micro-batch"
