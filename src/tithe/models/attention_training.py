"""The backward of grouped-query attention: what it keeps of the forward, and its launches."""

from __future__ import annotations

import torch
from torch import Tensor

from tithe.models.attention_gradients import BACKWARD_ROWS, attention_backward, finish_qkv_backward
from tithe.models.buffers import RowBuffers, Scratch, is_bf16
from tithe.models.decoder import Decoder, padded
from tithe.models.kv import KVPages
from tithe.models.layout import PageLayout
from tithe.models.linear_training import Slots


class GroupedBackward:
    """Copies and gradients of queries, keys and values. `att` [slots, R, Hq·D] is what o_proj read."""

    def __init__(
        self, decoder: Decoder, b: RowBuffers, pages: KVPages, sequences: int, positions: int, slots: Slots
    ) -> None:
        spec, rows, operand = decoder.spec, len(b.x), decoder.options.operand_dtype
        self._decoder, self._buffers, self._pages, self._slots = decoder, b, pages, slots
        self._q = torch.empty(slots.count, rows, spec.q_size)
        self._raw = torch.empty(slots.count, rows, spec.q_size + spec.kv_size) if spec.qk_norm else None
        self._lse = torch.empty(slots.count, rows, spec.n_heads)
        self.att = torch.empty(slots.count, rows, spec.q_size, dtype=operand)
        longest = padded(positions)
        width = spec.q_size + 2 * spec.kv_size
        group = spec.n_heads // spec.n_kv_heads
        self._scratch = Scratch(max(2 * BACKWARD_ROWS * group * (spec.head_dim + longest), 2 * width))
        self._dkv = torch.empty(sequences, spec.n_kv_heads, 2, longest, spec.head_dim)
        self._dq = torch.empty(rows, spec.q_size)
        self._dqkv = torch.empty(rows, width, dtype=operand)

    def save(self, i: int, stage: str, layout: PageLayout) -> None:
        """Copy what the backward of layer i will read, after a stage of its forward."""
        n = len(layout.segment)
        b, spec, slot = self._buffers, self._decoder.spec, self._slots[i]
        if stage == "qkv+adapter" and self._raw is not None:
            width = spec.q_size + spec.kv_size
            bias = self._decoder.layers[i].qkv_bias
            self._raw[slot, :n] = b.qkv[:n, :width] if bias is None else b.qkv[:n, :width] + bias[:width]
        elif stage == "attend":
            assert b.lse is not None
            self._q[slot, :n] = b.qkv[:n, : spec.q_size]
            self._lse[slot, :n] = b.lse[:n]
            self.att[slot, :n] = b.att[:n]

    def run(self, i: int, d_att: Tensor, layout: PageLayout) -> Tensor:
        """The gradient of qkv [n, (Hq + 2·Hkv)·D], operands, for that of what o_proj read, float32 [n, Hq·D]."""
        self._scores(i, d_att, layout)
        self._finish(i, len(d_att), layout)
        return self._dqkv[: len(d_att)]

    def _scores(self, i: int, d_att: Tensor, layout: PageLayout) -> None:
        spec, slot, pages = self._decoder.spec, self._slots[i], self._pages
        keys = pages.keys[:, i].transpose(-1, -2).contiguous()
        values = pages.values[:, i].transpose(-1, -2).contiguous()
        self._dkv[: layout.sequences].zero_()
        q, table = self._q[slot], self._buffers.table
        args: list[int | float] = [q.data_ptr(), q.shape[1], spec.n_heads, spec.n_kv_heads, spec.head_dim]
        args += [d_att.data_ptr()]
        args += [pages.addresses(i)[0], keys.data_ptr(), values.data_ptr(), is_bf16(keys)]
        args += [table.data_ptr(), table.shape[1]]
        args += [t.data_ptr() for t in (layout.start, layout.length, layout.first)]
        args += [self._lse[slot].data_ptr(), self._decoder.score_scale]
        args += [self._dq.data_ptr(), self._dkv.data_ptr(), self._dkv.shape[3]]
        args += [self._scratch.address, self._scratch.floats, pages.blocks, self._decoder.window(i)]
        attention_backward.bind(layout.sequences * spec.n_kv_heads, args).run()

    def _finish(self, i: int, n: int, layout: PageLayout) -> None:
        decoder, spec, layer = self._decoder, self._decoder.spec, self._decoder.layers[i]
        raw = self._raw
        args = [self._dq.data_ptr(), self._dkv.data_ptr(), self._dkv.shape[3]]
        args += [spec.n_heads, spec.n_kv_heads, spec.head_dim]
        args += [layout.segment.data_ptr(), layout.prefix.data_ptr(), layout.sequences, layout.position.data_ptr()]
        args += [decoder.cos.data_ptr(), decoder.sin.data_ptr()]
        args += [t.data_ptr() if t is not None else 0 for t in (layer.q_norm, layer.k_norm)]
        args += [raw[self._slots[i]].data_ptr() if raw is not None else 0, raw.shape[2] if raw is not None else 0]
        values = [*args, float(spec.rms_norm_eps), self._dqkv.data_ptr(), is_bf16(self._dqkv), self._scratch.address]
        finish_qkv_backward.bind(n, [*values, spec.rotary_dim // 2, int(spec.norms_qk == "full")]).run()
