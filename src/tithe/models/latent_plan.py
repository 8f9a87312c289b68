"""The forward of latent attention on fixed buffers: launches built once and replayed, for any rows and adapters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tithe.models.buffers import RowBuffers, Scratch, is_bf16
from tithe.models.decoder import Decoder
from tithe.models.kv import PAGE, KVPages
from tithe.models.latent import NORM_EPS, HeadRows, LatentAdapter, LatentLayer, Stored
from tithe.models.latent_kernels import HEAD_CHUNK, finish_latent, latent_attention, place_queries
from tithe.models.linear import LinearAdapter
from tithe.quant import Launch
from tithe.quant.grouped import (
    GroupedLaunch,
    PanelScratch,
    outer_scratch,
    product,
    product_scratch,
    transposed_product,
    transposed_scratch,
)
from tithe.quant.runtime import TASKS

LatentSegment = tuple[int, int, LinearAdapter]


class LatentWorkspace:
    """Arrays by head [heads, R, …] for all layers of a model: nothing in them outlives a layer."""

    def __init__(self, layer: LatentLayer, operand: torch.dtype, rows: int) -> None:
        sizes, heads = layer.sizes, layer.heads
        self.stored = stored = Stored(operand)
        self.rows, self.heads = rows, heads
        self.chunk = min(HEAD_CHUNK, heads)
        self.plain = torch.empty(heads * rows, sizes.qk_nope_head_dim, dtype=stored.dtype)
        self.query = torch.empty(heads * rows, layer.width)
        self.mix = torch.empty(heads * rows, sizes.kv_lora_rank, dtype=stored.dtype)
        self.value = torch.empty(heads * rows, sizes.v_head_dim)
        self._widest = max(sizes.kv_lora_rank, sizes.qk_nope_head_dim, sizes.v_head_dim)
        self.scratch = panel_scratch(self._widest, stored)
        self._u = torch.empty(0)

    def u(self, rank: int) -> Tensor:
        """[heads·R, rank] operands for adapters; the buffer of a wider one is shared by narrower ones."""
        size = self.heads * self.rows * rank
        if self._u.numel() < size:
            self._u = torch.empty(size, dtype=self.stored.dtype)
        return self._u[:size].view(-1, rank)

    def scratch_for(self, rank: int) -> PanelScratch:
        """Scratch that also fits an adapter of this rank."""
        return self.scratch if rank <= self._widest else panel_scratch(rank, self.stored)


def panel_scratch(widest: int, stored: Stored) -> PanelScratch:
    """What a thread expands of a matrix with at most `widest` rows and columns, forward or backward."""
    products = max(product_scratch(widest, stored.dtype), transposed_scratch(widest, stored.dtype))
    return PanelScratch(max(products, outer_scratch(stored.dtype)))


def finish_latent_step(
    decoder: Decoder, layer: LatentLayer, index: int, b: RowBuffers, pages: KVPages, scratch: Scratch
) -> Launch:
    """Biases and norms in the bottlenecks, rotary of the key; latent and key into their page."""
    sizes, bias = layer.sizes, decoder.layers[index].qkv_bias
    queries = b.q_a if b.q_a is not None else b.qkv
    args = [b.qkv.data_ptr(), b.qkv.shape[1], layer.query_columns, sizes.kv_lora_rank, sizes.qk_rope_head_dim]
    args += [t.data_ptr() if t is not None else 0 for t in (bias, layer.q_norm)]
    values = [*args, layer.kv_norm.data_ptr(), NORM_EPS, decoder.cos.data_ptr(), decoder.sin.data_ptr()]
    values += [int(sizes.rope_interleave), b.position.data_ptr(), b.sequence.data_ptr(), b.table.data_ptr()]
    values += [b.table.shape[1], pages.addresses(index)[0], is_bf16(pages.keys), pages.blocks, len(b.x)]
    values += [queries.data_ptr(), is_bf16(queries), scratch.address]
    keep = (layer, b, pages, scratch.buffer)
    return finish_latent.bind(-(-len(b.x) // PAGE), values, keep)


class LatentPlan:
    """Attention of one layer: `run` writes what o_proj reads for the first `rows` rows, from the queries in `b` and
    the pages. `segments` are (start, stop, adapter on kv_b_proj) ranges of rows. Not thread-safe: it belongs to the
    lane."""

    __slots__ = (
        "_adapters",
        "_attend",
        "_heads",
        "_keys",
        "_layer",
        "_out",
        "_place",
        "_tables",
        "_values",
        "_work",
        "args",
        "rows",
        "segments",
    )  # fmt: skip

    def __init__(
        self,
        decoder: Decoder,
        layer: LatentLayer,
        index: int,
        b: RowBuffers,
        pages: KVPages,
        scratch: Scratch,
        work: LatentWorkspace,
    ) -> None:
        self._layer, self._work, self._out, self.args = layer, work, b.att, None
        self.rows = len(b.x)
        self.segments: Sequence[LatentSegment] = ()
        self._adapters: dict[int, tuple[LinearAdapter, _AdapterPlan]] = {}
        self._heads = HeadRows(layer.heads, work.rows)
        sizes, latent = layer.sizes, layer.sizes.kv_lora_rank
        queries = b.q if b.q is not None else b.qkv
        args = [queries.data_ptr(), queries.shape[1], layer.heads, sizes.qk_nope_head_dim, sizes.qk_rope_head_dim]
        args += [latent, decoder.cos.data_ptr(), decoder.sin.data_ptr(), int(sizes.rope_interleave)]
        args += [b.position.data_ptr(), 0, work.rows, work.plain.data_ptr(), work.stored.mode, work.query.data_ptr()]
        self._place = place_queries.bind(0, args, (decoder, b, work))
        tables = layer.tables()
        self._keys = transposed_product(tables.keys, work.plain, work.query[:, :latent], self._heads, work.scratch)
        self._attend = self._attention(decoder, index, b, pages, scratch)
        self._values = product(tables.values, work.mix, work.value, self._heads, work.scratch)

    def _attention(self, decoder: Decoder, index: int, b: RowBuffers, pages: KVPages, scratch: Scratch) -> Launch:
        layer, work, sizes = self._layer, self._work, self._layer.sizes
        args = [work.query.data_ptr(), work.rows, layer.heads, sizes.kv_lora_rank, sizes.qk_rope_head_dim]
        args += [pages.addresses(index)[0], is_bf16(pages.keys), b.table.data_ptr(), b.table.shape[1]]
        args += [b.sequence.data_ptr(), b.position.data_ptr(), work.mix.data_ptr(), work.stored.mode]
        values = [*args, b.lse.data_ptr() if b.lse is not None else 0, decoder.score_scale, scratch.address]
        values += [scratch.floats, b.table.shape[1] * PAGE, pages.blocks, work.chunk]
        return latent_attention.bind(0, values, (b, pages, work, scratch.buffer))

    def forget(self, adapter: LinearAdapter | None) -> None:
        """Drop the launches of an adapter that is no longer served."""
        self._adapters.pop(id(adapter), None)

    def _plan(self, adapter: LinearAdapter) -> _AdapterPlan:
        if id(adapter) not in self._adapters:
            plan = _AdapterPlan(LatentAdapter.of(adapter, self._layer), self._work)
            self._adapters[id(adapter)] = (adapter, plan)
        return self._adapters[id(adapter)][1]

    def run(self) -> None:
        """Attend."""
        n, work, heads = self.rows, self._work, self._layer.heads
        if n == 0:
            return
        plans = [self._plan(adapter) for start, stop, adapter in self.segments if stop > start]
        for plan, (start, stop, _) in zip(plans, (s for s in self.segments if s[1] > s[0]), strict=True):
            plan.heads.select(start, stop)
        self._heads.select(0, n)
        self._place.args[TASKS], self._place.args[13] = -(-n // 8), n
        self._place.run()
        self._keys.run()
        for launch in (launch for plan in plans for launch in plan.keys):
            launch.run()
        self._attend.args[TASKS] = n * -(-heads // work.chunk)
        self._attend.run()
        self._values.run()
        for launch in (launch for plan in plans for launch in plan.values):
            launch.run()
        by_head = work.value.view(heads, work.rows, -1)[:, :n]
        self._out[:n].view(n, heads, -1).copy_(by_head.transpose(0, 1))


class _AdapterPlan:
    """An adapter's launches on rows of its own: q += scale·(q·Bₖ)·A, and v += scale·(m·Aᵀ)·Bᵥᵀ."""

    def __init__(self, adapter: LatentAdapter, work: LatentWorkspace) -> None:
        self.heads = heads = HeadRows(work.heads, work.rows)
        a, b, scale, rounded = adapter.a, adapter.b, adapter.scale, work.stored.is_rounded
        scratch = work.scratch_for(adapter.rank)
        u, query = work.u(adapter.rank), work.query[:, : work.mix.shape[1]]
        self.keys: list[GroupedLaunch] = [
            transposed_product(b.keys, work.plain, u, heads, scratch, rounded_out=rounded),
            transposed_product(a, u, query, heads, scratch, add=True, factor=scale),
        ]
        self.values: list[GroupedLaunch] = [
            product(a, work.mix, u, heads, scratch, rounded_out=rounded),
            product(b.values, u, work.value, heads, scratch, add=True, factor=scale),
        ]
