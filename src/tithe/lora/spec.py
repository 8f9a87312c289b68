"""What an adapter is: rank, scale, and the linears it sits on. No torch here.

Module paths are the model's canonical names, e.g. ``model.layers.0.self_attn.q_proj``. A target matches a module the
way PEFT matches it: it is the whole path or a dotted suffix of it.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tithe.errors import AdapterError

ALL_LINEAR = "all-linear"
PEFT_PREFIX = "base_model.model."

_Number = TypeVar("_Number", int, float)

# PEFT's all-linear leaves out the output layer; an adapter on an embedding has another form (no matrix product).
_NOT_IN_ALL_LINEAR = frozenset({"lm_head", "embed_tokens", "wte", "embed_out", "output"})


@dataclass(frozen=True)
class LoraSpec:
    """An adapter's hyper-parameters; the tensors live beside it.

    `r` is the rank, `alpha` the numerator of the scale, `dropout` the probability on the adapter's input in training,
    `target_modules` names or paths (or ``("all-linear",)``). The scale of a module is alpha / r, or alpha / √r with
    `use_rslora`. `rank_pattern` and `alpha_pattern` give single modules another rank or alpha: the first key that
    matches wins; a key is a dotted suffix, or with a leading ``^`` the whole path.

    Raises `AdapterError` for values that make no adapter.

    >>> spec = LoraSpec(r=4, alpha=16, target_modules=("q_proj",))
    >>> spec.scale("model.layers.0.self_attn.q_proj")
    4.0
    >>> LoraSpec(r=4, alpha=16, target_modules=("q_proj",), use_rslora=True).scale("model.layers.0.self_attn.q_proj")
    8.0
    """

    r: int
    alpha: float
    dropout: float = 0.0
    target_modules: tuple[str, ...] = (ALL_LINEAR,)
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict, hash=False)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for where, rank in {"r": self.r, **self.rank_pattern}.items():
            if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise AdapterError(f"rank {where} is {rank!r}; a rank is a whole number of at least 1")
        for where, alpha in {"alpha": self.alpha, **self.alpha_pattern}.items():
            if not math.isfinite(alpha) or alpha <= 0:
                raise AdapterError(f"scale {where} is {alpha!r}; it must be a finite number above 0")
        if not 0 <= self.dropout < 1:
            raise AdapterError(f"dropout is {self.dropout!r}; it must be at least 0 and below 1")
        if not self.target_modules:
            raise AdapterError(f"target_modules is empty; name linears of the model or use {ALL_LINEAR!r}")

    @property
    def is_uniform(self) -> bool:
        """True when every module has the same rank and scale."""
        return not self.rank_pattern and not self.alpha_pattern

    def rank(self, module: str) -> int:
        """Rank of the adapter on a module path."""
        return _from_pattern(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        """Factor on B·A for a module path: alpha / r, or alpha / √r with `use_rslora`."""
        rank, alpha = self.rank(module), _from_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def tensor_names(module: str) -> tuple[str, str]:
    """PEFT's names of the two tensors on a module path: A [r, in] and B [out, r].

    >>> tensor_names("model.layers.0.mlp.up_proj")[0]
    'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
    """
    return f"{PEFT_PREFIX}{module}.lora_A.weight", f"{PEFT_PREFIX}{module}.lora_B.weight"


def module_of(tensor_name: str) -> str | None:
    """The module path of a PEFT tensor name; None when it is not the A or B of a linear.

    >>> module_of("base_model.model.model.layers.0.mlp.up_proj.lora_B.weight")
    'model.layers.0.mlp.up_proj'
    """
    found = re.fullmatch(rf"{re.escape(PEFT_PREFIX)}(.+)\.lora_[AB]\.weight", tensor_name)
    return found[1] if found else None


def matches(target: str, module: str) -> bool:
    """Whether a target names a module: the whole path or a dotted suffix of it."""
    return module == target or module.endswith("." + target)


def resolve_targets(requested: str | Sequence[str], available_linears: Iterable[str]) -> tuple[str, ...]:
    """Module paths that the requested targets name, in the order of `available_linears`.

    ``all-linear`` (alone) is every linear except the output head and embeddings. Raises `AdapterError` when a name
    matches nothing (with near names), or when nothing is left to adapt.

    >>> resolve_targets(["q_proj"], ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj", "lm_head"])
    ('model.layers.0.self_attn.q_proj',)
    """
    available = list(dict.fromkeys(available_linears))
    names = [requested] if isinstance(requested, str) else list(requested)
    if ALL_LINEAR in names:
        if len(names) > 1:
            raise AdapterError(f"target_modules: {ALL_LINEAR!r} stands alone, without other names")
        chosen = tuple(m for m in available if _last(m) not in _NOT_IN_ALL_LINEAR)
    else:
        _refuse_unknown(names, available)
        chosen = tuple(m for m in available if any(matches(name, m) for name in names))
    if not chosen:
        raise AdapterError("target_modules names no linear of this model; an adapter without modules trains nothing")
    return chosen


def _refuse_unknown(names: Sequence[str], available: Sequence[str]) -> None:
    known = sorted({_last(m) for m in available})
    problems: list[str] = []
    for name in names:
        if any(matches(name, m) for m in available):
            continue
        near = difflib.get_close_matches(name, [*known, *available], n=3, cutoff=0.5)
        problems.append(f"{name!r} (near: {', '.join(near)})" if near else f"{name!r}")
    if problems:
        raise AdapterError(
            f"target_modules: no linear of this model is called {', '.join(problems)}; "
            f"its linears are {', '.join(known) or 'none'}"
        )


def _last(module: str) -> str:
    return module.rpartition(".")[2]


def _from_pattern(pattern: Mapping[str, _Number], module: str, default: _Number) -> _Number:
    for key, value in pattern.items():
        if module == key[1:] if key.startswith("^") else matches(key, module):
            return value
    return default
