"""Bytes of what stays through a run: the base as it lies in memory, and an adapter in each of its layouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Final

from tithe.arch import ArchSpec, Base, StoredFormat, TensorFormat, tensor_families
from tithe.planner.cpu_run import CpuRun, Site, panels, place_of, turned

_PACKED: Final = frozenset({"Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"})
"""GGUF formats that stay packed in memory; compound ones do too."""
_JOINED: Final = frozenset({"qkv", "gate_up"})
"""Places whose linears are one matrix where their formats agree, so that its rows are padded once."""


def base_bytes(run: CpuRun) -> int:
    """The base as it lies in memory: panels of 48 rows, the file's own bytes where kernels read them; norms and biases
    are float32."""
    return _base_bytes(run.spec, run.base, run.base_bytes, run.is_packed)


@lru_cache(maxsize=16)
def _base_bytes(spec: ArchSpec, base: Base, number_bytes: int, is_packed: bool) -> int:
    vectors = sum(4 * f.n_parameters for f in tensor_families(spec) if len(f.one_expert) == 1)
    matrices = _matrices(spec, base)
    return vectors + sum(
        n * _matrix_bytes(kind, shape, number_bytes, is_packed=is_packed) for kind, shape, n in matrices
    )


def _matrices(spec: ArchSpec, base: Base) -> Iterator[tuple[StoredFormat, tuple[int, int], int]]:
    """(format, (rows, columns), copies) of every matrix in memory, joined ones together."""
    joined: dict[tuple[object, ...], tuple[StoredFormat, tuple[int, int], int]] = {}
    for family in tensor_families(spec):
        if len(family.one_expert) == 1:
            continue
        rows, columns = family.one_expert
        for layer in family.layers or (None,):
            stored = base.format_of(family.member(layer, 0 if family.is_per_expert else None))
            key = (family.name, layer) if place_of(family) not in _JOINED else (family.group, place_of(family), layer)
            before = joined.get((*key, stored.kind), (stored, (0, columns), max(1, family.n_experts)))
            joined[*key, stored.kind] = stored, (before[1][0] + rows, columns), before[2]
    yield from joined.values()


def _matrix_bytes(stored: StoredFormat, shape: tuple[int, int], number_bytes: int, *, is_packed: bool) -> int:
    rows, columns = panels(shape[0]), shape[1]
    if not is_packed or not (stored.kind.is_compound or stored.kind.value in _PACKED):
        return rows * columns * number_bytes
    return rows * columns if stored.kind is TensorFormat.FP8_BLOCK else stored.n_bytes((rows, columns))


def adapter_numbers(run: CpuRun) -> int:
    """Trainable parameters."""
    return sum(site.numbers(run.lora_r) for site in run.sites)


def published_numbers(run: CpuRun) -> int:
    """Of a version's file, where what experts share is written for each of them."""
    repeated = (replace(site, shares_a=False, shares_b=False) for site in run.sites)
    return sum(site.numbers(run.lora_r) for site in repeated)


def gradient_bytes(run: CpuRun) -> int:
    """float32 sums of a batch, ranks made even."""
    return sum(4 * site.numbers(run.rank) for site in run.sites)


def forward_adapter_bytes(run: CpuRun) -> int:
    """One version as the forward reads it: A of a place stacked [Σr, in], B of each linear [out, r], in panels; the
    matrices of a bank of experts are one tall one."""
    total = 0
    stacks: dict[tuple[str, str, int], list[Site]] = {}
    for site in run.sites:
        total += len(site.layers) * panels(site.n_b * site.out) * run.rank
        for layer in site.layers:
            stacks.setdefault((site.bank, site.place, layer), []).append(site)
    total += sum(panels(s[0].n_a * len(s) * run.rank) * s[0].columns for s in stacks.values())
    return total * run.operand_bytes


def backward_adapter_bytes(run: CpuRun) -> int:
    """The trainer's own cast: the forward's, and both matrices of linears transposed. Experts' are read as they lie."""
    linears = [s for s in run.sites if s.experts == 0]
    r = run.lora_r
    total = sum(len(s.layers) * (turned(r, s.columns) + turned(s.out, r)) for s in linears)
    return forward_adapter_bytes(run) + total * run.operand_bytes
