"""Full-parameter training, the expensive alternative: state divided over all GPUs, an engine's copy beside it.

16 bytes a parameter (ZeRO, arXiv 1910.02054, section 3.1): weights 2 and gradients 2 in BF16, float32 master 4, two
moments 8, divided over all GPUs (FSDP, tensor, pipeline and expert parallelism together). Training and sampling take
turns on the same GPUs: the engine's copy and its cache are asleep on the host while the trainer's activations live, as
in colocated verl and NeMo-RL.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import Final

from tithe.arch import ArchSpec, TensorGroup, tensor_families
from tithe.planner.activations import training_bytes_per_token
from tithe.planner.host import HostPlan, common_parts, optimizer_part
from tithe.planner.layers import Layer, Side, complete
from tithe.planner.memory import MemoryPlan, kv_layer, logits_layer
from tithe.planner.parallel import Parallel, whole_bytes
from tithe.planner.request import PlanRequest

STATE_BYTES: Final = {"masters": 4, "gradients": 2, "optimizer": 8}
WEIGHT_BYTES: Final = 2


def training_state_bytes(parameters: int) -> int:
    """Weights, gradients, master and two moments of so many trained parameters.

    >>> training_state_bytes(10**12), training_state_bytes(2 * 10**9)
    (16000000000000, 32000000000)
    """
    return parameters * (WEIGHT_BYTES + sum(STATE_BYTES.values()))


def plan_full_memory(request: PlanRequest) -> MemoryPlan:
    """Memory when every parameter is trained. At the worse of the two moments, training and sampling."""
    spec, gpus = request.spec, request.hardware.gpus
    parameters = sum(family.n_parameters for family in tensor_families(spec))
    source = "ZeRO, arXiv 1910.02054: 16 bytes a parameter"
    held = -(-parameters // gpus)
    is_away = request.optimizer_device in ("host", "nvme")
    trains, samples = request.phase != "rollout", request.phase != "train"
    state = [Layer("base", held * WEIGHT_BYTES, f"{parameters:,} × {WEIGHT_BYTES} bytes ÷ {gpus}", source)]
    for name, size in STATE_BYTES.items():
        kept = 0 if is_away and name != "gradients" else held * size
        state.append(Layer(name, kept, f"{parameters:,} × {size} bytes ÷ {gpus}", source))
    if request.reference:
        n_bytes = held * WEIGHT_BYTES
        state.append(
            Layer("reference", n_bytes, f"a second copy in BF16 ÷ {gpus}", "frozen copy, divided like the rest")
        )
    sides = []
    if trains:
        sides.append(_side(gpus, [*state, *_training(request)]))
    if samples:
        sides.append(_side(gpus, [*(state if trains else ()), *_sampling(request, held_base=trains)]))
    return MemoryPlan(request, (max(sides, key=lambda side: side.total_bytes),), _host(request, parameters, is_away))


def engine_ranks(request: PlanRequest) -> int:
    """GPUs of one engine replica: those over which the copy takes at most half of each, a power of two."""
    copy = whole_bytes(request.spec, request.base)
    ranks = 1
    while ranks < 4096 and copy / ranks > request.gpu_budget_bytes / 2:
        ranks *= 2
    return ranks


def _side(gpus: int, layers: list[Layer]) -> Side:
    return complete("all", gpus, layers, frozenset({"activations", "logits", "buffers"}))


def _training(request: PlanRequest) -> list[Layer]:
    """One micro-batch on every group of eight GPUs that divide a sequence, or fewer where there are fewer."""
    ways = min(8, request.hardware.gpus)
    per_token = training_bytes_per_token(request.spec, 0, recompute=request.recompute)
    tokens = request.micro_tokens
    formula = f"{tokens:,} tokens × {per_token:,} bytes ÷ {ways}"
    layer = gathered_parameters(request.spec, request.hardware.gpus)
    gathered = 3 * WEIGHT_BYTES * layer
    return [
        Layer("activations", -(-tokens * per_token // ways), formula, "arXiv 2205.05198, sequence and tensor parallel"),
        logits_layer(request, ways),
        Layer("buffers", gathered, f"two layers and the gradients of one, gathered in BF16: 3 × {layer:,} × 2 bytes",
              "FSDP prefetches one layer, and reduces the gradients of whole ones"),
    ]  # fmt: skip


@lru_cache(maxsize=64)
def gathered_parameters(spec: ArchSpec, expert_ranks: int) -> int:
    """Of the largest layer as it is put together to be computed, its experts divided among so many ranks."""
    held: Counter[int] = Counter()
    for family in tensor_families(spec):
        one = family.n_parameters // max(1, len(family.layers))
        if family.group is TensorGroup.ROUTED_EXPERTS:
            one = one // spec.n_experts * -(-spec.n_experts // expert_ranks)
        held.update(dict.fromkeys(family.layers, one))
    return max(held.values())


def _sampling(request: PlanRequest, *, held_base: bool) -> list[Layer]:
    ranks = min(engine_ranks(request), request.hardware.gpus)
    parallel = Parallel(uses_tp=True, ranks=ranks, replicas=request.hardware.gpus // ranks)
    copy = whole_bytes(request.spec, request.base)
    n_bytes = -(-copy // ranks)
    formula = f"the engine's copy in {request.base.name}: {copy:,} ÷ {ranks}"
    name = "engine_copy" if held_base else "base"
    return [Layer(name, n_bytes, formula, "engine copy"), kv_layer(request, parallel)]


def _host(request: PlanRequest, parameters: int, is_away: bool) -> HostPlan:
    """The engine's copy sleeps where its GPUs are, each GPU's share beside it: nothing is shared by replicas."""
    hardware, parts = request.hardware, common_parts(request)
    if request.phase == "rl":
        copy, on_node = whole_bytes(request.spec, request.base), hardware.gpus_on_node
        ranks = min(engine_ranks(request), hardware.gpus)
        formula = f"{copy:,} bytes of the engine's copy ÷ {ranks} × {on_node} GPUs"
        parts.append(Layer("engine_asleep", -(-copy * on_node // ranks), formula, "sleep mode"))
    if is_away and request.phase != "rollout":
        held = -(-parameters // hardware.nodes)
        parts.append(optimizer_part(request, held))
    return HostPlan(tuple(parts))
