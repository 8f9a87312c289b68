"""Two ways to the same end: an adapter on one low-bit base, and every parameter trained on many machines.

    A   `--hardware`, one base in `--base`, an adapter; the reference policy is the base itself
    B   `--against`, or the fewest of A's cards that hold it, in whole machines: weights, gradients and AdamW state of
        every parameter divided over all cards, the engine's copy beside it

Same model, context, batch and live sequences. What differs in what is learned is said, not computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from tithe.errors import ConfigError
from tithe.planner.answer import Plan, as_json, make_plan
from tithe.planner.answers import fewest_gpus
from tithe.planner.hardware import Hardware
from tithe.planner.page import ratios
from tithe.planner.request import PlanRequest, make_request

GPU_HOURS_PER_FAILURE: Final = 16_384 * 54 * 24 / 419
"""419 unexpected interruptions in 54 days on 16,384 H100 (Llama 3, arXiv 2407.21783, section 3.3.4): one in 50,676
GPU-hours. Cards fail alike wherever they are; a run stops when any of them does."""

CLAIM: Final = 10.0
"""What the name promises: so many times fewer GPUs."""

_FULL_BASE: Final = "bf16"
"""What an engine beside full-parameter training serves."""


def mean_hours_between_failures(gpus: int) -> float:
    """Of a run on so many cards.

    >>> round(mean_hours_between_failures(1024))
    49
    """
    return GPU_HOURS_PER_FAILURE / gpus


def compare(
    model: str, hardware: str, against: str = "", *, with_fewest: bool = False, **options: Any
) -> dict[str, Any]:
    """Both plans side by side, their ratios and a recommendation. `UserError`s name the option that is wrong.

    `with_fewest`: A too on the fewest of its cards on which it fits.
    """
    first = make_request(model, hardware, **options | {"layout": "shared"})
    fewest = fewest_gpus(first) if with_fewest else None
    if fewest is not None:
        first = replace(first, hardware=first.hardware.with_gpus(fewest), tp=0)
    full: dict[str, Any] = {"base": _FULL_BASE, "layout": "full", "tp": 0, "attention": "auto"}
    other = make_request(model, against or hardware, **options | full)
    if not against:
        whole = _whole_nodes(other)
        if whole is None:
            raise ConfigError("no number of these cards holds the full-parameter plan; name larger ones with --against")
        other = replace(other, hardware=whole)
    a, b = make_plan(first), make_plan(other)
    answer = {"model": first.model, "a": _side(a), "b": _side(b), **_ratios(a, b)}
    answer["recommendation"] = _recommend(a, b)
    answer["conditions"] = list(_conditions(a, b))
    answer["assumptions"] = list(dict.fromkeys([*as_json(a)["assumptions"], *as_json(b)["assumptions"]]))
    answer["assumptions"].append(
        f"one failure in {GPU_HOURS_PER_FAILURE:,.0f} GPU-hours (Llama 3, arXiv 2407.21783), the same for both"
    )
    return answer


def _whole_nodes(request: PlanRequest) -> Hardware | None:
    """The fewest cards on which a plan fits, whole machines where it takes more than one; None when none do."""
    per_node = request.hardware.accelerator.gpus_per_node
    fewest = fewest_gpus(request)
    if fewest is None:
        return None
    return request.hardware.with_gpus(-(-fewest // per_node) * per_node if fewest > per_node else fewest)


_KEYS: Final = (
    "hardware", "base", "layout", "gpus", "nodes", "total_hbm_bytes", "per_gpu_bytes", "per_gpu_total_bytes",
    "gpu_budget_bytes", "fits", "binding_layer", "fewest_gpus", "step_seconds", "step_total_seconds", "tok_per_s",
    "usd_per_hour", "usd_per_step", "usd_per_run", "run_hours", "host_bytes",
)  # fmt: skip


def _side(plan: Plan) -> dict[str, Any]:
    answer = as_json(plan)
    side = {key: answer[key] for key in _KEYS}
    trained = plan.request.adapter.total if plan.request.layout != "full" else answer["total_params"]
    hours = mean_hours_between_failures(side["gpus"])
    return side | {
        "trained_params": trained,
        "mean_hours_between_failures": hours,
        "failures_expected_in_run": side["run_hours"] / hours,
    }


def _ratios(a: Plan, b: Plan) -> dict[str, Any]:
    """B over A: how many times more the full-parameter plan takes."""
    first, second = a.request.hardware, b.request.hardware
    needed = _whole_nodes(b.request)
    needed_ratio = (second if needed is None else needed).gpus / first.gpus
    return {
        "gpus_ratio": second.gpus / first.gpus,
        "fewest_gpus_ratio": needed_ratio,
        "total_hbm_ratio": second.total_hbm_bytes / first.total_hbm_bytes,
        "usd_per_step_ratio": _ratio(a.money.usd_per_step, b.money.usd_per_step),
        "step_seconds_ratio": b.time.total_s / a.time.total_s,
        "claim_holds": needed_ratio >= CLAIM and a.memory.fits,
    }


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else b / a


def _recommend(a: Plan, b: Plan) -> str:
    if not a.memory.fits and not b.memory.fits:
        return "neither: both need more memory than given"
    if not a.memory.fits:
        return "B: the adapter's plan does not fit"
    if any(one.level == "wrong tool" for one in a.advice):
        return "B: an adapter on a shared base is the wrong tool here"
    if not b.memory.fits:
        return "A: the full-parameter plan does not fit"
    ratio = _ratio(a.money.usd_per_step, b.money.usd_per_step)
    saved = b.request.hardware.gpus - a.request.hardware.gpus
    cards = "it takes fewer cards" if saved > 0 else "it takes no more cards" if saved == 0 else "it fits"
    if ratio is None:
        return f"A: {cards}; what they cost is not known"
    if ratio < 1 and saved <= 0:
        return "B: it takes no more cards, and each step costs less"
    return f"A: {cards}" + (" and costs less per step" if ratio >= 1 else ", though each step costs more")


def _conditions(a: Plan, b: Plan) -> Iterator[str]:
    yield (
        "A when the reward teaches a skill the base nearly has (reasoning, format, tool use): reinforcement learning "
        "gives about one bit an episode, and low rank has matched full training on such tasks (LoRA Without Regret)"
    )
    yield "B when new knowledge or a new language must go in, or the adapter would have to be merged into a 4-bit base"
    if a.time.total_s > b.time.total_s:
        times = a.time.total_s / b.time.total_s
        yield f"A takes {times:.1f} times as long per step: fewer cards do the same work; B if wall time counts most"
    for one in a.advice:
        if one.level != "note":
            yield f"{one.level} for A: {one.text}"


def as_text(answer: dict[str, Any]) -> str:
    """Both sides in one table."""
    return "\n".join(_lines(answer))


def rows(answer: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(what, A's, B's) for people."""
    a, b = answer["a"], answer["b"]
    for label, key, scale, unit in (
        ("hardware", "hardware", 0, ""),
        ("base", "base", 0, ""),
        ("GPUs", "gpus", 1, ""),
        ("total HBM", "total_hbm_bytes", 1e12, " TB"),
        ("of a GPU's memory", "per_gpu_total_bytes", 1e9, " GB"),
        ("fits", "fits", 0, ""),
        ("trained parameters", "trained_params", 1e6, "M"),
        ("step", "step_total_seconds", 1, " s"),
        ("rent", "usd_per_hour", 1, " $/h"),
        ("a step costs", "usd_per_step", 1, " $"),
        ("the run costs", "usd_per_run", 1, " $"),
        ("hours between failures", "mean_hours_between_failures", 1, " h"),
        ("failures in the run", "failures_expected_in_run", 1, ""),
    ):
        yield label, _cell(a[key], scale, unit), _cell(b[key], scale, unit)


