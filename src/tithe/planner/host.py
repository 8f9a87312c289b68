"""Memory of one machine beside its GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tithe.planner.layers import Layer
from tithe.planner.request import PlanRequest

PROCESS_BYTES: Final = 6_000_000_000
"""One process with torch and CUDA, its libraries and pinned staging. An assumption; processes that hold no weights
were seen at 17 GB before and 5 to 6 GB after tuning (published_runs.json, miles-k3)."""
LOADING_BYTES: Final = 5_000_000_000
"""One safetensors shard per rank while loading: shards of published checkpoints have 4 to 5 GB."""
STREAMED_BYTES: Final = 2_000_000_000
"""Of optimizer state on its way from NVMe and back."""
ROLLOUT_BYTES_PER_TOKEN: Final = 24
"""Token id 4, two log-probs 8, version 8, mask and position 4 bytes."""


@dataclass(frozen=True)
class HostPlan:
    """What the fullest machine holds, by part."""

    parts: tuple[Layer, ...]

    @property
    def total_bytes(self) -> int:
        """All parts."""
        return sum(part.n_bytes for part in self.parts)


def adapter_host(request: PlanRequest, *, is_offloaded: bool) -> HostPlan:
    """The host of a run that trains an adapter."""
    return HostPlan((*common_parts(request), _optimizer(request, is_offloaded=is_offloaded)))


def common_parts(request: PlanRequest) -> list[Layer]:
    """Processes, loading, rollouts and replayed choices: of every layout."""
    on_node = request.hardware.gpus_on_node
    spec, batch = request.spec, request.batch if request.phase != "rollout" else 0
    rows = 2 * batch * (request.prompt_tokens + request.new_tokens)
    choices = len(spec.moe_layers) * spec.n_experts_per_token if request.router_replay else 0
    return [
        Layer("processes", on_node * PROCESS_BYTES, f"{on_node} × {PROCESS_BYTES:,}", "assumption"),
        Layer("loading", on_node * LOADING_BYTES, f"{on_node} × one shard of {LOADING_BYTES:,}", "published shards"),
        Layer(
            "rollouts", rows * ROLLOUT_BYTES_PER_TOKEN, f"{rows:,} tokens × {ROLLOUT_BYTES_PER_TOKEN}", "two batches"
        ),
        Layer("router_replay", rows * choices * 4, f"{rows:,} tokens × {choices} choices × 4", "arXiv 2510.11370"),
    ]


def _optimizer(request: PlanRequest, *, is_offloaded: bool) -> Layer:
    """The experts' once over all machines, the rest on one rank of each."""
    size, nodes = request.adapter, request.hardware.nodes
    held = size.replicated + size.per_expert * -(-size.n_experts // nodes) if is_offloaded else 0
    return optimizer_part(request, held)


def optimizer_part(request: PlanRequest, held: int) -> Layer:
    """Masters and moments of so many parameters, 12 bytes each; of what lies on NVMe, what streams through."""
    if request.optimizer_device == "nvme":
        streamed = f"NVMe, streamed through at most {STREAMED_BYTES:,}"
        return Layer("optimizer", min(held * 12, STREAMED_BYTES), streamed, "assumption")
    return Layer("optimizer", held * 12, f"{held:,} parameters × 12 bytes", "masters 4, moments 8")
