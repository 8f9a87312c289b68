"""Which memory model a request is for."""

from __future__ import annotations

from tithe.planner.cpu import cpu_run, cpu_side
from tithe.planner.full import plan_full_memory
from tithe.planner.hardware import CPU_NAME
from tithe.planner.host import HostPlan
from tithe.planner.memory import MemoryPlan, plan_adapter_memory
from tithe.planner.request import PlanRequest


def plan_memory(request: PlanRequest) -> MemoryPlan:
    """The memory of a request: of this project's process, of full-parameter training, or of an adapter's GPUs.

    `ModelError` when the base's format cannot hold a tensor.
    """
    if request.hardware.accelerator.name == CPU_NAME:
        return MemoryPlan(request, (cpu_side(cpu_run(request)),), HostPlan(()))
    if request.layout == "full":
        return plan_full_memory(request)
    return plan_adapter_memory(request)
