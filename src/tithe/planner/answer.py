"""What `tithe plan` answers: one flat JSON object with units in its names, and a table for people.

The schema is docs/planner.md; keys are only ever added.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from tithe.arch import account, kv_bytes_per_token
from tithe.planner.advice import Advice, advise
from tithe.planner.answers import Suggestion, fewest_gpus, longest_context, most_sequences, smallest_change, suggestions
from tithe.planner.assumptions import assumptions, not_measured
from tithe.planner.factors import DEFAULTS, SOURCES, Factors
from tithe.planner.layouts import best_layout
from tithe.planner.memory import MemoryPlan
from tithe.planner.money import Money, price
from tithe.planner.plans import plan_memory
from tithe.planner.request import PlanRequest
from tithe.planner.step import StepTime, plan_step
from tithe.planner.words import is_processor, words_of

SCHEMA: Final = 1
GIB: Final = 2**30


@dataclass(frozen=True)
class Plan:
    """A request with everything that was worked out for it."""

    request: PlanRequest
    memory: MemoryPlan
    time: StepTime
    money: Money
    suggestions: tuple[Suggestion, ...]
    advice: tuple[Advice, ...]
    factors: Factors
    calibrated: dict[str, str]
    """Factors that a run replaced, and by what."""

    @property
    def tok_per_s(self) -> float:
        """Sampled tokens per second of the phase; trained tokens for `train`."""
        if self.request.phase == "train":
            return 1.0 / self.time.costs.train_s_per_token
        return self.time.sampled_tokens / self.time.total_s


def make_plan(
    request: PlanRequest,
    *,
    factors: Factors = DEFAULTS,
    calibrated: dict[str, str] | None = None,
    tok_per_s: float = 0.0,
) -> Plan:
    """Memory, time, money, suggestions and advice of a request. Raises as its parts do."""
    memory, time = plan_memory(request), plan_step(request, factors, tok_per_s=tok_per_s)
    return Plan(
        request=request,
        memory=memory,
        time=time,
        money=price(request.hardware, time, request.steps),
        suggestions=suggestions(request),
        advice=advise(request, nominal=not_measured(calibrated or {})),
        factors=factors,
        calibrated=calibrated or {},
    )


def as_json(plan: Plan) -> dict[str, Any]:
    """JSON's own types, every key with its unit; bytes are decimal, seconds are wall time."""
    request, memory, time, money = plan.request, plan.memory, plan.time, plan.money
    sums = account(request.spec, request.base)
    side = memory.fullest
    smallest = smallest_change(plan.suggestions)
    return {
        "schema": SCHEMA,
        "model": request.model,
        "hardware": request.hardware.name,
        "base": request.base.name,
        "phase": request.phase,
        "layout": request.layout,
        "total_params": sums.total.parameters,
        "active_params": sums.active_parameters,
        "checkpoint_bytes": sums.total.n_bytes,
        "adapter_params": request.adapter.total if request.layout != "full" else 0,
        "kv_bytes_per_token": kv_bytes_per_token(request.spec, 1 if request.kv_dtype == "fp8" else 2),
        "context_tokens": request.context,
        "prompt_tokens": request.prompt_tokens,
        "new_tokens": request.new_tokens,
        "live_sequences": request.sequences,
        "batch_rollouts": request.batch,
        "per_gpu_bytes": side.by_layer,
        "per_gpu_total_bytes": side.total_bytes,
        "gpu_budget_bytes": request.gpu_budget_bytes,
        "sides": [
            {"name": one.name, "gpus": one.gpus, "per_gpu_bytes": one.by_layer, "per_gpu_total_bytes": one.total_bytes}
            for one in memory.sides
        ],
        "host_bytes": memory.host.total_bytes,
        "host_bytes_by_part": {part.name: part.n_bytes for part in memory.host.parts},
        "host_budget_bytes": request.host_bytes_per_node,
        "fits": memory.fits,
        "binding_layer": memory.binding_layer,
        "formulas": {one.name: {"formula": one.formula, "source": one.source} for one in side.layers},
        "suggestions": [asdict(one) for one in plan.suggestions],
        "smallest_change": asdict(smallest) if smallest and not memory.fits else None,
        "gpus": request.hardware.gpus,
        "nodes": request.hardware.nodes,
        "total_hbm_bytes": request.hardware.total_hbm_bytes,
        "fewest_gpus": fewest_gpus(request),
        "longest_context_tokens": longest_context(request),
        "most_live_sequences": most_sequences(request),
        "best_layout": best_layout(request, plan.factors),
        "step_seconds": time.parts,
        "step_total_seconds": time.total_s,
        "run_steps": request.steps,
        "run_hours": time.total_s * request.steps / 3600,
        "tok_per_s": plan.tok_per_s,
        "decode_tok_per_s": time.decode_tok_per_s,
        "costs": asdict(time.costs),
        **asdict(money),
        "factors": {
            name: {"value": value, "source": plan.calibrated.get(name, SOURCES[name])}
            for name, value in asdict(plan.factors).items()
        },
        "advice": [asdict(one) for one in plan.advice],
        "assumptions": list(assumptions(request, plan.calibrated)),
    }


