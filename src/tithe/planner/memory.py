"""Memory of one GPU by layer, and of one host, where an adapter is trained (`tithe.planner.plans` chooses).

shared     every GPU samples and trains on one base; the reference policy is the same base without an adapter
separate   some GPUs train, the others sample, each side with a base of its own
full       every parameter is trained (`tithe.planner.full`)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from tithe.arch import (
    EXCHANGE_PAIRS,
    ArchSpec,
    TensorGroup,
    exchange_bytes,
    find_target,
    make_base,
    sequence_bytes,
    tensor_families,
)
from tithe.planner.activations import training_bytes_per_token, widest_layer_bytes_per_token
from tithe.planner.hardware import Hardware
from tithe.planner.host import HostPlan, adapter_host
from tithe.planner.layers import (
    OFFLOAD_ALWAYS_ABOVE,
    OFFLOAD_NEVER_BELOW,
    PAGE_TOKENS,
    PREFILL_TOKENS,
    Layer,
    Side,
    complete,
)
from tithe.planner.parallel import Parallel, base_rank_bytes, divide, kv_ways, power_of_two, whole_bytes
from tithe.planner.request import KV_BYTES, TRAIN_SHARE, PlanRequest

CAST_BYTES: Final = 2
"""Of one published adapter parameter: BF16."""
MASTER_BYTES: Final = 4
GRADIENT_BYTES: Final = 4
MOMENT_BYTES: Final = 8
"""AdamW keeps two float32 moments of every parameter (arXiv 1711.05101)."""

_MOVING: Final = frozenset({"gradients", "activations", "logits", "buffers"})


@dataclass(frozen=True)
class MemoryPlan:
    """Both sides of a plan (one in a shared layout) and the host's."""

    request: PlanRequest
    sides: tuple[Side, ...]
    host: HostPlan

    @property
    def fullest(self) -> Side:
        """The side whose GPU holds most."""
        return max(self.sides, key=lambda side: side.total_bytes)

    @property
    def fits_gpu(self) -> bool:
        """Whether every GPU's bytes are within the budget."""
        return self.fullest.total_bytes <= self.request.gpu_budget_bytes

    @property
    def fits(self) -> bool:
        """Whether GPUs and hosts are within their budgets."""
        return self.fits_gpu and self.host.total_bytes <= self.request.host_bytes_per_node

    @property
    def binding_layer(self) -> str:
        """The largest layer of the fullest GPU, or `host` when only the host is too small."""
        return "host" if self.fits_gpu and not self.fits else self.fullest.binding


def plan_adapter_memory(request: PlanRequest) -> MemoryPlan:
    """The memory of an adapter's training and sampling, in the shared or the separate layout."""
    hardware, phase = request.hardware, request.phase
    if request.layout == "shared" or phase != "rl":
        sides = (_side(request, hardware, "all", trains=phase != "rollout", samples=phase != "train"),)
    else:
        n_train = train_gpus(hardware.gpus)
        train, rollout = hardware.with_gpus(n_train), hardware.with_gpus(hardware.gpus - n_train)
        sides = (
            _side(request, train, "train", trains=True, samples=False),
            _side(request, rollout, "rollout", trains=False, samples=True),
        )
    return MemoryPlan(request, sides, adapter_host(request, is_offloaded=offloads(request)))


def train_gpus(gpus: int) -> int:
    """The trainer's GPUs when sides are separate."""
    return max(1, int(gpus * TRAIN_SHARE))


def offloads(request: PlanRequest) -> bool:
    """Whether optimizer state leaves the GPU: as asked, or above 2 billion trainable parameters."""
    if request.phase == "rollout" or request.optimizer_device == "gpu":
        return False
    if request.optimizer_device == "auto":
        return request.adapter.total > OFFLOAD_ALWAYS_ABOVE
    return True


def offload_advice(trainable: int) -> str:
    """The rule, in words, for so many trainable parameters."""
    if trainable < OFFLOAD_NEVER_BELOW:
        return "below 0.5B trainable parameters optimizer state stays on the GPU: it is small, and moving it costs time"
    if trainable > OFFLOAD_ALWAYS_ABOVE:
        return "above 2B trainable parameters optimizer state goes to the host: it frees more than its transfer costs"
    return "between 0.5B and 2B trainable parameters offloading optimizer state pays only when memory binds"


