"""The layers of memory on one GPU, each with its bytes, its formula and where the formula comes from.

    per_gpu_bytes   base + adapters + masters + gradients + optimizer + activations + logits + kv_cache + engine_copy
                    + reference + reward_model + critic + router_replay + buffers + runtime + fragmentation

A layer that a plan does not need has 0 bytes and stays in the list, so that plans can be compared key by key.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

LAYERS: Final = (
    "base",
    "adapters",
    "masters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "kv_cache",
    "engine_copy",
    "reference",
    "reward_model",
    "critic",
    "router_replay",
    "buffers",
    "runtime",
    "fragmentation",
)

RUNTIME_BYTES: Final = 3_758_096_384
"""CUDA context, kernels, libraries: `other_mem_bytes` of NVIDIA's aiconfigurator (systems/*.yaml at 095f58a)."""
COLLECTIVE_BYTES: Final = 411_041_792
"""NCCL's buffers for 8 GPUs, the largest of the same source; counted for any number of GPUs, so that a plan never
shrinks by taking fewer."""
FRAGMENTATION: Final = 0.05
"""Of what is allocated anew in every step. An assumption: a caching allocator rounds to 2 MB and cannot move blocks."""
PAGE_TOKENS: Final = 16
"""Tokens of one KV page (Tithe's `PAGE`, vLLM's default block)."""
PREFILL_TOKENS: Final = 8192
"""Tokens of one prefill launch (vLLM's `max_num_batched_tokens` with chunked prefill)."""

OFFLOAD_NEVER_BELOW: Final = 500_000_000
"""Trainable parameters below which optimizer state stays on the GPU: 12 bytes each are under 6 GB, and moving them
costs more than they free."""
OFFLOAD_ALWAYS_ABOVE: Final = 2_000_000_000
"""…and above which it goes to the host: 24 GB on every rank, against under a second over PCIe in a step of minutes."""


@dataclass(frozen=True)
class Layer:
    """One row of a memory plan."""

    name: str
    n_bytes: int
    formula: str
    """With the numbers that were put in."""
    source: str


@dataclass(frozen=True)
class Side:
    """What the fullest GPU of one side holds."""

    name: str
    """`all`, `train` or `rollout`."""
    gpus: int
    layers: tuple[Layer, ...]

    @property
    def total_bytes(self) -> int:
        """All layers."""
        return sum(layer.n_bytes for layer in self.layers)

    @property
    def by_layer(self) -> dict[str, int]:
        """Bytes by the names of `LAYERS`."""
        return {layer.name: layer.n_bytes for layer in self.layers}

    @property
    def binding(self) -> str:
        """The largest layer: where the bytes are."""
        return max(self.layers, key=lambda layer: layer.n_bytes).name


def complete(name: str, gpus: int, layers: Iterable[Layer], moving: frozenset[str] = frozenset()) -> Side:
    """A side with every layer in its order; `runtime` and `fragmentation` of the `moving` layers are added."""
    found = {layer.name: layer for layer in layers if layer.n_bytes}
    moved = sum(found[one].n_bytes for one in moving if one in found)
    runtime = f"{RUNTIME_BYTES:,} + {COLLECTIVE_BYTES:,} for collectives"
    found["runtime"] = Layer("runtime", RUNTIME_BYTES + COLLECTIVE_BYTES, runtime, "NVIDIA aiconfigurator 095f58a")
    lost = -(-moved * round(100 * FRAGMENTATION) // 100)
    share = f"{FRAGMENTATION:.0%} of {moved:,} bytes that are allocated anew"
    found["fragmentation"] = Layer("fragmentation", lost, share, "assumption")
    return finish(name, gpus, found.values())


def finish(name: str, gpus: int, layers: Iterable[Layer]) -> Side:
    """A side with every layer in its order; what is not given has 0 bytes."""
    found = {layer.name: layer for layer in layers}
    return Side(name, gpus, tuple(found.get(one, Layer(one, 0, "not needed", "")) for one in LAYERS))
