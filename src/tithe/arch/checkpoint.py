"""A checkpoint as data: configuration, tensors that are read lazily, what generation needs, and a checksum."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tithe.arch.architectures import Architecture
from tithe.arch.files import MappedFile, quote
from tithe.arch.formats import StoredFormat, TensorFormat
from tithe.arch.safetensors_file import SafetensorsTensor
from tithe.arch.sharding import Shard
from tithe.arch.spec import ArchSpec
from tithe.arch.tensors import iter_tensors
from tithe.errors import ModelError

if TYPE_CHECKING:
    import numpy as np

_NAMES_SHOWN: Final = 8
_CHUNK: Final = 8 * 2**20
"""Bytes that are hashed at a time."""
MISSING_LISTED: Final = 1000
"""Missing names after which the search ends: the config belongs to another model, or claims absurd sizes."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor in place in its file.

    Example::

        entry = checkpoint.tensors["model.layers.0.self_attn.q_proj.weight"]
        entry.shape, entry.format, entry.n_bytes     # (576, 576), TensorFormat.Q4_1, 207360
        entry.read().shape                           # (576, 360): one row of packed bytes per output
    """

    name: str
    shape: tuple[int, ...]
    """(out, in) for matrices, (n,) for norms and biases; of packed tensors the logical shape (…, out, in)."""
    stored: StoredFormat
    n_bytes: int
    """Bytes that a base keeps; of a packed tensor the scales are among them."""
    file: MappedFile = field(repr=False)
    offset: int
    permute_heads: int = 0
    """Heads whose rows the file keeps in GGUF's interleaved rotary order; 0 when the file's order is canonical."""
    parts: Mapping[str, SafetensorsTensor] = field(default_factory=dict[str, SafetensorsTensor], repr=False)
    """Of a compound format: the tensors that hold it by suffix, e.g. ".weight_packed"; `file` and `offset` are those of
    the codes. Empty for all other formats."""

    @property
    def format(self) -> TensorFormat:
        """The kind of format."""
        return self.stored.kind

    def read(self) -> np.ndarray:
        """uint8 [out, bytes per row] in canonical row order; [n, bytes per element] for one dimension.

        A view into the memory map, or a copy of this one tensor when its rows are permuted. `ValueError` for a compound
        format, whose `parts` are read one by one.
        """
        rows = self.read_file_order()
        order = self.row_order()
        return rows if order is None else rows[order]

    def read_parts(self, expert: int | None = None) -> dict[str, np.ndarray]:
        """Of a compound format: uint8 arrays of the parts' shapes, last dimension in bytes, by suffix; views.

        `expert` picks one of a stack: the leading dimension goes, and no byte of the others is touched.
        """
        return {suffix: part.array(expert) for suffix, part in self.parts.items()}

    def read_slice(self, begin: int, end: int) -> np.ndarray:
        """uint8 [end - begin, bytes per entry]: entries of the first dimension as the file has them, a view.

        Of stacked experts the tensors of some; no byte of the others is touched. Not for compound formats.
        """
        size = self.n_bytes // self.shape[0]
        return self.file.view(self.offset + begin * size, (end - begin) * size).reshape(end - begin, size)

    def ranges(self, expert: int | None = None) -> Iterator[tuple[str, MappedFile, int, int]]:
        """(suffix, file, first byte, bytes) of every run of bytes that holds the tensor, or one expert of a stack."""
        runs = [(suffix, part.file, part.offset, part.n_bytes, part.shape) for suffix, part in self.parts.items()]
        for suffix, file, offset, n_bytes, shape in runs or [("", self.file, self.offset, self.n_bytes, self.shape)]:
            size = n_bytes if expert is None else n_bytes // shape[0]
            yield suffix, file, offset + (expert or 0) * size, size

    def release(self, expert: int | None = None) -> None:
        """Let the pages that reading brought into this process go; see `MappedFile.release`."""
        for _, file, offset, n_bytes in self.ranges(expert):
            file.release(offset, n_bytes)

    def read_file_order(self) -> np.ndarray:
        """As `read`, always a view, with the rows as the file has them."""
        if self.parts:
            raise ValueError(
                f"{self.name} is {self.format}, which lies in several tensors: read {', '.join(self.parts)}"
            )
        raw = self.file.view(self.offset, self.n_bytes)
        rows = self.shape[0] if self.shape else 1
        return raw.reshape(rows, self.n_bytes // rows if rows else 0)

    def row_order(self) -> np.ndarray | None:
        """int64 [out]: canonical row i is row `row_order()[i]` of the file; `None` when they are the same.

        llama.cpp stores a head's rotary pairs (i, i + d/2) side by side; whole rows move, so packed bytes can too.
        """
        if not self.permute_heads:
            return None
        import numpy as np  # noqa: PLC0415  see MappedFile.view

        rows = np.arange(self.shape[0])
        return rows.reshape(self.permute_heads, -1, 2).swapaxes(1, 2).reshape(-1)


@dataclass(frozen=True)
class GenerationInfo:
    """What generation needs of a checkpoint; text templates are untrusted and only run in a sandbox."""

    eos_token_ids: frozenset[int]
    """Ids that end a sequence; empty when the checkpoint names none."""
    bos_token_id: int | None
    chat_template: str | None
    tokenizer_path: Path
    """The GGUF file, or the directory that holds tokenizer.json."""
    tokenizer_size: int | None
    """Highest token id + 1; `None` when the checkpoint has no tokenizer."""


class Checkpoint:
    """A complete, checked checkpoint. Every tensor the architecture needs is present with the right shape.

    Whether a run can load it is another question: see `check_buildable`.

    `config` has Hugging Face's keys with resolved values: `vocab_size` is the embedding's number of rows,
    `rope_parameters` replaces the older rotary keys, `head_dim`, `num_key_value_heads`, `rms_norm_eps` and
    `tie_word_embeddings` are always there. `metadata` holds a GGUF file's own keys and is empty otherwise.
    """

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        tensors: dict[str, TensorEntry],
        generation: GenerationInfo,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Check `tensors` against `config`. Raises `ModelError` naming what is missing, unknown or misshapen."""
        self.path = path
        self.generation = generation
        self.metadata: Mapping[str, Any] = metadata or {}
        self.config = {**config, "vocab_size": _embedding_rows(path, tensors)}
        self.spec = ArchSpec.from_config(self.config)
        self.tensors = _check_tensors(path, self.spec, tensors)
        size = generation.tokenizer_size
        if size is not None and self.spec.vocab_size < size:
            raise ModelError(
                f"{path}: the embedding has {self.spec.vocab_size} rows but the tokenizer has {size} tokens; "
                f"tokenizer and weights do not belong together: use the files of one release"
            )

    @property
    def architecture(self) -> Architecture:
        """The model type."""
        return self.spec.architecture

    @property
    def padded_vocab(self) -> range:
        """Ids that have a row but no token: they are never sampled. Empty when there are none."""
        size = self.generation.tokenizer_size
        return range(self.spec.vocab_size if size is None else size, self.spec.vocab_size)

    def checksum(self) -> str:
        """sha256 hex over names, shapes, formats and bytes of all tensors; computed once.

        Equal for one file and for the same tensors in several. Reads every byte: about 1 s per GB. Several ranks share
        the work: `combine_digests` of what each finds.
        """
        return self._checksum

    @cached_property
    def _checksum(self) -> str:
        return combine_digests(self.digests())

    def digests(self, shard: Shard | None = None) -> dict[str, str]:
        """sha256 hex of every tensor (of stacked ones: of every expert's part) that a rank keeps, by name."""
        digests: dict[str, str] = {}
        for tensor in iter_tensors(self.spec):
            family, entry = tensor.family, self.tensors[tensor.name]
            mine = range(family.n_experts) if shard is None else shard.experts(family.n_experts)
            if family.is_stacked:
                digests |= {f"{tensor.name}[{expert}]": _digest(entry, expert) for expert in mine}
            elif tensor.expert is None or tensor.expert in mine:
                digests[tensor.name] = _digest(entry)
        return digests


