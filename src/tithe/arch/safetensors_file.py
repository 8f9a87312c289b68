"""A bounded safetensors header parser over a memory map.

Own parser because BF16 has no numpy dtype and the raw bytes are what is wanted. Layout: u64 header length | JSON header
{name: {dtype, shape, data_offsets}} | data. https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import itertools
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tithe.arch.files import MappedFile, parse_json, quote
from tithe.arch.formats import SAFETENSORS_FORMATS, SUPPORTED_FORMATS, TensorFormat
from tithe.arch.layouts import DTYPE_BYTES
from tithe.errors import ModelError

if TYPE_CHECKING:
    import numpy as np

_MAX_HEADER_BYTES: Final = 100 * 10**6
"""The limit of the reference implementation."""


@dataclass(frozen=True)
class SafetensorsTensor:
    """One tensor's place; `offset` counts from the beginning of the file. `dtype` is the file's own name for it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: MappedFile
    offset: int
    n_bytes: int

    def view(self, begin: int = 0, end: int | None = None) -> np.ndarray:
        """uint8 [end - begin, bytes per entry]: entries of the first dimension, a view into the memory map."""
        entries = self.shape[0] if self.shape else 1
        end = entries if end is None else end
        if not 0 <= begin <= end <= entries:
            raise ValueError(f"{self.name} has {entries} entries; {begin} to {end} is no part of them")
        size = self.n_bytes // entries if entries else 0
        return self.file.view(self.offset + begin * size, (end - begin) * size).reshape(end - begin, size)

    def array(self, entry: int | None = None) -> np.ndarray:
        """uint8 of the tensor's shape, its last dimension in bytes; only of one entry of the first dimension if given.

        A view. A scalar gives [bytes].
        """
        if entry is None:
            size = self.n_bytes // (math.prod(self.shape[:-1]) or 1)
            return self.file.view(self.offset, self.n_bytes).reshape(*self.shape[:-1], size)
        rest = self.shape[1:]
        size = self.n_bytes // self.shape[0] // (math.prod(rest[:-1]) or 1)
        return self.view(entry, entry + 1).reshape(*rest[:-1], size)

    def format(self) -> TensorFormat:
        """The format, or `ModelError` naming a dtype that Tithe does not read."""
        found = SAFETENSORS_FORMATS.get(self.dtype)
        if found is None:
            raise ModelError(
                f"{self.file.path}: tensor {quote(self.name)} has dtype {quote(self.dtype)}, which Tithe does not "
                f"read as numbers; supported in safetensors: {', '.join(SAFETENSORS_FORMATS)} "
                f"(in GGUF: {SUPPORTED_FORMATS})"
            )
        return found


def read_safetensors(path: Path) -> dict[str, SafetensorsTensor]:
    """All tensors of one file by name; no tensor byte is touched. Raises `ModelError`."""
    file = MappedFile(path)
    if file.size < 8:
        raise ModelError(f"{path} is truncated: {file.size} bytes; fetch it again")
    (length,) = struct.unpack("<Q", file.head(8))
    if length > min(_MAX_HEADER_BYTES, file.size - 8):
        raise ModelError(f"{path} claims a header of {length} bytes: it is truncated or not a safetensors file")
    header = parse_json(file.head(8 + length)[8:], f"the header of {path}")
    header.pop("__metadata__", None)
    tensors = {name: _read_entry(file, name, value, 8 + length) for name, value in header.items()}
    by_place = sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.n_bytes))
    for before, after in itertools.pairwise(by_place):
        if before.offset + before.n_bytes > after.offset:
            raise ModelError(f"{path}: tensors {quote(before.name)} and {quote(after.name)} overlap")
    return tensors


def _read_entry(file: MappedFile, name: str, value: Any, data_start: int) -> SafetensorsTensor:
    """Check one header entry against the file."""
    what = f"{file.path}: tensor {quote(name)}"
    match value:
        case {"dtype": str(dtype), "shape": [*sizes], "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise ModelError(f"{what} has a header entry that is not dtype, shape and data_offsets")
    if not all(type(size) is int and 0 <= size < 2**48 for size in sizes) or len(sizes) > 8:
        raise ModelError(f"{what} has the impossible shape {quote(str(sizes))}")
    shape = tuple(sizes)
    if not 0 <= begin <= end:
        raise ModelError(f"{what} has the impossible data_offsets [{begin}, {end}]")
    if data_start + end > file.size:
        raise ModelError(
            f"{what} ends at byte {data_start + end} but the file has {file.size}: it is truncated; fetch it again"
        )
    size = DTYPE_BYTES.get(dtype)
    if size is not None and math.prod(shape) * size != end - begin:
        needed = math.prod(shape) * size
        raise ModelError(f"{what} of shape {shape} needs {needed} bytes but its entry has {end - begin}")
    return SafetensorsTensor(name, shape, dtype, file, data_start + begin, end - begin)
