"""What a checkpoint is on disk, and reading one back.

``step_000030/`` is the state after step 30; a run resumed from it begins step 31. It holds

* one ``<group>.safetensors`` per group of tensors: the part of a tensor's name before the first ``/``
  (``adapter/base_model...`` lies in ``adapter.safetensors`` under the rest of its name),
* ``state.json``: ``format``, ``step``, ``state`` (what is not a tensor), ``files`` (size and SHA-256 of each tensor
  file) and ``sha256`` of all of these, so that a damaged state is noticed like a damaged tensor.

A folder is believed only when all of this fits together: a name proves nothing. Tensors keep their exact bits, NaN
included: a checkpoint describes what was, it does not judge.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from tithe.errors import ResumeError
from tithe.utils.durable import sha256_file

STATE_FILE = "state.json"
FORMAT = 1

_STEP_NAME = re.compile(r"step_(\d+)")


@dataclass(frozen=True)
class FoundCheckpoint:
    """One ``step_*`` folder: its step, where it lies, and what is wrong with it (None: complete).

    >>> FoundCheckpoint(30, Path("run/checkpoints/step_000030"), "state.json is empty").ok
    False
    """

    step: int
    path: Path
    problem: str | None

    @property
    def ok(self) -> bool:
        """Whether the folder is complete and undamaged."""
        return self.problem is None


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint read back: `step` steps are done; tensors by full name (``group/rest``) on the CPU; state as saved,
    tuples turned into lists.

    >>> Checkpoint(30, {"adapter/a": torch.zeros(2)}, {"lr_step": 30}).group("adapter").keys()
    dict_keys(['a'])
    """

    step: int
    tensors: Mapping[str, torch.Tensor]
    state: Mapping[str, Any]

    def group(self, name: str) -> dict[str, torch.Tensor]:
        """Tensors of one group under the rest of their names; empty when there is none."""
        prefix = f"{name}/"
        return {n.removeprefix(prefix): t for n, t in self.tensors.items() if n.startswith(prefix)}


def checkpoint_path(root: Path, step: int) -> Path:
    """Where the checkpoint after a step lies.

    >>> checkpoint_path(Path("c"), 30).name
    'step_000030'
    """
    return root / f"step_{step:06d}"


def digest(content: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical JSON of everything in ``state.json`` but the digest itself."""
    covered = {k: v for k, v in content.items() if k != "sha256"}
    return hashlib.sha256(json.dumps(covered, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def find_checkpoints(root: Path) -> list[FoundCheckpoint]:
    """All ``step_*`` folders, each verified in full, oldest step first (as numbers). Hidden leftovers do not count."""
    return [FoundCheckpoint(step, path, problem_of(path)) for step, path in step_folders(root)]


def select_checkpoint(root: Path, step: int | None = None) -> tuple[FoundCheckpoint, list[str]]:
    """The checkpoint to resume from, and one warning per newer folder that had to be passed over.

    Without `step` it is the newest complete one; with `step` it is that one or nothing. Raises `ResumeError`.
    """
    folders = step_folders(root)
    if not folders:
        raise ResumeError(f"{root} holds no checkpoint")
    known = ", ".join(str(s) for s, _ in folders)
    if step is not None:
        path = dict(folders).get(step)
        if path is None:
            raise ResumeError(f"{root} holds no checkpoint of step {step}; there are {known}")
        problem = problem_of(path)
        if problem is not None:
            raise ResumeError(f"{path} cannot be resumed from: {problem}")
        return FoundCheckpoint(step, path, None), []
    warnings: list[str] = []
    for number, path in reversed(folders):
        problem = problem_of(path)
        if problem is None:
            return FoundCheckpoint(number, path, None), warnings
        warnings.append(f"{path} is passed over: {problem}")
    raise ResumeError(f"{root} holds no complete checkpoint: " + "; ".join(warnings))


def load_checkpoint(path: Path, groups: Collection[str] | None = None) -> Checkpoint:
    """Verify and read a checkpoint.

    `groups` limits the tensors to some groups (resuming with a fresh optimizer leaves its group out); a group that the
    checkpoint lacks raises. Raises `ResumeError` with the reason; nothing is returned in part.
    """
    content = read_state(path)
    problem = _problem_of_files(path, content["files"])
    if problem is not None:
        raise ResumeError(f"{path}: {problem}")
    stored = {Path(name).stem for name in content["files"]}
    absent = sorted(set(groups or ()) - stored)
    if absent:
        raise ResumeError(f"{path}: holds no {', '.join(absent)}; it holds {', '.join(sorted(stored)) or 'no tensors'}")
    tensors: dict[str, torch.Tensor] = {}
    for group in sorted(stored if groups is None else groups):
        try:
            part = safetensors.torch.load_file(path / f"{group}.safetensors")
        except (OSError, safetensors.SafetensorError) as error:
            raise ResumeError(f"{path}: {group}.safetensors cannot be read ({error})") from error
        tensors.update({f"{group}/{name}": tensor for name, tensor in part.items()})
    return Checkpoint(content["step"], tensors, content["state"])


# ---- for this package


def step_folders(root: Path) -> list[tuple[int, Path]]:
    """``step_*`` folders in ascending order of their numbers, unverified."""
    if not root.is_dir():
        return []
    found = ((match, path) for path in root.iterdir() if (match := _STEP_NAME.fullmatch(path.name)) and path.is_dir())
    return sorted((int(match[1]), path) for match, path in found)


def problem_of(path: Path) -> str | None:
    """Why a checkpoint folder cannot be used; None when it is complete and undamaged."""
    try:
        content = read_state(path)
    except ResumeError as error:
        return str(error).removeprefix(f"{path}: ")
    return _problem_of_files(path, content["files"])


def read_state(path: Path) -> dict[str, Any]:
    """The verified content of ``state.json``. Raises `ResumeError`."""
    try:
        text = (path / STATE_FILE).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ResumeError(f"{path}: {STATE_FILE} is missing") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ResumeError(f"{path}: {STATE_FILE} cannot be read ({error})") from error
    if not text:
        raise ResumeError(f"{path}: {STATE_FILE} is empty")
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ResumeError(f"{path}: {STATE_FILE} is not whole ({error})") from error
    if not isinstance(content, dict) or content.get("sha256") != digest(content):
        raise ResumeError(f"{path}: {STATE_FILE} is damaged (its checksum differs)")
    if content.get("format") != FORMAT:
        raise ResumeError(f"{path}: format is {content.get('format')!r}, this program reads {FORMAT}")
    if path.name != checkpoint_path(path.parent, content["step"]).name:
        raise ResumeError(f"{path}: {STATE_FILE} belongs to step {content['step']}")
    return content


def _problem_of_files(path: Path, files: Mapping[str, Mapping[str, Any]]) -> str | None:
    for name, record in files.items():
        file = path / name
        try:
            n_bytes = file.stat().st_size
            if n_bytes != record["n_bytes"]:
                return f"{name} has {n_bytes} bytes instead of {record['n_bytes']}"
            if sha256_file(file) != record["sha256"]:
                return f"{name} is damaged (its checksum differs)"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error})"
    return None