def _side(request: PlanRequest, hardware: Hardware, name: str, *, trains: bool, samples: bool) -> Side:
    parallel = divide(request, hardware)
    layers = [_base_layer(request, parallel), *_adapter_layers(request, parallel, trains=trains)]
    if trains:
        layers += _training_layers(request, parallel)
    if samples:
        layers.append(kv_layer(request, parallel))
    layers += [_buffer_layer(request, parallel, trains=trains, samples=samples), *_other_models(request, hardware)]
    return complete(name, hardware.gpus, layers, _MOVING)


def _base_layer(request: PlanRequest, parallel: Parallel) -> Layer:
    n_bytes = base_rank_bytes(request.spec, request.base, parallel)
    whole = whole_bytes(request.spec, request.base)
    how = "each matrix split" if parallel.uses_tp else "experts divided, the rest whole"
    formula = f"{request.base.name}: {whole:,} bytes on {parallel.ranks} ranks, {how}"
    return Layer("base", n_bytes, formula, "tithe.arch, the loader's own account")


def _adapter_layers(request: PlanRequest, parallel: Parallel, *, trains: bool) -> list[Layer]:
    size = request.adapter
    held = size.on_rank(parallel.ranks)
    versions = request.live_versions
    formula = f"{held:,} parameters on a rank × {CAST_BYTES} bytes × {versions} live versions"
    layers = [Layer("adapters", held * CAST_BYTES * versions, formula, "LoRA r·(in + out), arXiv 2106.09685")]
    if not trains:
        return layers
    fp32 = "AdamW in float32 (arXiv 1711.05101): master 4, gradient 4, two moments 8 bytes"
    layers.append(Layer("gradients", held * GRADIENT_BYTES, f"{held:,} × {GRADIENT_BYTES} bytes", fp32))
    if offloads(request):
        away = Layer("masters", 0, "on the host", fp32), Layer("optimizer", 0, "on the host", fp32)
        return [*layers, *away]
    layers.append(Layer("masters", held * MASTER_BYTES, f"{held:,} × {MASTER_BYTES} bytes", fp32))
    layers.append(Layer("optimizer", held * MOMENT_BYTES, f"{held:,} × {MOMENT_BYTES} bytes", fp32))
    return layers