def combine_digests(digests: Mapping[str, str]) -> str:
    """The checksum of a checkpoint from `Checkpoint.digests` of all its tensors, whoever computed which."""
    lines = (f"{name} {digests[name]}\n" for name in sorted(digests))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _digest(entry: TensorEntry, expert: int | None = None) -> str:
    """sha256 hex over format, shape and bytes; leaves no page behind."""
    stored = entry.stored
    format_line = f"{stored.kind} {stored.group} {stored.act_order} {stored.gptq_v2}"
    digest = hashlib.sha256(f"{entry.shape}\n{format_line}\n{entry.permute_heads}\n".encode())
    for suffix, file, offset, n_bytes in entry.ranges(expert):
        digest.update(f"{suffix} {n_bytes}\n".encode())
        for begin in range(offset, offset + n_bytes, _CHUNK):
            size = min(_CHUNK, offset + n_bytes - begin)
            digest.update(file.bytes_view(begin, size))
            file.release(begin, size)
    return digest.hexdigest()


def base_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of all tensors as stored: what a base that keeps the file's formats holds in memory."""
    return sum(entry.n_bytes for entry in checkpoint.tensors.values())


def _embedding_rows(path: Path, tensors: Mapping[str, TensorEntry]) -> int:
    """The vocabulary size is the embedding's: tokenizers and configs disagree with padded files."""
    entry = tensors.get("model.embed_tokens.weight")
    if entry is None or len(entry.shape) != 2:
        raise ModelError(f"{path}: the token embedding (model.embed_tokens.weight) is missing or not a matrix")
    return entry.shape[0]


def _check_tensors(path: Path, spec: ArchSpec, tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The tensors in the architecture's own order; a redundant copy of a tied head is left out."""
    expected: dict[str, tuple[int, ...]] = {}
    missing: list[str] = []
    for tensor in iter_tensors(spec):
        entry = tensors.get(tensor.name)
        if entry is not None:
            expected[tensor.name] = tensor.family.matrix if entry.parts else tensor.family.shape
        else:
            missing.append(tensor.name)
        if len(missing) > MISSING_LISTED:
            break
    if missing:
        raise ModelError(f"{path}: tensors are missing: {_some(missing)}; fetch the complete checkpoint")
    ignored = {"lm_head.weight"} if spec.tie_word_embeddings else set[str]()
    unknown = [name for name in tensors if name not in expected and name not in ignored]
    if unknown:
        raise ModelError(
            f"{path}: tensors that a {spec.architecture} model of this config does not have: {_some(unknown)}; "
            f"ignoring them would compute another model"
        )
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise ModelError(
                f"{path}: {name} has shape {tensors[name].shape} but the config says {shape}; "
                f"config and weights do not belong together"
            )
    return {name: tensors[name] for name in expected}


def _some(names: list[str]) -> str:
    """The first names of a list, and how many more there are."""
    shown = ", ".join(quote(name) for name in names[:_NAMES_SHOWN])
    more = len(names) - _NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
