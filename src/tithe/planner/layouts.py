"""Which way of dividing the model to prefer: the fastest step among those that fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tithe.planner.factors import Factors
from tithe.planner.hardware import CPU_NAME
from tithe.planner.plans import plan_memory
from tithe.planner.request import PlanRequest
from tithe.planner.step import plan_step


def best_layout(request: PlanRequest, factors: Factors) -> str:
    """`shared/dp`, `shared/tp`, `separate/dp` or `separate/tp`; "none fits" when none does.

    By tokens per second; full-parameter training learns something else and is left to `tithe compare`.
    """
    speeds: dict[str, float] = {}
    for name, changed in _layouts(request):
        if plan_memory(changed).fits:
            speeds[name] = plan_step(changed, factors).total_s
    return min(speeds, key=lambda name: speeds[name]) if speeds else "none fits"


def _layouts(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    for layout in ("shared", "separate"):
        if layout == "separate" and (request.hardware.gpus < 2 or request.phase != "rl"):
            continue
        for attention in ("dp", "tp") if request.hardware.accelerator.name != CPU_NAME else ("dp",):
            tp = request.tp if attention == "tp" else 0
            yield f"{layout}/{attention}", replace(request, layout=layout, attention=attention, tp=tp)