def as_text(answer: dict[str, Any]) -> str:
    """The same for people."""
    return "\n".join(
        [*_head(answer), "", *_memory(answer), "", *_time(answer), "", *_questions(answer), *_words(answer)]
    )


def _head(a: dict[str, Any]) -> Iterator[str]:
    yield f"{a['model']} on {a['hardware']}: {a['phase']}, {a['layout']} layout, base {a['base']}"
    yield (
        f"{a['total_params'] / 1e9:,.1f}B parameters, {a['active_params'] / 1e9:,.1f}B active; "
        f"{a['checkpoint_bytes'] / 1e9:,.1f} GB; adapter {a['adapter_params'] / 1e6:,.1f}M; "
        f"KV {a['kv_bytes_per_token']:,} bytes a token"
    )


def _memory(a: dict[str, Any]) -> Iterator[str]:
    yield f"{words_of(a).memory:<28}{'bytes':>18}{'GB':>9}  formula"
    for name, n_bytes in a["per_gpu_bytes"].items():
        if n_bytes:
            formula = a["formulas"][name]["formula"]
            yield f"  {name.replace('_', ' '):<26}{n_bytes:>18,}{n_bytes / 1e9:>9.2f}  {formula}"
    total, budget = a["per_gpu_total_bytes"], a["gpu_budget_bytes"]
    yield f"  {'total':<26}{total:>18,}{total / 1e9:>9.2f}  of {budget:,} ({total / budget:.1%})"
    verdict = "fits" if a["fits"] else f"does NOT fit; most of it is {a['binding_layer'].replace('_', ' ')}"
    if is_processor(a):
        yield f"{verdict}: one process, {budget / 1e9:,.1f} GB of memory"
        return
    yield f"  {'host, of each machine':<26}{a['host_bytes']:>18,}{a['host_bytes'] / 1e9:>9.2f}"
    yield f"{verdict}: {a['gpus']} GPUs, {a['total_hbm_bytes'] / 1e12:.2f} TB of HBM together"


def _time(a: dict[str, Any]) -> Iterator[str]:
    parts = ", ".join(f"{name} {seconds:,.1f}" for name, seconds in a["step_seconds"].items() if seconds)
    yield f"step {a['step_total_seconds']:,.1f} s: {parts}; {a['tok_per_s']:,.0f} tokens/s"
    if a["usd_per_hour"] is None:
        yield words_of(a).no_price
        return
    low, high = a["usd_per_hour_range"]
    per_million = a["usd_per_million_sampled_tokens"]
    yield (
        f"{a['usd_per_hour']:,.2f} $/h ({low:,.2f} to {high:,.2f}, {a['date'].rstrip('.')}; "
        f"¥{a['cny_per_hour']:,.0f}/h), {a['usd_per_step']:,.2f} $ a step, "
        f"{a['usd_per_run']:,.0f} $ for {a['run_steps']} steps"
        + ("" if per_million is None else f", {per_million:,.2f} $ per million sampled tokens")
    )


def _questions(a: dict[str, Any]) -> Iterator[str]:
    number = "no number of these GPUs is enough" if a["fewest_gpus"] is None else f"{a['fewest_gpus']}"
    fewest = "" if is_processor(a) else f"fewest GPUs {number}; "
    yield (
        f"{fewest}longest context {a['longest_context_tokens']:,}; "
        f"most live sequences {a['most_live_sequences']:,}; best layout {a['best_layout']}"
    )
    if a["smallest_change"] is not None:
        one = a["smallest_change"]
        yield f"smallest change that makes it fit: {one['change']} ({one['option']})"
    yield ""
    yield words_of(a).frees
    for one in a["suggestions"][:8]:
        mark = "fits" if one["fits"] else ""
        freed = one["freed_bytes_per_gpu"] / 1e9
        yield f"  {freed:>9.2f} GB  {one['change']:<38} {one['option']:<34} {mark:<5} {one['costs']}"


def _words(a: dict[str, Any]) -> Iterator[str]:
    yield ""
    for one in a["advice"]:
        yield f"{one['level']}: {one['text']} ({one['reason']})"
    yield ""
    yield "assumed:"
    for one in a["assumptions"]:
        yield f"  - {one}"
