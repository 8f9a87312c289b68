"""Latent attention as it lies in memory: the projections out of the bottlenecks, and kv_b_proj head by head.

kv_b_proj [heads·(N + V), C] makes of a latent each head's key (N rows) and value (V rows). It is never applied to
cached latents: a head's part for keys multiplies the query instead (q·W̃ₖ, N → C), and its part for values what
attention mixed of the latents (W̃ᵥ·m, C → V). The same products with other association, so that a token keeps C + E
numbers a layer for all heads. An adapter on kv_b_proj is split the same way: q·(W̃ₖ + s·BₖA) and (W̃ᵥ + s·BᵥA)·m.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tithe.arch.attention import LatentAttention
from tithe.models.linear import Linear, LinearAdapter
from tithe.quant import HAS_BF16_DOT, PackedMatrix
from tithe.quant.grouped import Groups, GroupTable
from tithe.quant.tile import PANEL

NORM_EPS = 1e-6
"""Of the norms in the bottlenecks: what DeepSeek-V3's own code fixes, whatever the config says of other norms."""


@dataclass(frozen=True, eq=False)
class LatentLayer:
    """What a layer of latent attention has besides `qkv` (the projections into the bottlenecks, of queries first) and
    `o`. Without a query bottleneck `qkv` makes the queries themselves, and there is neither `q_norm` nor `q_b`."""

    sizes: LatentAttention
    heads: int
    q_norm: Tensor | None
    q_b: Linear | None
    kv_norm: Tensor
    kv_b: Linear

    @property
    def query_columns(self) -> int:
        """Columns of `qkv`'s output before the latent."""
        return self.heads * self.sizes.qk_head_dim if self.q_b is None else self.q_b.columns

    @property
    def width(self) -> int:
        """C + E: what a position keeps."""
        return self.sizes.cached_per_token

    def tables(self) -> HeadTables:
        """kv_b_proj head by head."""
        return HeadTables.of(self.kv_b.parts, self)

    def storages(self) -> list[Tensor]:
        """The tensors besides the linears'."""
        return [t for t in (self.q_norm, self.kv_norm) if t is not None]


@dataclass(frozen=True, eq=False)
class HeadTables:
    """A matrix on kv_b_proj's rows, head by head: `keys` [heads][N, columns], `values` [heads][V, columns]."""

    keys: GroupTable
    values: GroupTable

    @staticmethod
    def of(parts: Sequence[PackedMatrix], layer: LatentLayer) -> HeadTables:
        """Views: nothing is copied."""
        assert len(parts) == 1
        plain, each = layer.sizes.qk_nope_head_dim, layer.sizes.qk_nope_head_dim + layer.sizes.v_head_dim
        first = [h * each for h in range(layer.heads)]
        return HeadTables(
            rows_table(parts[0], first, plain), rows_table(parts[0], [f + plain for f in first], each - plain)
        )


def rows_table(matrix: PackedMatrix, first: Sequence[int], rows: int) -> GroupTable:
    """One group for each `first`: the matrix's rows first..first + rows, of any kind."""
    addresses = np.zeros((len(first), 5), np.int64)
    for group, row in enumerate(first):
        panel = row // PANEL
        cut = {name: t[panel:] for name, t in matrix.parts().items() if name in matrix.kind.panelled}
        behind = 0 if matrix.kind.is_dense else matrix.first_panel + panel
        view = replace(matrix, rows=matrix.rows - panel * PANEL, first_panel=behind, **cut)
        addresses[group] = [*view.source(), row % PANEL]
    return GroupTable([matrix], addresses, rows, int((-(-(addresses[:, 4] + rows) // PANEL)).max()))


@dataclass(frozen=True, eq=False)
class LatentAdapter:
    """An adapter on kv_b_proj: A for every head, B head by head. `rank` is even."""

    a: GroupTable
    b: HeadTables
    scale: float
    rank: int

    @staticmethod
    def of(adapter: LinearAdapter, layer: LatentLayer) -> LatentAdapter:
        """Views of a linear's adapter."""
        (site,) = adapter.sites
        tables = HeadTables.of((site.b,), layer)
        return LatentAdapter(GroupTable.repeated(adapter.a, layer.heads), tables, site.scale, site.rank)


class HeadRows(Groups):
    """Rows [start, stop) of every head of arrays [heads, capacity, …]."""

    def __init__(self, heads: int, capacity: int) -> None:
        super().__init__(heads)
        self._first = np.arange(heads, dtype=np.int64) * capacity
        self._range = (0, 0)

    def select(self, start: int, stop: int) -> None:
        """Take a range of rows."""
        if (start, stop) != self._range:
            self._range = (start, stop)
            self.set(self._first + start, self._first + stop)


@dataclass(frozen=True)
class Stored:
    """How operands by head are stored: bf16 only where the processor has a dot product for it, else float32, rounded
    where operands are bf16. `mode` as in `tithe.quant.grouped_kernels`."""

    operand: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        """Of the arrays."""
        return torch.bfloat16 if self.mode == 1 else torch.float32

    @property
    def mode(self) -> int:
        """1 bf16, 2 float32 rounded to bf16, 0 float32."""
        return 0 if self.operand == torch.float32 else 1 if HAS_BF16_DOT else 2

    @property
    def is_rounded(self) -> bool:
        """True for float32 that holds bf16 values."""
        return self.mode == 2

    def take(self, x: Tensor) -> Tensor:
        """x as stored operands, adjacent."""
        return x.to(self.operand).to(self.dtype).contiguous()