def _training_layers(request: PlanRequest, parallel: Parallel) -> list[Layer]:
    spec, tokens, ways = request.spec, request.micro_tokens, parallel.ways
    per_token = training_bytes_per_token(spec, request.lora_r, recompute=request.recompute)
    kept = "recomputation" if request.recompute else "every layer kept"
    formula = f"{tokens:,} tokens × {per_token:,} bytes ({kept}) ÷ {ways}"
    source = "arXiv 2205.05198 section 4, counted for this architecture"
    activations = Layer("activations", -(-tokens * per_token // ways), formula, source)
    return [activations, logits_layer(request, ways), *_replay_layer(request)]


def logits_layer(request: PlanRequest, ways: int) -> Layer:
    """A chunk of logits and its gradient in float32."""
    rows, vocab = min(request.logits_rows, request.micro_tokens), request.spec.vocab_size
    formula = f"{rows:,} rows × {vocab:,} tokens × 8 bytes ÷ {ways}"
    return Layer("logits", -(-rows * vocab * 8 // ways), formula, "chunked head: logits and their gradient in float32")


def _replay_layer(request: PlanRequest) -> list[Layer]:
    """int32 ids of the experts that the sampler took, of one micro-batch."""
    if not request.router_replay or not request.spec.is_moe:
        return []
    choices = len(request.spec.moe_layers) * request.spec.n_experts_per_token
    n_bytes = request.micro_tokens * choices * 4
    formula = f"{request.micro_tokens:,} tokens × {choices} choices × 4 bytes"
    return [Layer("router_replay", n_bytes, formula, "routing replay (R3), arXiv 2510.11370")]


def kv_layer(request: PlanRequest, parallel: Parallel) -> Layer:
    """Pages of the live sequences of the fullest rank, all at the longest context."""
    sequences, spec = parallel.share(request.sequences), request.spec
    tokens = -(-request.context // PAGE_TOKENS) * PAGE_TOKENS
    whole = sequence_bytes(spec, tokens, KV_BYTES[request.kv_dtype], is_windowed=request.windowed_kv)
    ways = kv_ways(spec, parallel)
    per_sequence = -(-whole // ways)
    formula = f"{sequences:,} sequences × {tokens:,} tokens: {whole:,} bytes each ÷ {ways}"
    return Layer("kv_cache", sequences * per_sequence, formula, "2·L·Hkv·D bytes a token; latent attention L·(C + R)")


def _buffer_layer(request: PlanRequest, parallel: Parallel, *, trains: bool, samples: bool) -> Layer:
    """One expanded matrix, a prefill's layer, an adapter on its way in or out, a round of the experts' exchange."""
    spec = request.spec
    expanded = 2 * largest_matrix(spec)
    staged = request.adapter.on_rank(parallel.ranks) * CAST_BYTES
    prefill = min(PREFILL_TOKENS, request.context * parallel.share(request.sequences)) if samples else 0
    rows = -(-prefill * widest_layer_bytes_per_token(spec, request.lora_r) // parallel.ways)
    sampled = parallel.share(request.sequences) * spec.vocab_size * 4 // parallel.ways if samples else 0
    exchanged = _exchanged_bytes(spec, parallel, trains=trains)
    formula = (
        f"one matrix expanded to BF16 {expanded:,} + adapter staged {staged * (1 + trains):,} + prefill of "
        f"{prefill:,} tokens {rows:,} + sampled logits {sampled:,} + a round of the exchange {exchanged:,}"
    )
    n_bytes = expanded + staged * (1 + trains) + rows + sampled + exchanged
    return Layer("buffers", n_bytes, formula, "Tithe's engine, publisher and exchange")


def _exchanged_bytes(spec: ArchSpec, parallel: Parallel, *, trains: bool) -> int:
    """What a round of the exchange holds on a rank that has a part of the experts (`tithe.arch.exchange_bytes`).

    Counted for the power of two below: rounds are whole rows, so that a rank more may fill them better, and a plan
    never shrinks by taking fewer GPUs. Beyond a row for every rank, the bound of a round, nothing is added.
    """
    if parallel.uses_tp or parallel.ranks == 1 or not spec.is_moe:
        return 0
    per_token = spec.n_experts_per_token
    ranks = power_of_two(max(1, min(parallel.ranks, EXCHANGE_PAIRS // per_token)))
    width = spec.mixture.latent_size or spec.hidden_size
    return exchange_bytes(width, per_token, ranks, CAST_BYTES, training=trains)


@lru_cache(maxsize=16)
def largest_matrix(spec: ArchSpec) -> int:
    """Elements of the largest linear that is expanded at once, an expert's or a dense one; the head goes in blocks."""
    linears = (f for f in tensor_families(spec) if f.is_linear and f.group is not TensorGroup.HEAD)
    return max(math.prod(family.one_expert) for family in linears)


def _other_models(request: PlanRequest, hardware: Hardware) -> list[Layer]:
    """Reference, reward model and critic."""
    layers = []
    if request.reference:
        layers.append(Layer("reference", 0, "0: the same base without its adapter", "shared base"))
    if request.reward_model:
        config = find_target(request.reward_model).config
        judged = replace(request, spec=ArchSpec.from_config(config), base=make_base("bf16", config), tp=0)
        n_bytes = base_rank_bytes(judged.spec, judged.base, divide(judged, hardware))
        layers.append(
            Layer("reward_model", n_bytes, f"{request.reward_model} in BF16, divided as the base", "tithe.arch")
        )
    if request.critic == "head" and request.phase != "rollout":
        n_bytes = 16 * (request.spec.hidden_size + 1)
        layers.append(Layer("critic", n_bytes, "a value head on the shared base: (H + 1) × 16 bytes", "value head"))
    elif request.critic == "full" and request.phase != "rollout":
        held = request.adapter.on_rank(divide(request, hardware).ranks)
        layers.append(
            Layer("critic", 18 * held, f"an adapter of its own: {held:,} × 18 bytes", "second adapter, same base")
        )
    return layers
