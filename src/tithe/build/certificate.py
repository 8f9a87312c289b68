"""The parity certificate: the trainer's log-probs of rollouts in the pool against those the sampler gave them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from tithe.build.base import other_compute
from tithe.build.hooks import CERTIFIED_TOKENS
from tithe.build.session import Session, say
from tithe.errors import AdapterError
from tithe.pool import PoolReader
from tithe.quant import kernel_threads
from tithe.trainer import FullTrainer
from tithe.types import RolloutGroup
from tithe.utils.durable import write_text
from tithe.weight_sync import DirectoryChannel, read_manifest


@dataclass(frozen=True)
class _Difference:
    largest: float
    mean: float
    tokens: int


def certify(session: Session, run_dir: Path, *, cross_check: bool = False) -> dict[str, object] | None:
    """Score the newest trained groups whose version is still on disk, until there are 2,000 tokens; writes parity.json.

    Rollouts that continued over another version's keys and values (`on_publish: keep`) are left out. `cross_check` also
    scores them with the base held the other way (packed against dequantized), for which all ranks load a second copy.
    Where every parameter is trained, the difference is the gap between transformers and the engine's (maybe quantized)
    copy. None, and no file, when the pool has nothing to compare.
    """
    by_version = _collect(session, run_dir)
    if not by_version:
        return None
    if isinstance(session.trainer, FullTrainer):
        result = {**_common(by_version), **session.base.lane.call(_compare_copies, session.trainer, by_version)}
        result |= {"numeric_mode": session.base.numeric_mode, "copy": session.base.options.quantize}
        result["ranks"] = session.cfg.run.ranks
        write_text(run_dir / "parity.json", json.dumps(result, indent=1))
        return result
    decoder = session.base.decoder
    own, floor = _compare(session, by_version)
    options = decoder.options
    result = {
        "max_abs_dlogp": own.largest,
        "mean_abs_dlogp": own.mean,
        "tokens": own.tokens,
        "noise_floor": floor,
        "base_max_abs_error": decoder.base_max_abs_error,
        "compute": options.compute,
        "compute_dtype": options.compute_dtype,
        "base_dtype": options.base_dtype,
        "attention": "pages of 16 keys, one row at a time",
        "numeric_mode": options.numeric_mode,
        **_common(by_version),
        "ranks": session.cfg.run.ranks,
        "adapter_dropout": "off" if session.cfg.lora.dropout == 0 else f"{session.cfg.lora.dropout}, off while scoring",
    }
    if cross_check:
        crossed, other = _compare_other(session, by_version), other_compute(session.base)
        result[f"{other}_max_abs_dlogp"] = crossed.largest
        result[f"{other}_mean_abs_dlogp"] = crossed.mean
    write_text(run_dir / "parity.json", json.dumps(result, indent=1))
    return result


def _collect(session: Session, run_dir: Path) -> dict[Path, list[RolloutGroup]]:
    """Newest trained groups by the directory of the one version that drew all their tokens."""
    published: dict[tuple[int, int], Path] = {}
    for directory in DirectoryChannel(run_dir / "adapters", session.cfg.run.name).list_versions():
        try:
            version = read_manifest(directory).version
        except AdapterError as error:
            say(f"warning: not certified: {error}")
            continue
        published[version.lineage, version.serial] = directory
    found: dict[Path, list[RolloutGroup]] = defaultdict(list)
    tokens = 0
    with PoolReader(run_dir / "pool.sqlite") as reader:
        for group in reader.groups():
            serials = {int(s) for r in group.rollouts for s in r.serials}
            directory = published.get((group.lineage, group.admitted_serial))
            if directory is None or serials != {group.admitted_serial}:
                continue
            found[directory].append(group)
            tokens += sum(len(r.token_ids) for r in group.rollouts)
            if tokens >= CERTIFIED_TOKENS:
                break
    return dict(found)


def _compare(session: Session, by_version: dict[Path, list[RolloutGroup]]) -> tuple[_Difference, float]:
    """The trainer's own answers, on all ranks. The noise floor is taken on the first version's groups."""
    differences: list[np.ndarray] = []
    floor = 0.0
    ask = partial(session.base.lane.call, session.learner.score_version)
    for index, (directory, groups) in enumerate(by_version.items()):
        scored = ask(directory, groups, False)
        differences += _against_sampler(groups, scored)
        if index == 0:
            again = ask(directory, groups, True)
            floor = max(
                float(np.abs(a - b).max())
                for x, y in zip(scored, again, strict=True)
                for a, b in zip(x, y, strict=True)
                if a is not None and b is not None
            )
    return _difference(differences), floor


def _compare_other(session: Session, by_version: dict[Path, list[RolloutGroup]]) -> _Difference:
    """The other storage's answers, on all ranks."""
    differences: list[np.ndarray] = []
    for directory, groups in by_version.items():
        scored = session.base.lane.call(session.learner.score_other, directory, groups)
        differences += _against_sampler(groups, scored)
    return _difference(differences)


def _difference(differences: Sequence[np.ndarray]) -> _Difference:
    flat = np.concatenate(differences)
    return _Difference(float(flat.max()), float(flat.mean()), len(flat))


def _common(by_version: dict[Path, list[RolloutGroup]]) -> dict[str, object]:
    return {
        "optimizer_steps": max(read_manifest(directory).optimizer_step for directory in by_version),
        "versions": len(by_version),
        "groups": sum(len(groups) for groups in by_version.values()),
        "lengths": _lengths(by_version),
        "threads": kernel_threads(),
    }


def _compare_copies(trainer: FullTrainer, by_version: dict[Path, list[RolloutGroup]]) -> dict[str, object]:
    """On the lane: transformers on each published model against what the engine's copy of it sampled."""
    differences: list[np.ndarray] = []
    for directory, groups in by_version.items():
        differences += _against_sampler(groups, trainer.score(groups, trainer.load_version(directory)))
    flat = np.concatenate(differences)
    return {"max_abs_dlogp": float(flat.max()), "mean_abs_dlogp": float(flat.mean()), "tokens": len(flat)}


def _against_sampler(groups: Sequence[RolloutGroup], scored: Sequence[Sequence[np.ndarray | None]]) -> list[np.ndarray]:
    """|Δlog-prob| of the tokens that the model wrote; what tools wrote between them was never sampled."""
    return [
        np.abs(logp.astype(np.float64) - rollout.logp.astype(np.float64))[rollout.loss_mask]
        for group, row in zip(groups, scored, strict=True)
        for rollout, logp in zip(group.rollouts, row, strict=True)
        if logp is not None
    ]


def _lengths(by_version: dict[Path, list[RolloutGroup]]) -> dict[str, int]:
    lengths = [len(r.token_ids) for groups in by_version.values() for g in groups for r in g.rollouts]
    return {"shortest": min(lengths), "longest": max(lengths), "distinct": len(set(lengths))}
