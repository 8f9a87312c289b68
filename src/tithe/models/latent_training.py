"""The backward of latent attention: through scores and kv_b_proj by head, both bottlenecks, and their adapters.

With q' = q·(W̃ₖ + s·BₖA) for scores and v = (W̃ᵥ + s·BᵥA)·m for the answer (`tithe.models.latent`), an adapter on
kv_b_proj gets gradients on both ways: dA from queries and from what was mixed, dB in its rows for keys and for values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tithe.models.buffers import RowBuffers, Scratch, is_bf16
from tithe.models.decoder import Decoder, padded
from tithe.models.kv import KVPages
from tithe.models.latent import NORM_EPS, HeadRows, LatentAdapter, LatentLayer
from tithe.models.latent_gradients import (
    BLOCK,
    finish_latent_backward,
    latent_attention_backward,
    place_queries_backward,
)
from tithe.models.latent_plan import LatentWorkspace
from tithe.models.layout import PageLayout
from tithe.models.linear_training import Slots
from tithe.models.train_adapter import SiteGradient
from tithe.quant.grouped import Groups, outer, product, transposed_product, turn, turned_columns


class LatentBackward:
    """Copies and gradients of latent attention in all layers. `att` [slots, R, heads·V] is what o_proj read."""

    def __init__(
        self,
        decoder: Decoder,
        b: RowBuffers,
        pages: KVPages,
        work: LatentWorkspace,
        sequences: int,
        positions: int,
        slots: Slots,
    ) -> None:
        layer = decoder.layers[0].latent
        assert layer is not None
        rows, heads, operand = len(b.x), layer.heads, decoder.options.operand_dtype
        self._decoder, self._buffers, self._pages, self._work, self._slots = decoder, b, pages, work, slots
        pairs = heads * rows
        self._plain = torch.empty(slots.count, pairs * layer.sizes.qk_nope_head_dim, dtype=work.stored.dtype)
        self._query = torch.empty(slots.count, pairs * layer.width)
        self._mix = torch.empty(slots.count, pairs * layer.sizes.kv_lora_rank, dtype=work.stored.dtype)
        self._lse = torch.empty(slots.count, rows, heads)
        self.down = torch.empty(slots.count, rows, b.qkv.shape[1])
        self.att = torch.empty(slots.count, rows, b.att.shape[1], dtype=operand)
        longest, block = padded(positions), max(1, BLOCK // heads) * heads
        floats = block * (2 * layer.width + layer.sizes.kv_lora_rank + 2 * longest) + 16 * layer.width
        self._scratch = Scratch(max(floats, heads * layer.sizes.qk_head_dim))
        self._d_page = torch.empty(sequences, longest, layer.width)
        self.d_down = torch.empty(rows, b.qkv.shape[1], dtype=operand)

    def save(self, i: int, stage: str, layout: PageLayout) -> None:
        """Copy what the backward of layer i will read, after a stage of its forward. Arrays by head leave padding out:
        it would shift the rows of a head, and with them the steps of sums."""
        n = len(layout.segment)
        b, work, slot = self._buffers, self._work, self._slots[i]
        if stage == "finish":
            self.down[slot, :n] = b.qkv[:n]
        elif stage == "attend":
            assert b.lse is not None
            self._lse[slot, :n] = b.lse[:n]
            self.att[slot, :n] = b.att[:n]
            for kept, source in ((self._plain, work.plain), (self._query, work.query), (self._mix, work.mix)):
                by_head = source.view(work.heads, work.rows, -1)[:, : layout.rows]
                self._by_head(kept[slot], layout.rows).copy_(by_head)

    def _by_head(self, kept: Tensor, n: int) -> Tensor:
        """[heads, n, …] at the beginning of a buffer for all rows."""
        heads, width = self._work.heads, len(kept) // (self._work.heads * self._work.rows)
        return kept[: heads * n * width].view(heads, n, width)

    def _saved(self, i: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """(plain, query, mix) of a layer, [heads·n, …]."""
        slot = self._slots[i]
        kept = (self._by_head(t[slot], n).flatten(0, 1) for t in (self._plain, self._query, self._mix))
        plain, query, mix = kept
        return plain, query, mix

    def queries(
        self, i: int, d_att: Tensor, layout: PageLayout, adapter: LatentAdapter | None, into: SiteGradient | None
    ) -> Tensor:
        """The gradient of queries [n, heads·(N + E)], operands, for that of what o_proj read, float32 [n, heads·V].

        Leaves the gradients of the pages for `finish`, and adds those of an adapter on kv_b_proj to `into`.
        """
        layer, work, n = self._layer(i), self._work, layout.rows
        sizes, latent = layer.sizes, layer.sizes.kv_lora_rank
        plain, query, mix = self._saved(i, n)
        tables, heads = layer.tables(), HeadRows(layer.heads, n)
        heads.select(0, n)
        d_value = work.stored.take(d_att[:n].view(n, layer.heads, -1).transpose(0, 1)).flatten(0, 1)
        d_mix = torch.empty(layer.heads * n, latent)
        transposed_product(tables.values, d_value, d_mix, heads, work.scratch).run()
        share = _Share(adapter, work, heads, n) if adapter is not None else None
        if share is not None:
            share.values(d_value, mix, d_mix, into)
        d_query = self._scores(i, query, d_mix, layout, n)
        d_absorbed = work.stored.take(d_query[:, :latent])
        d_plain = torch.empty(layer.heads * n, sizes.qk_nope_head_dim)
        product(tables.keys, d_absorbed, d_plain, heads, work.scratch).run()
        if share is not None:
            share.keys(d_absorbed, plain, d_plain, into)
        return self._place(layer, d_plain, d_query, layout)

    def _layer(self, i: int) -> LatentLayer:
        layer = self._decoder.layers[i].latent
        assert layer is not None
        return layer

    def _scores(self, i: int, query: Tensor, d_mix: Tensor, layout: PageLayout, n: int) -> Tensor:
        """The gradient of queries as scores read them, [heads·n, C + E]; those of the pages stay in `_d_page`."""
        layer, table, pages = self._layer(i), self._buffers.table, self._pages
        d_query = torch.zeros_like(query)
        self._d_page[: layout.sequences].zero_()
        args: list[int | float] = [query.data_ptr(), d_mix.data_ptr(), n, layer.heads, layer.sizes.kv_lora_rank]
        args += [layer.sizes.qk_rope_head_dim, pages.addresses(i)[0], is_bf16(pages.keys)]
        args += [table.data_ptr(), table.shape[1]]
        args += [t.data_ptr() for t in (layout.start, layout.length, layout.first)]
        args += [self._lse[self._slots[i]].data_ptr(), self._decoder.score_scale, d_query.data_ptr()]
        args += [self._d_page.data_ptr(), self._d_page.shape[1]]
        args += [self._scratch.address, self._scratch.floats, pages.blocks]
        latent_attention_backward.bind(layout.sequences, args).run()
        return d_query

    def _place(self, layer: LatentLayer, d_plain: Tensor, d_query: Tensor, layout: PageLayout) -> Tensor:
        """The gradient of the queries as projected: where there is no bottleneck it begins `d_down`."""
        sizes, decoder, n = layer.sizes, self._decoder, len(layout.segment)
        width = layer.heads * sizes.qk_head_dim
        out = self.d_down[:n, :width] if layer.q_b is None else torch.empty(n, width, dtype=self.d_down.dtype)
        args = [d_plain.data_ptr(), d_query.data_ptr(), layout.rows, layer.heads, sizes.qk_nope_head_dim]
        args += [sizes.qk_rope_head_dim, sizes.kv_lora_rank, layout.segment.data_ptr(), layout.position.data_ptr()]
        args += [decoder.cos.data_ptr(), decoder.sin.data_ptr(), int(sizes.rope_interleave)]
        args += [out.data_ptr(), out.stride(0), is_bf16(out), self._scratch.address]
        place_queries_backward.bind(n, args).run()
        return out

    def finish(self, i: int, layout: PageLayout) -> None:
        """Write the gradient of latent and key before their norm and rotary to the end of `d_down`."""
        layer, decoder = self._layer(i), self._decoder
        sizes, first, down = layer.sizes, layer.query_columns, self.down[self._slots[i]]
        raw, out = down[:, first:], self.d_down[:, first:]
        args: list[int | float] = [self._d_page.data_ptr(), self._d_page.shape[1], sizes.kv_lora_rank]
        args += [sizes.qk_rope_head_dim, layout.segment.data_ptr(), layout.prefix.data_ptr(), layout.sequences]
        args += [layout.position.data_ptr(), decoder.cos.data_ptr(), decoder.sin.data_ptr()]
        args += [int(sizes.rope_interleave), layer.kv_norm.data_ptr(), NORM_EPS, raw.data_ptr(), down.shape[1]]
        args += [out.data_ptr(), out.stride(0), is_bf16(out), self._scratch.address]
        finish_latent_backward.bind(len(layout.segment), args).run()


@dataclass(frozen=True, eq=False)
class _Share:
    """What an adapter on kv_b_proj adds to input gradients, and its own gradients."""

    adapter: LatentAdapter
    work: LatentWorkspace
    heads: HeadRows
    n: int

    def _empty(self) -> Tensor:
        return torch.empty(self.work.heads * self.n, self.adapter.rank, dtype=self.work.stored.dtype)

    def values(self, d_value: Tensor, mix: Tensor, d_mix: Tensor, into: SiteGradient | None) -> None:
        """Of v += s·(m·Aᵀ)·Bᵥᵀ: d_mix += s·(dv·Bᵥ)·A."""
        a, b, scale, heads = self.adapter.a, self.adapter.b.values, self.adapter.scale, self.heads
        scratch, rounded = self.work.scratch_for(self.adapter.rank), self.work.stored.is_rounded
        du, u = self._empty(), self._empty()
        transposed_product(b, d_value, du, heads, scratch, rounded_out=rounded).run()
        transposed_product(a, du, d_mix, heads, scratch, add=True, factor=scale).run()
        product(a, mix, u, heads, scratch, rounded_out=rounded).run()
        if into is not None:
            self._sum_a(du, mix, into)
            self._sum_b(u, d_value, into, keys=False)

    def keys(self, d_absorbed: Tensor, plain: Tensor, d_plain: Tensor, into: SiteGradient | None) -> None:
        """Of q' += s·(q·Bₖ)·A: d_plain += s·(dq'·Aᵀ)·Bₖᵀ."""
        a, b, scale, heads = self.adapter.a, self.adapter.b.keys, self.adapter.scale, self.heads
        scratch, rounded = self.work.scratch_for(self.adapter.rank), self.work.stored.is_rounded
        du, u = self._empty(), self._empty()
        product(a, d_absorbed, du, heads, scratch, rounded_out=rounded).run()
        product(b, du, d_plain, heads, scratch, add=True, factor=scale).run()
        transposed_product(b, plain, u, heads, scratch, rounded_out=rounded).run()
        if into is not None:
            self._sum_a(u, d_absorbed, into)
            self._sum_b(du, plain, into, keys=True)

    def _turned(self, small: Tensor, groups: Groups) -> Tensor:
        columns = turned_columns(len(small), len(groups.begin))
        turned = torch.empty(self.adapter.rank, columns, dtype=small.dtype)
        turn(small, turned, groups, rounded=self.work.stored.is_rounded).run()
        return turned

    def _sum_a(self, small: Tensor, wide: Tensor, into: SiteGradient) -> None:
        """dA [r, C] += s·Σ small·wide over rows and heads."""
        whole = Groups.whole(len(small))
        out, scratch = into.a[None], self.work.scratch
        outer(self._turned(small, whole), wide, out, whole, scratch, factor=self.adapter.scale).run()

    def _sum_b(self, small: Tensor, wide: Tensor, into: SiteGradient, *, keys: bool) -> None:
        """dBᵀ [r, heads·(N + V)] += s·Σ small·wide over rows, in a head's rows for keys or for values."""
        width = wide.shape[1]
        sums = torch.zeros(self.work.heads, self.adapter.rank, width)
        turned = self._turned(small, self.heads)
        outer(turned, wide, sums, self.heads, self.work.scratch, factor=self.adapter.scale).run()
        by_head = into.b_transposed.view(self.adapter.rank, self.work.heads, -1)
        part = by_head[..., :width] if keys else by_head[..., -width:]
        part += sums.transpose(0, 1)
