"""Safetensors files written straight from the tensors' memory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import safetensors
import safetensors.torch
import torch

_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write contiguous CPU tensors; nothing is copied on the way. Equal tensors give equal bytes.

    Raises `OSError` when the disk refuses.
    """
    with disk_errors(path):
        safetensors.torch.save_file(dict(tensors), path, metadata=dict(metadata) if metadata else None)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """A block in which safetensors writes below a path. What the disk refuses is `OSError`: the library says it in
    words, with the system's number at the end."""
    try:
        yield
    except safetensors.SafetensorError as error:
        number = _SYSTEM_ERROR.search(str(error))
        if number is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(path)) from error
