"""How many parameters an adapter has, and which of them every rank holds.

A pair of matrices of rank r on a linear (out, in) has r · (in + out) parameters (LoRA, arXiv 2106.09685). In a mixture

    per_expert     every expert has its own pair:                       E · r · (in + out) a layer and matrix
    shared_outer   the matrices at the width of the residual stream     r · outer + E · r · inner
                   (A of gate and up, B of down) are one for all

`shared_outer` is Tinker's convention for mixtures (tinker-cookbook, hyperparam_utils.py), whose published counts for
Kimi-K2 come out exactly. Sizes are read from `tithe.arch`; the names are those of `lora.target_modules`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, get_args

from tithe.arch import ArchSpec, TensorFamily, TensorGroup, tensor_families
from tithe.errors import ConfigError

ExpertLayout = Literal["per_expert", "shared_outer"]
EXPERT_LAYOUTS: Final[tuple[ExpertLayout, ...]] = get_args(ExpertLayout)

ALL_LINEAR: Final = "all-linear"
_GROUPS: Final[dict[str, tuple[TensorGroup, ...]]] = {
    "attention": (TensorGroup.ATTENTION,),
    "mlp": (TensorGroup.DENSE_MLP, TensorGroup.SHARED_EXPERT),
    "experts": (TensorGroup.ROUTED_EXPERTS,),
    ALL_LINEAR: (
        TensorGroup.ATTENTION,
        TensorGroup.DENSE_MLP,
        TensorGroup.SHARED_EXPERT,
        TensorGroup.ROUTED_EXPERTS,
    ),
}
"""Names for groups of linears; single ones go by the last part of their name, `lm_head` by its own."""

_NOT_TARGETED: Final = ("indexer.", "latent_")
"""Parts of names that groups leave out: an indexer only picks tokens, and a mixture's latent projections are the
model's own bottleneck."""


@dataclass(frozen=True)
class AdapterSize:
    """Parameters of one adapter.

    Example: Kimi-K2 at rank 32 on its attention is ``AdapterSize(replicated=122054656, per_expert=0, n_experts=384)``.
    """

    replicated: int
    """On every rank: whatever belongs to no single expert."""
    per_expert: int
    """Of one expert, over all layers."""
    n_experts: int
    places: int
    """Pairs of matrices."""

    @property
    def total(self) -> int:
        """Of the whole adapter, each once."""
        return self.replicated + self.per_expert * self.n_experts

    def on_rank(self, n_ranks: int) -> int:
        """Of the fullest of `n_ranks` that share the experts."""
        return self.replicated + self.per_expert * -(-self.n_experts // n_ranks)


NO_ADAPTER: Final = AdapterSize(0, 0, 0, 0)


def adapter_size(spec: ArchSpec, r: int, targets: Sequence[str], layout: ExpertLayout) -> AdapterSize:
    """The adapter's size. `ConfigError` names a target that the model lacks, with the nearest names."""
    if layout not in EXPERT_LAYOUTS:
        raise ConfigError(f"--lora-experts {layout}: one of {', '.join(EXPERT_LAYOUTS)} is needed", key="lora.experts")
    if r < 1:
        raise ConfigError(f"--lora-r {r}: a rank is a whole number of at least 1", key="lora.r")
    return _size(spec, r, tuple(targets), layout)


@lru_cache(maxsize=64)
def _size(spec: ArchSpec, r: int, targets: tuple[str, ...], layout: ExpertLayout) -> AdapterSize:
    replicated = per_expert = places = 0
    for family in targeted(spec, targets):
        out, width = family.one_expert
        layers = len(family.layers) or 1
        if not family.n_experts:
            replicated += layers * r * (out + width)
            places += layers
            continue
        outer, inner = _outer_inner(spec, out, width)
        places += layers * family.n_experts
        if layout == "per_expert":
            per_expert += layers * r * (out + width)
        else:
            per_expert += layers * r * inner
            replicated += layers * r * outer
    return AdapterSize(replicated, per_expert, spec.n_experts if per_expert else 0, places)


def _outer_inner(spec: ArchSpec, out: int, width: int) -> tuple[int, int]:
    """The side at the width of the residual stream, which experts may share, and the other."""
    stream = spec.mixture.latent_size or spec.hidden_size
    return (width, out) if width == stream else (out, width)


def targeted(spec: ArchSpec, targets: Iterable[str]) -> tuple[TensorFamily, ...]:
    """The families of linears that the targets name; a group may be empty, a name may not. `ConfigError` as above."""
    linears = [family for family in tensor_families(spec) if family.is_linear]
    names = {_last(family): family for family in linears}
    chosen: dict[str, TensorFamily] = {}
    for target in targets:
        groups = _GROUPS.get(target)
        found = [family for family in linears if _is_named(family, target, groups)]
        if not found and groups is None:
            near = difflib.get_close_matches(target, [*_GROUPS, *names], n=2, cutoff=0.5)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            known = ", ".join([*_GROUPS, *names])
            raise ConfigError(
                f"--lora-targets {target}: no linear of this model is called so.{hint} Known: {known}",
                key="lora.target_modules",
            )
        chosen |= {family.name: family for family in found}
    if not chosen:
        raise ConfigError("--lora-targets: this model has no linear of that kind", key="lora.target_modules")
    return tuple(chosen.values())


def _is_named(family: TensorFamily, target: str, groups: tuple[TensorGroup, ...] | None) -> bool:
    if groups is None:
        return _last(family) == target
    return family.group in groups and not any(part in family.name for part in _NOT_TARGETED)


def _last(family: TensorFamily) -> str:
    return family.name.removesuffix(".weight").rpartition(".")[2]
