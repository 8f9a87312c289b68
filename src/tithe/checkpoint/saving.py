"""Writing and removing checkpoints. One process writes under a root at a time.

The order that loses nothing: `save_checkpoint` returns when the new folder is durable, then the run's database names
it, then `prune` removes older ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from tithe.checkpoint.store import (
    FORMAT,
    STATE_FILE,
    checkpoint_path,
    digest,
    problem_of,
    read_state,
    step_folders,
)
from tithe.errors import ResumeError, UserError
from tithe.lora import save_tensors
from tithe.utils.durable import explain, hidden_directory, make_visible, remove_directory, sha256_file, sweep

_GROUP_NAME = re.compile(r"[a-z][a-z0-9_]*")


def save_checkpoint(root: Path, step: int, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> Path:
    """Write ``step_NNNNNN`` under `root`, complete and durable, or leave everything as it was; returns its path.

    `step` steps are done. `tensors` are named ``group/rest``; any dtype, exact bits. `state` is JSON: text-keyed
    mappings, lists, text, numbers (NaN and infinities included), booleans, None. A folder of that step that already
    holds the same is kept, any other is replaced. Blocks for the disk.

    Raises `ValueError` for a tensor's name, `TypeError` for what JSON cannot hold (naming it), and `UserError` when the
    disk refuses.
    """
    groups = _groups(tensors)
    content: dict[str, Any] = {"format": FORMAT, "step": step, "state": _checked_json(state, "state")}
    target = checkpoint_path(root, step)
    try:
        sweep(root)
        with hidden_directory(root) as hidden:
            for group, members in groups.items():
                save_tensors(members, hidden / f"{group}.safetensors")
            files = sorted(hidden.iterdir())
            content["files"] = {p.name: {"n_bytes": p.stat().st_size, "sha256": sha256_file(p)} for p in files}
            content["sha256"] = digest(content)
            if target.is_dir() and problem_of(target) is None and read_state(target)["sha256"] == content["sha256"]:
                return target
            (hidden / STATE_FILE).write_bytes((json.dumps(content, indent=1) + "\n").encode())
            make_visible(hidden, target, replace=True)
    except OSError as error:
        raise UserError(f"cannot save the checkpoint {target}: {explain(error)}") from error
    return target


def prune(root: Path, keep: int, protect: Collection[int] = ()) -> list[int]:
    """Remove complete checkpoints older than the newest `keep` (>= 1) complete ones; returns the removed steps.

    Steps in `protect` stay. Nothing is removed before `keep` newer ones have been verified in full; damaged folders are
    left for their owner to look at. What killed saves left behind is removed too. Raises `UserError` when the disk
    refuses.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least the newest checkpoint stays")
    removed: list[int] = []
    verified = 0
    try:
        sweep(root)
        for step, path in reversed(step_folders(root)):
            if verified < keep:
                verified += problem_of(path) is None
            elif step not in protect and _is_checkpoint(path):
                remove_directory(path)
                removed.append(step)
    except OSError as error:
        raise UserError(f"cannot remove old checkpoints in {root}: {explain(error)}") from error
    return sorted(removed)


def _is_checkpoint(path: Path) -> bool:
    try:
        return all((path / name).is_file() for name in read_state(path)["files"])
    except ResumeError:
        return False


def _groups(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors by group, a file each. Tensors that share memory are stored once each."""
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        group, slash, rest = name.partition("/")
        if not slash or not rest or not _GROUP_NAME.fullmatch(group):
            raise ValueError(f"tensor {name!r}: a name is group/rest, the group in lower case")
        groups.setdefault(group, {})[rest] = tensor.detach().to("cpu").contiguous()
    return {group: _without_aliases(members) for group, members in sorted(groups.items())}


def _without_aliases(members: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy all but the first tensor of each storage: safetensors refuses to guess which of two names owns it."""
    seen: set[int] = set()
    own: dict[str, torch.Tensor] = {}
    for name, tensor in members.items():
        storage = tensor.untyped_storage().data_ptr()
        own[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return own


def _checked_json(value: Any, where: str) -> Any:
    """The value as JSON gives it back; raises `TypeError` where JSON would change it in silence."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_checked_json(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{where}: key {key!r} is not text")
        return {key: _checked_json(item, f"{where}.{key}") for key, item in value.items()}
    raise TypeError(f"{where} is a {type(value).__name__}, which JSON does not hold")
