"""What `tithe inspect` answers: the byte account of a model by tensor group and by rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tithe.arch.accounting import Account, Groups, RankAccount, Tally, account
from tithe.arch.bases import PUBLISHED, Base, checkpoint_base, make_base
from tithe.arch.buildable import build_obstacles
from tithe.arch.checkpoint import Checkpoint
from tithe.arch.files import read_json
from tithe.arch.hf_checkpoint import has_weights
from tithe.arch.known import known_config
from tithe.arch.locate import describe_checkpoint
from tithe.arch.spec import ArchSpec
from tithe.arch.tensors import TensorGroup, kv_bytes_per_token
from tithe.errors import ConfigError, ModelError

MAX_RANKS: Final = 4096
SCALES: Final = "scales"
"""Row for scales and zero points in tensors of their own, of all groups together."""

_GB: Final = 1e9


@dataclass(frozen=True)
class Target:
    """A model to look at: a config, and the files when there are some."""

    name: str
    config: dict[str, Any]
    checkpoint: Checkpoint | None

    def base(self, name: str) -> Base:
        """The base called `name`; as published, files count for more than the config."""
        if self.checkpoint is not None and name == PUBLISHED:
            return checkpoint_base(self.checkpoint)
        return make_base(name, self.config)


def find_target(text: str) -> Target:
    """A config.json, a checkpoint directory (with or without weights), a GGUF file or a known name.

    `ModelError` for anything else, naming what would do.
    """
    path = Path(text).expanduser()
    try:
        if path.is_dir() and not has_weights(path):
            if not (path / "config.json").is_file():
                raise ModelError(f"{path} has no config.json; give a config, a checkpoint directory or a GGUF file")
            path = path / "config.json"
        if path.suffix == ".json" and path.is_file():
            return Target(text, read_json(path), None)
        if path.exists():
            checkpoint = describe_checkpoint(path)
            return Target(text, checkpoint.config, checkpoint)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    return Target(text, known_config(text), None)


def inspect(target: str, base: str = PUBLISHED, n_ranks: int = 1) -> dict[str, Any]:
    """The answer of `tithe inspect`: JSON's own types, and "text" for people.

    `ModelError` or `ConfigError` for a model, a base or a number of ranks that cannot be accounted for.
    """
    if not 1 <= n_ranks <= MAX_RANKS:
        raise ConfigError(f"--ranks {n_ranks}: a whole number from 1 to {MAX_RANKS} is needed", key="ranks")
    found = find_target(target)
    spec = ArchSpec.from_config(found.config)
    sums = account(spec, found.base(base), n_ranks)
    obstacles = list(build_obstacles(found.config))
    answer = {
        "model": found.name,
        "architecture": spec.architecture,
        "base": base,
        "ranks": n_ranks,
        "parameters": sums.total.parameters,
        "active_parameters": sums.active_parameters,
        "bytes": sums.total.n_bytes,
        "groups": {name: _row(tally) for name, tally in _rows(sums.groups)},
        "by_rank": [_rank(rank) for rank in sums.ranks],
        "kv_bytes_per_token_bf16": kv_bytes_per_token(spec, 2),
        "notes": list(_notes(sums)),
        "can_run": not obstacles,
        "obstacles": obstacles,
    }
    return answer | {"text": "\n".join(_text(found, sums, obstacles))}


def _rows(groups: Groups) -> Iterator[tuple[str, Tally]]:
    """Groups in their order with the elements' bytes, then the scales of all."""
    for group in TensorGroup:
        if group in groups:
            tally = groups[group]
            yield group.value, Tally(tally.tensors, tally.parameters, tally.weight_bytes)
    scale_bytes = sum(tally.scale_bytes for tally in groups.values())
    if scale_bytes:
        yield SCALES, Tally(weight_bytes=scale_bytes)


def _row(tally: Tally) -> dict[str, int]:
    return {"tensors": tally.tensors, "parameters": tally.parameters, "bytes": tally.n_bytes}


def _rank(rank: RankAccount) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "experts": [rank.experts.start, rank.experts.stop],
        "tensors": rank.total.tensors,
        "bytes": rank.total.n_bytes,
        "groups": {name: tally.n_bytes for name, tally in _rows(rank.groups)},
    }


def _notes(sums: Account) -> Iterator[str]:
    """What the numbers do not say by themselves."""
    n_ranks, experts = len(sums.ranks), sums.spec.n_experts
    if n_ranks > 1 and not sums.spec.is_moe:
        yield "there are no experts to divide: every rank holds the whole model"
    elif experts % n_ranks:
        sizes = sorted({len(rank.experts) for rank in sums.ranks}, reverse=True)
        first = sum(len(rank.experts) == sizes[0] for rank in sums.ranks)
        yield (
            f"{n_ranks} ranks do not divide {experts} experts: the first {first} hold {sizes[0]} of each layer, "
            f"the others {sizes[1]}"
        )
    if sums.spec.n_mtp_layers:
        yield f"{sums.spec.n_mtp_layers} layer(s) for predicting further tokens are never loaded and not counted"


def _text(found: Target, sums: Account, obstacles: list[str]) -> Iterator[str]:
    """The tables."""
    spec = sums.spec
    experts = f", {spec.n_experts} experts of which a token passes {spec.n_experts_per_token}" if spec.is_moe else ""
    yield f"{found.name}: {spec.architecture}, {spec.n_layers} layers{experts}; base: {sums.base}"
    yield ""
    yield f"{'group':<16}{'tensors':>10}{'parameters':>20}{'bytes':>20}{'GB':>10}"
    for name, tally in [*_rows(sums.groups), ("total", sums.total)]:
        counts = ("", "") if name == SCALES else (f"{tally.tensors:,}", f"{tally.parameters:,}")
        label = name.replace("_", " ")
        yield f"{label:<16}{counts[0]:>10}{counts[1]:>20}{tally.n_bytes:>20,}{tally.n_bytes / _GB:>10.2f}"
    yield ""
    kv_bytes = kv_bytes_per_token(spec, 2)
    yield f"active parameters {sums.active_parameters:,}; KV cache {kv_bytes:,} bytes a token in bf16"
    yield ""
    yield f"{'ranks':<16}{'experts':>10}{'tensors':>20}{'bytes':>20}{'GB':>10}"
    for _, run in itertools.groupby(sums.ranks, key=lambda rank: (len(rank.experts), rank.total)):
        ranks = list(run)
        total, first, last = ranks[0].total, ranks[0].rank, ranks[-1].rank
        label = f"{first}" if first == last else f"{first} to {last}, each"
        count = len(ranks[0].experts)
        yield f"{label:<16}{count:>10}{total.tensors:>20,}{total.n_bytes:>20,}{total.n_bytes / _GB:>10.2f}"
    yield from (f"note: {note}" for note in _notes(sums))
    yield from (f"cannot be run: {obstacle}" for obstacle in obstacles)
