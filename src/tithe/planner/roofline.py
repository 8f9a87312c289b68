"""Seconds of each piece of work: the slower of arithmetic and memory traffic, divided by an efficiency factor.

    decode      bytes of weights and cache read per tick ÷ (HBM · factor), plus a fixed cost per layer
    prefill     2 · A FLOPs a token, A the active parameters without embedding, plus attention
    training    LoRA 4 · A (forward 2, gradient of inputs 2), every parameter 6 · A; recomputation 2 · A more
    publish     bytes ÷ (network · factor) + a fixed cost

arXiv 2211.05102 gives the decode side, arXiv 2204.02311 (appendix B) the FLOPs of training.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tithe.arch import ArchSpec, TensorGroup, account, attended_bytes, make_base, tensor_families
from tithe.planner.costs import StepCosts
from tithe.planner.factors import Factors
from tithe.planner.full import engine_ranks
from tithe.planner.hardware import Accelerator, Hardware
from tithe.planner.memory import CAST_BYTES
from tithe.planner.parallel import Parallel, divide, kv_ways, rank_bytes_by_group
from tithe.planner.request import KV_BYTES, PlanRequest

PACKED_TOKENS: Final = 16384
"""Of a micro-batch at least, unless a number is asked for: short sequences are packed and share its fixed time. The
shortest of the runs that `train_micro_s` is fitted on."""


@dataclass(frozen=True)
class Work:
    """FLOPs of one token of a model."""

    active: int
    """Parameters that a token passes, the embedding left out: looking up a row is no product."""
    attention: tuple[tuple[int, int], ...]
    """(FLOPs for each position that a token attends to, positions that it sees at most, 0 for all) of the layers."""

    def attend(self, mean_positions: float) -> float:
        """Of one token's attention where tokens follow so many positions on average."""
        return sum(per_position * _seen(mean_positions, most) for per_position, most in self.attention)

    def forward(self, mean_positions: float) -> float:
        """Of one token that follows so many positions."""
        return 2.0 * self.active + self.attend(mean_positions)


def _seen(mean_positions: float, most: int) -> float:
    """Positions that are seen on average of sequences twice as long as the mean: min(position, most)."""
    length = 2.0 * mean_positions
    return most - most**2 / (2.0 * length) if most and length > most else mean_positions


def work_of(spec: ArchSpec) -> Work:
    """Scores and weighted values cost 2 FLOPs for each number of a head; linear attention is in `active` alone."""
    routed = sum(f.n_parameters for f in tensor_families(spec) if f.group is TensorGroup.ROUTED_EXPERTS)
    idle = routed - routed * spec.n_experts_per_token // spec.n_experts if routed else 0
    total = sum(f.n_parameters for f in tensor_families(spec) if f.group is not TensorGroup.EMBEDDING)
    head = spec.vocab_size * spec.hidden_size if spec.tie_word_embeddings else 0
    return Work(total - idle + head, tuple(_attention_work(spec)))


def _attention_work(spec: ArchSpec) -> Iterator[tuple[int, int]]:
    per_layer = 2 * spec.n_heads * (spec.head_dim + (spec.latent.v_head_dim if spec.latent else spec.head_dim))
    picked = max((other.picked for other in spec.others), default=0)
    windowed = set(spec.window.layers).intersection(spec.own_attention)
    yield per_layer * (len(spec.own_attention) - len(windowed)), picked
    yield per_layer * len(windowed), spec.window.size
    for other in spec.others:
        widths = {name: (out, width) for name, out, width in other.linears}
        if other.cached_per_token:  # grouped attention under other sizes
            yield 2 * (widths["q_proj"][0] + widths["o_proj"][1]) * len(other.layers), other.window
        if other.picked:  # every query of an indexer meets every key
            yield 2 * widths["indexer.wq_b"][0] * len(other.layers), 0


