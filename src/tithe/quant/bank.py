"""`PackedBank`: the matrices of a layer's experts, equal in shape and storage, one after the other in one storage.

Each part of a packed matrix (data, scales, zeros: see `tithe.quant.matrix`) gains a first dimension E. A kernel finds
expert e at `source()` plus e times `strides()`; Python takes it as `bank[e]`, a matrix on the same memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from tithe.quant.matrix import PackedMatrix


@dataclass(frozen=True, eq=False)
class PackedBank:
    """E frozen matrices W [E, rows N, columns K]; make one with `stack`, or with `allocate` and `put`.

    Example: three experts of one gate, 48 by 64 in INT4::

        bank = PackedBank.allocate(first, 3)   # first: the packed matrix of expert 0
        bank.put(0, first)                     # copied, so that `first` may go
        y = bank[0].matmul(x)                  # no copy
    """

    stacked: PackedMatrix
    """Shape, kind and rounding of one expert; its tensors hold all of them, [E, …]."""

    @classmethod
    def allocate(cls, like: PackedMatrix, count: int) -> PackedBank:
        """A bank for `count` matrices of the shape and storage of `like`, all zero."""
        if count < 1:
            raise ValueError(f"a bank holds at least one matrix, not {count}")
        parts = {name: part.new_zeros(count, *part.shape) for name, part in like.parts().items()}
        return cls(replace(like, **parts))

    def __len__(self) -> int:
        """Number of experts E."""
        return self.stacked.data.shape[0]

    def __getitem__(self, e: int) -> PackedMatrix:
        """Expert e as a matrix on the bank's memory; `IndexError` outside 0..E-1."""
        if not 0 <= e < len(self):
            raise IndexError(f"expert {e} of a bank of {len(self)}")
        return replace(self.stacked, **{name: part[e] for name, part in self.stacked.parts().items()})

    def __iter__(self) -> Iterator[PackedMatrix]:
        """The experts in ascending order."""
        return (self[e] for e in range(len(self)))

    def put(self, e: int, matrix: PackedMatrix) -> None:
        """Copy a matrix in as expert e; `ValueError` unless shape, storage and rounding are the bank's."""
        place = self[e]
        same = all(getattr(place, f) == getattr(matrix, f) for f in ("kind", "rows", "columns", "rounded"))
        mine, theirs = place.parts(), matrix.parts()
        if not same or mine.keys() != theirs.keys() or any(mine[n].shape != theirs[n].shape for n in mine):
            raise ValueError(
                f"expert {e} is {matrix.kind.name} {matrix.rows}×{matrix.columns}, the bank {self.stacked.kind.name} "
                f"{self.rows}×{self.columns} (rounded: {matrix.rounded}, {self.rounded})"
            )
        for name, part in mine.items():
            part.copy_(theirs[name])

    @property
    def name(self) -> str:
        """What the elements are, as `PackedMatrix.name`."""
        return self.stacked.name

    @property
    def rows(self) -> int:
        """Rows N of one expert."""
        return self.stacked.rows

    @property
    def columns(self) -> int:
        """Columns K of one expert."""
        return self.stacked.columns

    @property
    def panels(self) -> int:
        """48-row panels of one expert."""
        return self.stacked.panels

    @property
    def rounded(self) -> bool:
        """Whether W̃ is rounded to bf16."""
        return self.stacked.rounded

    @property
    def n_bytes(self) -> int:
        """Resident bytes of all experts."""
        return self.stacked.n_bytes

    def storages(self) -> list[Tensor]:
        """The tensors that hold the bank, [E, …] each."""
        return self.stacked.storages()

    def source(self) -> list[int]:
        """Kind and the addresses of expert 0's data, scales and zeros (0: none), as kernels are told."""
        return self.stacked.source()

    def strides(self) -> list[int]:
        """Bytes from one expert's data, scales and zeros to the next one's (0: none)."""
        parts = (self.stacked.data, self.stacked.scale, self.stacked.zero)
        return [0 if part is None else part.stride(0) * part.element_size() for part in parts]

    def dequantized(self) -> PackedBank:
        """The same W̃ in BF16 (or FP32) storage; the bank itself when it is dense already."""
        first = self[0].dequantized()
        if first.kind == self.stacked.kind:
            return self
        dense = PackedBank.allocate(first, len(self))
        for e, matrix in enumerate(self):
            dense.put(e, matrix.dequantized())
        return dense


def stack(matrices: Sequence[PackedMatrix]) -> PackedBank:
    """A bank with copies of these matrices; `ValueError` unless they agree in shape and storage, or for none."""
    if not matrices:
        raise ValueError("a bank holds at least one matrix")
    bank = PackedBank.allocate(matrices[0], len(matrices))
    for e, matrix in enumerate(matrices):
        bank.put(e, matrix)
    return bank
