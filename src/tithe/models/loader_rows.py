"""Rows of a matrix as a checkpoint has them, read in blocks: of one tensor, of one expert in a stack of them, or of
several that lie one below the other.

A block is a map from the ends of tensor names to bytes (`tithe.arch.layouts`), as `tithe.quant.repack_parts` takes it;
a format that lies in one tensor has the empty end. Only what a block needs is touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from tithe.arch import StoredFormat, TensorEntry, TensorFormat

BLOCK_SIDE: Final = 128
"""Rows that share a scale of FP8_BLOCK."""
_BY_OUTPUT: Final = frozenset({TensorFormat.GPTQ, TensorFormat.AWQ})
"""Formats whose tensors have the outputs along their second dimension."""

Block = Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Piece:
    """One stored matrix [rows, columns]; `expert` picks it from a stack, which an unpacked file may hold as
    (…, in, out) (`is_transposed`)."""

    entry: TensorEntry
    expert: int | None = None
    is_transposed: bool = False

    @property
    def stored(self) -> StoredFormat:
        """Format."""
        return self.entry.stored

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        rows, columns = self.entry.shape[-2:]
        return (columns, rows) if self._is_turned else (rows, columns)

    @property
    def _is_turned(self) -> bool:
        return self.is_transposed and not self.entry.parts

    def read(self, start: int, stop: int) -> Block:
        """Rows start..stop. `start` is a multiple of `BLOCK_SIDE`, so that scales and words are whole."""
        if not self.entry.parts:
            return {"": self._plain(start, stop)}
        parts = {suffix: self._cut(part, start, stop) for suffix, part in self.entry.read_parts(self.expert).items()}
        scale = self.entry.parts.get(".weight_scale_inv")
        if scale is not None and scale.dtype == "BF16":  # the format's own dtype is float32
            parts[".weight_scale_inv"] = parts[".weight_scale_inv"].view(np.uint16)
        return parts

    @cached_property
    def _order(self) -> np.ndarray | None:
        return self.entry.row_order()

    def _plain(self, start: int, stop: int) -> np.ndarray:
        """uint8 [stop - start, bytes per row]."""
        rows, columns = self.shape
        if self.expert is None:
            raw = self.entry.read_file_order()
            return raw[start:stop] if self._order is None else raw[self._order[start:stop]]
        raw = self.entry.read_slice(self.expert, self.expert + 1)
        if not self._is_turned:
            return raw.reshape(rows, -1)[start:stop]
        turned = raw.reshape(columns, rows, -1)[:, start:stop]
        return np.ascontiguousarray(turned.swapaxes(0, 1)).reshape(stop - start, -1)

    def _cut(self, part: np.ndarray, start: int, stop: int) -> np.ndarray:
        """The share of rows start..stop in one tensor of a compound format."""
        rows = self.shape[0]
        if part.ndim == 1:  # one for the whole matrix
            return part
        if self.stored.kind in _BY_OUTPUT:
            width = part.shape[1]
            return part[:, start * width // rows : stop * width // rows]
        if len(part) == rows:
            return part[start:stop]
        return part[start // BLOCK_SIDE : -(-stop // BLOCK_SIDE)]


@dataclass(frozen=True, eq=False)
class Rows:
    """A matrix made of `pieces` of one width and format, one below the other; see `can_stack`."""

    pieces: tuple[Piece, ...]

    @property
    def name(self) -> str:
        """For messages."""
        first = self.pieces[0]
        return first.entry.name if first.expert is None else f"{first.entry.name}[{first.expert}]"

    @property
    def stored(self) -> StoredFormat:
        """The format of all pieces."""
        return self.pieces[0].stored

    @property
    def rows(self) -> int:
        """Rows of all pieces together."""
        return sum(piece.shape[0] for piece in self.pieces)

    @property
    def columns(self) -> int:
        """Width."""
        return self.pieces[0].shape[1]

    def read(self, start: int, stop: int) -> Block:
        """Rows start..stop; `start` is a multiple of `BLOCK_SIDE`. Views of one piece, copies where pieces meet."""
        found: list[Block] = []
        first = 0
        for piece in self.pieces:
            last = first + piece.shape[0]
            if first < stop and start < last:
                found.append(piece.read(max(start - first, 0), min(stop, last) - first))
            first = last
        if len(found) == 1:
            return found[0]
        axis = 1 if self.stored.kind in _BY_OUTPUT else 0
        return {suffix: _join([block[suffix] for block in found], axis) for suffix in found[0]}

    def release(self) -> None:
        """Let go of what reading brought into memory."""
        for piece in self.pieces:
            piece.entry.release(piece.expert)


def _join(parts: Sequence[np.ndarray], axis: int) -> np.ndarray:
    """One below the other; what is one for the whole matrix stays one."""
    return parts[0] if parts[0].ndim == 1 else np.concatenate(parts, axis)


def can_stack(pieces: Sequence[Piece]) -> bool:
    """Whether pieces can be the rows of one packed matrix: one format and width; FP8 scales may not straddle two
    pieces, and NVFP4 has one global scale."""
    first = pieces[0]
    if any(p.stored != first.stored or p.shape[1] != first.shape[1] for p in pieces):
        return False
    if first.stored.kind is TensorFormat.FP8_BLOCK:
        return all(p.shape[0] % BLOCK_SIDE == 0 for p in pieces[:-1])
    if first.stored.kind is TensorFormat.NVFP4:
        scales = {p.entry.read_parts(p.expert)[".weight_scale_2"].tobytes() for p in pieces}
        return len(scales) == 1
    return True