def step_costs(request: PlanRequest, factors: Factors, hardware: Hardware, n_train: int) -> StepCosts:
    """Costs of one replica that samples on `hardware` and of a trainer on `n_train` GPUs of the same kind."""
    parallel = sampling_parallel(request, hardware)
    card, spec = hardware.accelerator, request.spec
    groups = rank_bytes_by_group(spec, request.base, parallel)
    experts = groups.pop(TensorGroup.ROUTED_EXPERTS, 0)
    if not spec.tie_word_embeddings:
        groups.pop(TensorGroup.EMBEDDING, 0)  # a tick looks up a row for each sequence
    bandwidth = card.hbm_bytes_per_s
    work = work_of(spec)
    replica_gpus = parallel.ranks
    peak = replica_gpus * flop_per_s(request, card)
    held = max(1, request.prompt_tokens + request.new_tokens // 2)
    cached = attended_bytes(spec, held, KV_BYTES[request.kv_dtype]) / held
    spread = kv_ways(spec, parallel) if parallel.uses_tp else parallel.ranks
    prefill = factors.prefill_flops_moe if spec.is_moe else factors.prefill_flops_dense
    own = 1 if parallel.uses_tp else parallel.ranks  # ranks that each schedule their own sequences
    return StepCosts(
        prefill_s_per_token=work.forward(request.prompt_tokens / 2) / (peak * prefill),
        decode_fixed_s=_fixed_s(spec, factors, parallel, card),
        decode_dense_s=sum(groups.values()) / (bandwidth * factors.hbm_dense),
        decode_experts_s=experts / (bandwidth * factors.hbm_experts),
        n_experts=spec.n_experts,
        experts_per_token=spec.n_experts_per_token,
        decode_s_per_sequence=2.0 * work.active / (peak * factors.decode_flops),
        decode_exposed_s_per_sequence=spec.n_layers * factors.decode_layer_sequence_s / own,
        decode_s_per_cached_token=cached / spread / (bandwidth * factors.hbm_cache),
        train_s_per_token=train_s_per_token(request, factors, hardware.with_gpus(n_train)),
        publish_s=publish_s(request, factors, hardware),
        reward_s_per_rollout=request.reward_s,
    )


def _fixed_s(spec: ArchSpec, factors: Factors, parallel: Parallel, card: Accelerator) -> float:
    """Of a tick whatever its rows: launches, exchanges within a machine and between machines, indexers."""
    layer = factors.decode_layer_s
    if parallel.ranks > 1:
        layer += factors.decode_collective_s
    layer += factors.decode_collective_node_s * (-(-parallel.ranks // card.gpus_per_node) - 1)  # hops of a ring
    indexed = sum(len(one.layers) for one in spec.others if one.index_bytes_per_token)
    return spec.n_layers * layer + indexed * factors.decode_indexer_s


def flop_per_s(request: PlanRequest, card: Accelerator) -> float:
    """A card's peak in the format that its products of this base run in; weights alone at 4 bits (INT4) run in BF16."""
    name = request.base.name
    if name in ("nvfp4", "mxfp4"):
        return card.fp4_flop_per_s or card.bf16_flop_per_s
    return (card.fp8_flop_per_s if name == "fp8" else None) or card.bf16_flop_per_s


def sampling_parallel(request: PlanRequest, hardware: Hardware) -> Parallel:
    """How the engine divides the model: as planned, or, beside full-parameter training, by matrices."""
    if request.layout != "full":
        return divide(request, hardware)
    ranks = min(engine_ranks(request), hardware.gpus)
    return Parallel(uses_tp=True, ranks=ranks, replicas=hardware.gpus // ranks)


def train_flops_per_token(request: PlanRequest) -> tuple[float, float]:
    """(of linears, of attention) for one trained token, recomputation and a scored reference included.

    Attention's backward is twice its forward; a linear's is its forward once more, and again when it is trained. A
    full-parameter step of reinforcement learning scores the policy too: its engine's log-probs are another program's
    (NeMo-RL counts the phase in its step time, docs/about/performance-summary.md; verl's `compute_log_prob`).
    """
    work, mean = work_of(request.spec), (request.prompt_tokens + request.new_tokens) / 2
    passes = 3 if request.layout == "full" else 2
    scores_policy = request.layout == "full" and request.phase == "rl"
    forwards = int(request.recompute) + int(request.reference) + int(scores_policy)
    return 2.0 * work.active * (passes + forwards), work.attend(mean) * (3 + forwards)


def train_s_per_token(request: PlanRequest, factors: Factors, hardware: Hardware) -> float:
    """Seconds that all training GPUs together take for one token, each on micro-batches of its own."""
    share = factors.train_flops_moe if request.spec.is_moe else factors.train_flops_dense
    linears, attention = train_flops_per_token(request)
    peak = hardware.gpus * hardware.accelerator.bf16_flop_per_s
    micro = request.micro_batch_tokens or max(request.context, PACKED_TOKENS)
    overhead = factors.train_micro_s / (micro * hardware.gpus)
    return (linears / share + attention / factors.train_flops_attention) / peak + overhead


def publish_bytes(request: PlanRequest) -> int:
    """What a new version sends: the adapter's cast, or every weight in BF16."""
    if request.layout == "full":
        return account(request.spec, make_base("bf16", request.config)).total.n_bytes
    return request.adapter.total * CAST_BYTES


def publish_s(request: PlanRequest, factors: Factors, hardware: Hardware) -> float:
    """One publish: over the links inside a node, over the network between nodes."""
    card = hardware.accelerator
    is_inside = hardware.nodes == 1 and request.layout != "full"
    bandwidth = card.link_bytes_per_s if is_inside else card.scaleout_bytes_per_s
    return factors.publish_fixed_s + publish_bytes(request) / (bandwidth * factors.publish_bandwidth)
