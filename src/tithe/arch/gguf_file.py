"""A bounded GGUF parser over a memory map.

The `gguf` package's reader builds an array per vocabulary entry, seconds for 49k tokens; here arrays are located,
checked, and decoded only when asked for. The file is untrusted: it bounds every count, length, offset, nesting.
Layout (little-endian): magic, version, tensor count, key count | key, type, value … | name, dims, type, offset … |
padding | tensor data. https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import itertools
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tithe.arch.files import MappedFile, quote
from tithe.arch.formats import GGML_FORMATS, SUPPORTED_FORMATS, TensorFormat, ggml_type_name
from tithe.errors import ModelError

_SCALARS: Final[dict[int, str]] = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING: Final = 8
_ARRAY: Final = 9
_MAX_KEYS: Final = 65_536
_MAX_TENSORS: Final = 1_000_000
_MAX_NAME_BYTES: Final = 65_535
_MAX_TEXT_BYTES: Final = 64 * 2**20
_MAX_DIMENSIONS: Final = 4
_DEFAULT_ALIGNMENT: Final = 32


@dataclass(frozen=True)
class GgufArray:
    """A metadata array, located and bounds-checked; `values` decodes it. `len()` costs nothing."""

    buffer: mmap.mmap
    kind: int
    count: int
    offset: int

    def __len__(self) -> int:
        return self.count

    def values(self) -> list[Any]:
        """All elements as Python objects; strings that are not UTF-8 keep their bytes as surrogates."""
        if self.kind != _STRING:
            return list(struct.unpack_from(f"<{self.count}{_SCALARS[self.kind][1]}", self.buffer, self.offset))
        result: list[str] = []
        buffer, position, length_of = self.buffer, self.offset, struct.Struct("<Q").unpack_from
        for _ in range(self.count):
            start = position + 8
            position = start + length_of(buffer, position)[0]
            result.append(buffer[start:position].decode("utf-8", "surrogateescape"))
        return result


@dataclass(frozen=True)
class GgufTensor:
    """One tensor's place. `shape` has the innermost dimension last, the reverse of the file's own order."""

    name: str
    shape: tuple[int, ...]
    format: TensorFormat
    offset: int
    n_bytes: int


@dataclass(frozen=True)
class GgufFile:
    """A parsed file: scalars and texts as Python values, arrays as `GgufArray`, tensors in file order."""

    file: MappedFile
    metadata: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]


class _Cursor:
    """Reads forward through the map and never past its end."""

    def __init__(self, file: MappedFile) -> None:
        self.path = file.path
        self.buffer = file.buffer
        self.end = file.size
        self.position = 0

    def advance(self, n_bytes: int, what: str) -> int:
        """Step over `n_bytes` and return where they begin; `ModelError` when the file ends first."""
        start = self.position
        if n_bytes > self.end - start:
            raise ModelError(
                f"{self.path} is truncated or damaged: {what} needs {n_bytes} bytes at offset {start}, "
                f"the file has {self.end}; fetch the file again"
            )
        self.position = start + n_bytes
        return start

    def scalar(self, code: str, what: str) -> Any:
        return struct.unpack_from(code, self.buffer, self.advance(struct.calcsize(code), what))[0]

    def text(self, what: str, limit: int) -> str:
        length = self.scalar("<Q", what)
        if length > limit:
            raise ModelError(f"{self.path}: {what} claims {length} bytes, more than the limit of {limit}")
        start = self.advance(length, what)
        return self.buffer[start : start + length].decode("utf-8", "surrogateescape")

    def value(self, kind: int, what: str) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], what)
        if kind == _STRING:
            return self.text(what, _MAX_TEXT_BYTES)
        if kind == _ARRAY:
            return self.array(what)
        raise ModelError(f"{self.path}: {what} has the unknown metadata type {kind}")

    def array(self, what: str) -> GgufArray:
        kind, count = self.scalar("<I", what), self.scalar("<Q", what)
        if kind in _SCALARS:
            start = self.advance(count * struct.calcsize(_SCALARS[kind]), what)
            return GgufArray(self.buffer, kind, count, start)
        if kind != _STRING:
            raise ModelError(f"{self.path}: {what} is an array of type {kind}; only numbers and texts are read")
        start = self.position
        if count > (self.end - start) // 8:
            raise ModelError(f"{self.path}: {what} claims {count} texts, more than the rest of the file can hold")
        self.skip_texts(count, what)
        return GgufArray(self.buffer, kind, count, start)

    def skip_texts(self, count: int, what: str) -> None:
        """Step over `count` texts; kept flat because vocabularies have 10^5 entries."""
        buffer, position, last, length_of = self.buffer, self.position, self.end - 8, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if position > last:
                break
            position += 8 + length_of(buffer, position)[0]
        else:
            self.advance(position - self.position, what)
            return
        raise ModelError(f"{self.path} is truncated or damaged inside {what}; fetch the file again")


def read_gguf(path: Path) -> GgufFile:
    """Parse header, metadata and tensor table; no tensor byte is touched. Raises `ModelError`."""
    file = MappedFile(path)
    cursor = _Cursor(file)
    n_tensors, n_keys = _read_header(cursor)
    metadata: dict[str, Any] = {}
    for index in range(n_keys):
        key = cursor.text(f"metadata key {index}", _MAX_NAME_BYTES)
        what = f"metadata {quote(key)}"
        if key in metadata:
            raise ModelError(f"{path}: {what} occurs twice")
        metadata[key] = cursor.value(cursor.scalar("<I", what), what)
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 8 <= alignment <= 65_536 or alignment % 8:
        raise ModelError(f"{path}: general.alignment is {alignment!r}; a multiple of 8 up to 65536 is needed")
    infos = [_read_tensor_info(cursor, index) for index in range(n_tensors)]
    data_start = -(-cursor.position // alignment) * alignment
    return GgufFile(file, metadata, _place_tensors(file, infos, data_start, alignment))


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    """Check magic and version; return the numbers of tensors and metadata keys."""
    magic = cursor.buffer[cursor.advance(4, "the magic number") : 4]
    if magic != b"GGUF":
        raise ModelError(f"{cursor.path} is not a GGUF file (it begins with {magic!r})")
    version = cursor.scalar("<I", "the version")
    if version not in (2, 3):
        big_endian = version & 0xFFFF == 0
        kind = "a big-endian file" if big_endian else f"GGUF version {version}"
        raise ModelError(f"{cursor.path} is {kind}; versions 2 and 3, little-endian, are read: convert it again")
    n_tensors, n_keys = cursor.scalar("<Q", "the tensor count"), cursor.scalar("<Q", "the key count")
    if n_tensors > _MAX_TENSORS or n_keys > _MAX_KEYS:
        raise ModelError(f"{cursor.path} claims {n_tensors} tensors and {n_keys} keys; it is damaged")
    return n_tensors, n_keys


def _read_tensor_info(cursor: _Cursor, index: int) -> tuple[str, tuple[int, ...], TensorFormat, int]:
    """Name, shape (innermost last), format and relative offset of one tensor."""
    name = cursor.text(f"the name of tensor {index}", _MAX_NAME_BYTES)
    what = f"tensor {quote(name)}"
    n_dims = cursor.scalar("<I", what)
    if not 1 <= n_dims <= _MAX_DIMENSIONS:
        raise ModelError(f"{cursor.path}: {what} has {n_dims} dimensions; 1 to {_MAX_DIMENSIONS} are read")
    dims = [cursor.scalar("<Q", what) for _ in range(n_dims)]
    number, offset = cursor.scalar("<I", what), cursor.scalar("<Q", what)
    if number not in GGML_FORMATS:
        raise ModelError(
            f"{cursor.path}: {what} is stored as {ggml_type_name(number)}, which Tithe does not read; supported: "
            f"{SUPPORTED_FORMATS}. Convert the model again with one of these for every tensor "
            f"(llama-quantize has --token-embedding-type and --output-tensor-type), or use its safetensors directory"
        )
    return name, tuple(reversed(dims)), GGML_FORMATS[number], offset


def _place_tensors(
    file: MappedFile, infos: list[tuple[str, tuple[int, ...], TensorFormat, int]], data_start: int, alignment: int
) -> tuple[GgufTensor, ...]:
    """Absolute places of all tensors; refuses damage: bad offsets, overlaps, ends beyond the file, double names."""
    tensors: list[GgufTensor] = []
    for name, shape, tensor_format, offset in infos:
        what = f"{file.path}: tensor {quote(name)}"
        if 0 in shape:
            raise ModelError(f"{what} is empty: shape {shape}")
        try:
            n_bytes = tensor_format.n_bytes(shape)
        except ValueError as error:
            raise ModelError(f"{what}: {error}") from error
        start = data_start + offset
        if offset % alignment:
            raise ModelError(f"{what} begins at {offset}, which is not a multiple of the alignment {alignment}")
        if start + n_bytes > file.size:
            raise ModelError(
                f"{what} ends at byte {start + n_bytes} but the file has {file.size}: it is truncated; fetch it again"
            )
        tensors.append(GgufTensor(name, shape, tensor_format, start, n_bytes))
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise ModelError(f"{file.path} names a tensor twice")
    by_place = sorted(tensors, key=lambda tensor: tensor.offset)
    for before, after in itertools.pairwise(by_place):
        if before.offset + before.n_bytes > after.offset:
            raise ModelError(f"{file.path}: tensors {quote(before.name)} and {quote(after.name)} overlap")
    return tuple(tensors)
