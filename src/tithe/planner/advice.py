"""Rules with reasons: when an adapter, or this design, is the wrong tool, and what hardware is too little."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from tithe.arch import ArchSpec, tensor_families
from tithe.planner.hardware import CPU_NAME, Hardware
from tithe.planner.memory import offload_advice
from tithe.planner.parallel import rank_bytes_by_group
from tithe.planner.request import PlanRequest
from tithe.planner.roofline import sampling_parallel

Level = Literal["wrong tool", "caution", "note"]

LONG_CONTEXT: Final = 131_072
DENSE_TRILLION: Final = 500_000_000_000
MAX_TICK_READ_S: Final = 0.1


@dataclass(frozen=True)
class Advice:
    """One rule that applies."""

    level: Level
    text: str
    reason: str


def advise(request: PlanRequest, nominal: Sequence[str] = ("sampling", "training")) -> tuple[Advice, ...]:
    """Everything that applies to a request, gravest first. `nominal`: what no run has measured the speed of."""
    found = [*_purpose(request), *_shape(request), *_hardware(request, nominal), *_memory(request)]
    order: tuple[Level, ...] = ("wrong tool", "caution", "note")
    return tuple(sorted(found, key=lambda one: order.index(one.level)))


def _purpose(request: PlanRequest) -> Iterator[Advice]:
    """What an adapter cannot be trained for, whatever the hardware."""
    if request.layout == "full" or request.phase == "rollout":
        return
    yield Advice(
        "note",
        "to put new knowledge in (new language, domain facts), train every parameter or continue pre-training",
        "a low-rank change falls behind once the data's information exceeds its parameters; RL gives about one bit an "
        "episode and stays far below (LoRA Without Regret, Thinking Machines 2025)",
    )
    yield Advice(
        "note",
        "for safety alignment, test the base's refusals after training, and again with the adapter taken off",
        "an adapter that can be taken off takes its refusals with it, and fine-tuning adapters is known to erode the "
        "base's (arXiv 2310.20624)",
    )


def _shape(request: PlanRequest) -> Iterator[Advice]:
    spec = request.spec
    parameters = sum(family.n_parameters for family in tensor_families(spec))
    if not spec.is_moe and parameters >= DENSE_TRILLION:
        yield Advice(
            "wrong tool",
            f"a dense model of {parameters / 1e9:,.0f}B parameters does not profit from this design",
            "every token reads and multiplies every weight: sampling and training are bound by arithmetic, which low "
            "bits do not make less; the saving is in models of which a token passes a small part",
        )
    if request.context > spec.max_position_embeddings:
        yield Advice(
            "caution",
            f"a context of {request.context:,} tokens is more than the {spec.max_position_embeddings:,} that the model "
            "was made for",
            "positions beyond max_position_embeddings of its config were never trained",
        )
    if request.context > LONG_CONTEXT and request.layout != "full":
        yield Advice(
            "wrong tool" if request.context > 8 * LONG_CONTEXT else "caution",
            f"a context of {request.context:,} tokens needs context parallelism in training, which Tithe has not",
            "one rank holds all activations of a sequence; multi-node trainers divide the sequence itself",
        )


def _hardware(request: PlanRequest, nominal: Sequence[str]) -> Iterator[Advice]:
    hardware = request.hardware
    yield from _bounds(request.spec, request, hardware)
    measured = hardware.accelerator.name == CPU_NAME and not nominal
    if hardware.accelerator.unverified and not measured:
        yield Advice("caution", f"figures of {hardware.accelerator.name} are not all backed by a vendor's sheet",
                     hardware.accelerator.unverified)  # fmt: skip


def _bounds(spec: ArchSpec, request: PlanRequest, hardware: Hardware) -> Iterator[Advice]:
    """Least memory, bandwidth and links."""
    card = hardware.accelerator
    parallel = sampling_parallel(request, hardware)
    place = "machine" if card.name == CPU_NAME else "card"
    base = sum(rank_bytes_by_group(spec, request.base, parallel).values())
    if base > card.mem_bytes:
        yield Advice(
            "wrong tool",
            f"the base alone, {base / 1e9:,.1f} GB on a rank, is more than a {place}'s {card.mem_bytes / 1e9:,.1f} GB",
            f"what is read for every token must lie in the {place}'s memory",
        )
    read_s = base / card.hbm_bytes_per_s
    if read_s > MAX_TICK_READ_S:
        yield Advice(
            "caution",
            f"reading a rank's base once takes {read_s * 1e3:,.0f} ms: sampling is slow whatever else is done",
            f"a tick of many sequences reads nearly all of it; below {1e3 * MAX_TICK_READ_S:.0f} ms is usable",
        )
    if hardware.gpus > 1 and not card.has_nvlink and (spec.is_moe or request.uses_tp):
        yield Advice(
            "caution",
            f"{card.name} has no NVLink: exchanges of {'experts' if spec.is_moe else 'matrix parts'} go over PCIe",
            "two exchanges a layer of every token's hidden state; 200 GB/s keep them under a tenth of a tick",
        )


def _memory(request: PlanRequest) -> Iterator[Advice]:
    on_cards = request.hardware.accelerator.name != CPU_NAME
    if on_cards and request.layout != "full" and request.phase != "rollout":
        yield Advice(
            "note", offload_advice(request.adapter.total), "16 bytes a trainable parameter, 12 of them movable"
        )
    if request.layout == "shared" and request.spec.is_moe and request.hardware.nodes > 1:
        yield Advice(
            "caution",
            "experts are divided over machines: their exchanges leave NVLink",
            "one node with larger cards or a lower-bit base keeps them inside",
        )
