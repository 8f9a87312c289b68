"""`PublishedBank`: the matrices of a layer's experts on one device, in the bytes and the order of their checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tithe.arch import StoredFormat, TensorFormat
from tithe.errors import ModelError
from tithe.quant.parts import check

_WORDS_OF_32 = {TensorFormat.INT4_PACKED: 4, TensorFormat.MXFP4: 4, TensorFormat.Q4_1: 5}
"""int32 words that 32 weights take; Q4_1's hold its scales, too."""
_SCALES = {TensorFormat.INT4_PACKED: torch.int16, TensorFormat.MXFP4: torch.uint8}
FORMATS = tuple(_WORDS_OF_32)


@dataclass(frozen=True, eq=False)
class PublishedBank:
    """E frozen matrices W [E, rows N, columns K] for the kernels of this package; W̃ is rounded to bf16.

    Example: the gates of a Kimi-K2 layer, 0.5625 bytes a weight::

        bank = PublishedBank.allocate(StoredFormat(TensorFormat.INT4_PACKED), 384, 2048, 7168, torch.device("cuda"))
        bank.put(0, {".weight_packed": packed, ".weight_scale": scale})   # numpy, as the file has them
    """

    stored: StoredFormat
    rows: int
    columns: int
    words: Tensor
    """int32 [E, N, words of a row]."""
    scale: Tensor | None
    """INT4_PACKED: int16 [E, N, K/G], bf16 bits; MXFP4: uint8 [E, N, K/32]; Q4_1 has its scales in the words."""

    @classmethod
    def allocate(cls, stored: StoredFormat, count: int, rows: int, columns: int, device: torch.device) -> PublishedBank:
        """A bank of zeros. `ValueError` for a format that no kernel here reads, or columns that are no whole groups."""
        if stored.kind not in FORMATS:
            raise ValueError(f"no Triton kernel reads {stored.kind}, only {', '.join(FORMATS)}")
        group = stored.group or 32
        if group % 32 or columns % group or (group != 32 and stored.kind is not TensorFormat.INT4_PACKED):
            raise ValueError(f"{columns} columns of {stored.kind} in groups of {group} are no whole groups of 32 · n")
        if count < 1:
            raise ValueError(f"a bank holds at least one matrix, not {count}")
        words = torch.zeros(count, rows, columns // 32 * _WORDS_OF_32[stored.kind], dtype=torch.int32, device=device)
        scale = None
        if stored.kind in _SCALES:
            scale = torch.zeros(count, rows, columns // group, dtype=_SCALES[stored.kind], device=device)
        return cls(stored, rows, columns, words, scale)

    def put(self, e: int, parts: Mapping[str, np.ndarray]) -> None:
        """Copy expert e in from the arrays of a checkpoint, by the ends of their names as `repack_parts` takes them;
        Q4_1's one tensor, uint8 [N, bytes of a row], goes by the empty name.

        `ModelError` for damage (see `tithe.quant.parts`), `ValueError` for a matrix of another shape.
        """
        if self.scale is None:
            words, scale = _blocks(parts[""]), None
        else:
            p = check(parts, self.stored)
            words, scale = p.codes.view(np.int32), p.scale
        for array, place in zip((words, scale), (self.words, self.scale), strict=True):
            if array is None or place is None:
                continue
            if array.shape != place.shape[1:]:
                raise ValueError(f"expert {e}: {array.shape} is no {self.stored.kind} {self.rows}×{self.columns}")
            place[e].copy_(torch.from_numpy(np.array(array)).view(place.dtype))

    def __len__(self) -> int:
        """Number of experts E."""
        return self.words.shape[0]

    @property
    def group(self) -> int:
        """Weights per scale along K."""
        return self.stored.group or 32

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.words.device

    @property
    def n_bytes(self) -> int:
        """Resident bytes of all experts: those of the checkpoint."""
        return sum(t.numel() * t.element_size() for t in self.storages())

    def storages(self) -> list[Tensor]:
        """The tensors that hold the bank, [E, …] each."""
        return [self.words] if self.scale is None else [self.words, self.scale]


def _blocks(raw: np.ndarray) -> np.ndarray:
    """Q4_1 rows as int32 [N, 5·K/32]."""
    words = np.ascontiguousarray(raw).view("<i4")
    halves = np.ascontiguousarray(words.reshape(len(words), -1, 5)[:, :, 0]).view("<f2")
    if not np.isfinite(halves).all():
        raise ModelError("a Q4_1 tensor has a scale that is not a finite half-precision number: damaged file")
    return words