def _lines(answer: dict[str, Any]) -> Iterator[str]:
    yield f"{answer['model']}: A adapter on one low-bit base, B every parameter"
    yield ""
    yield f"{'':<28}{'A':>22}{'B':>22}"
    yield from (f"{label:<28}{first:>22}{second:>22}" for label, first, second in rows(answer))
    yield ""
    yield ratios(answer)
    yield f"recommended: {answer['recommendation']}"
    yield from (f"  - {one}" for one in answer["conditions"])
    yield ""
    yield "assumed:"
    yield from (f"  - {one}" for one in answer["assumptions"])


def _cell(value: Any, scale: float, unit: str) -> str:
    if value is None:
        return "unknown"
    if not scale:
        return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)
    return f"{value / scale:,.0f}{unit}" if isinstance(value, int) and scale == 1 else f"{value / scale:,.2f}{unit}"


def markdown(answers: list[dict[str, Any]]) -> str:
    """README's table: one row a model, GPU count and total HBM of both, and where the tenth does not hold."""
    lines = [
        "| model | A: GPUs | A: HBM | B: GPUs | B: HBM | GPUs B ÷ A | HBM B ÷ A | a tenth |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for one in answers:
        a, b = one["a"], one["b"]
        lines.append(
            f"| {one['model']} | {a['hardware']} {a['base']} | {a['total_hbm_bytes'] / 1e12:.2f} TB | {b['hardware']} "
            f"| {b['total_hbm_bytes'] / 1e12:.2f} TB | {one['gpus_ratio']:.1f} | {one['total_hbm_ratio']:.1f} "
            f"| {'yes' if one['claim_holds'] else 'no'} |"
        )
    return "\n".join(lines)
