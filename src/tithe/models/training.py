"""Forward with memory and backward of the decoder, by hand: the base gives input gradients only, adapters give theirs.

The forward is the sampler's own (`ForwardPlan`, the same kernels on the same pages), with copies taken between stages.
The backward walks the layers in reverse; W̃ is expanded, as panels of its transpose, for one linear at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tithe.errors import ModelError
from tithe.models.attention_gradients import BACKWARD_ROWS, attention_backward, finish_qkv_backward
from tithe.models.decoder import Decoder, padded
from tithe.models.dropout import AdapterDropout
from tithe.models.expert_bank import ExpertBlock
from tithe.models.expert_training import expert_backward
from tithe.models.forward import ROWS_PER_TASK, ForwardPlan, Scratch, is_bf16, is_gated, norm_step
from tithe.models.gradients import rms_norm_backward, swiglu_backward
from tithe.models.kv import KVPages
from tithe.models.layout import PageLayout
from tithe.models.linear import Linear
from tithe.models.train_adapter import AdapterGradients, TrainAdapter
from tithe.quant.matrix import LowRank, pack_transposed, transposed_numel


class _Saved:
    """Copies of what the backward reads, [slots, rows, …]: a slot a layer, or just one when layers are recomputed."""

    def __init__(self, decoder: Decoder, rows: int, widths: Mapping[str, int], checkpointing: bool) -> None:
        spec, operand = decoder.spec, decoder.options.operand_dtype
        layers = spec.n_layers
        slots = 1 if checkpointing else layers
        self.slots = slots
        self.x_in = torch.empty(layers, rows, spec.hidden_size)
        self.q = torch.empty(slots, rows, spec.q_size)
        self.raw = torch.empty(slots, rows, spec.q_size + spec.kv_size) if spec.qk_norm else None
        self.lse = torch.empty(slots, rows, spec.n_heads)
        self.att = torch.empty(slots, rows, spec.q_size, dtype=operand)
        self.x_mid = torch.empty(slots, rows, spec.hidden_size)
        self.gate_up = torch.empty(slots, rows, 2 * decoder.dense_width, dtype=operand)
        self.u = {place: torch.empty(slots, rows, width, dtype=operand) for place, width in widths.items()}

    def slot(self, layer: int) -> int:
        return layer if self.slots > 1 else 0


@dataclass(frozen=True)
class Capacity:
    """What a pass has room for."""

    rows: int
    sequences: int
    pages: int
    positions: int

    def holds(self, other: Capacity) -> bool:
        """Whether every part is enough."""
        return (
            self.rows >= other.rows
            and self.sequences >= other.sequences
            and self.pages >= other.pages
            and self.positions >= other.positions
        )

    def union(self, other: Capacity) -> Capacity:
        """Room for both."""
        return Capacity(
            max(self.rows, other.rows),
            max(self.sequences, other.sequences),
            max(self.pages, other.pages),
            max(self.positions, other.positions),
        )


class TrainPass:
    """Buffers and launches for micro-batches up to a capacity. Not thread-safe: it belongs to the lane.

    `forward` then `backward`, strictly in turn; `backward` adds to an `AdapterGradients`.
    """

    def __init__(
        self,
        decoder: Decoder,
        capacity: Capacity,
        widths: Mapping[str, int],
        *,
        checkpointing: bool = False,
        dropout: float = 0.0,
    ) -> None:
        self.decoder, self.capacity, self.checkpointing = decoder, capacity, checkpointing
        spec, operand = decoder.spec, decoder.options.operand_dtype
        rows = capacity.rows
        self.pages = KVPages(spec, capacity.pages + 1, operand)  # the last one takes what padding rows write
        self.dropout = AdapterDropout(decoder, rows, dropout) if dropout > 0 else None
        self.saved = _Saved(decoder, rows, widths, checkpointing)
        self.plan = ForwardPlan(
            decoder,
            self.pages,
            max_rows=rows,
            sequences=capacity.sequences + 1,
            max_positions=capacity.positions,
            with_lse=True,
            adapter_inputs=self.dropout.buffers if self.dropout is not None else None,
            kept=[self.saved.gate_up[self.saved.slot(i)] for i in range(spec.n_layers)],
        )
        self.plan.buffers.table[capacity.sequences] = capacity.pages
        self._widths = widths
        longest = padded(capacity.positions)
        group = spec.n_heads // spec.n_kv_heads
        floats = 2 * BACKWARD_ROWS * group * (spec.head_dim + longest)
        self._scratch = Scratch(max(floats, 3 * decoder.dense_width, 2 * (spec.q_size + 2 * spec.kv_size)))
        self._dkv = torch.empty(capacity.sequences, spec.n_kv_heads, 2, longest, spec.head_dim)
        self._dq = torch.empty(rows, spec.q_size)
        self._dqkv = torch.empty(rows, spec.q_size + 2 * spec.kv_size, dtype=operand)
        self._d_gate_up = torch.empty(rows, 2 * decoder.dense_width, dtype=operand)
        self._act = torch.empty(rows, decoder.dense_width, dtype=operand)
        self._operand = operand
        parts = [part for linear in decoder.linears() for part in linear.parts]
        self._weights = torch.empty(max(part.transposed_numel for part in parts), dtype=operand)
        widest = max(spec.hidden_size, decoder.dense_width, spec.q_size)
        self._panels = torch.empty(transposed_numel(rows, widest), dtype=operand)
        self._n = 0
        self._layout: PageLayout | None = None
        self._adapter: TrainAdapter | None = None

    def forward(
        self,
        ids: np.ndarray,
        layout: PageLayout,
        adapter: TrainAdapter | None,
        *,
        keep: bool = True,
        replay: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """x [R, H] float32 (a view) for int64 ids [R]. `keep` False saves nothing (scoring); `replay` as in
        `ForwardPlan.begin`."""
        on_experts = adapter is not None and any(block is not None for block in adapter.model.experts)
        if self.dropout is not None and on_experts:
            raise ModelError("lora.dropout above 0 is not supported for adapters on experts; set lora.dropout to 0")
        n = len(ids)
        b = self.plan.buffers
        b.position[:n] = layout.position
        b.sequence[:n] = torch.where(layout.segment < 0, self.capacity.sequences, layout.segment)
        b.table[: layout.sequences, : layout.table.shape[1]] = layout.table
        self._n, self._layout, self._adapter = n, layout, adapter
        model = adapter.model if adapter is not None else None
        tokens = torch.from_numpy(ids.astype(np.int32))
        plans = self.plan.begin(tokens, [(0, n, model)], replay)
        for i in range(len(self.decoder.layers)):
            if keep:
                self.saved.x_in[i, :n] = b.x[:n]
            self.plan.run_layer(i, plans, self._tap if keep and not self.checkpointing else self._fork_only)
        self._plans = plans
        return b.x[:n]

    def _fork_only(self, i: int, stage: str) -> None:
        layout = self._layout
        assert layout is not None
        if stage == "finish" and len(layout.fork_source):
            self.pages.fork_step(i, layout.fork_source, layout.fork_target, layout.fork_slots).run()
        place = stage.removesuffix("+input")
        if self.dropout is not None and place != stage:
            self.dropout.fill(i, place, self.plan.buffers.inputs()[place], self._n)

    def _tap(self, i: int, stage: str) -> None:
        """Fork shared pages, then copy what the backward will read."""
        self._fork_only(i, stage)
        n, b, saved = self._n, self.plan.buffers, self.saved
        slot, spec = saved.slot(i), self.decoder.spec
        if stage == "qkv+adapter" and saved.raw is not None:
            width = spec.q_size + spec.kv_size
            bias = self.decoder.layers[i].qkv_bias
            saved.raw[slot, :n] = b.qkv[:n, :width] if bias is None else b.qkv[:n, :width] + bias[:width]
        elif stage == "attend":
            assert b.lse is not None
            saved.q[slot, :n] = b.qkv[:n, : spec.q_size]
            saved.lse[slot, :n] = b.lse[:n]
            saved.att[slot, :n] = b.att[:n]
        elif stage == "o+adapter":
            saved.x_mid[slot, :n] = b.x[:n]
        elif stage == "activate" and not is_gated(self.decoder, self.decoder.layers[i]):
            saved.gate_up[slot, :n] = b.gate_up[:n]
        place = stage.removesuffix("+adapter")
        if stage.endswith("+adapter") and place in saved.u:
            width = self._widths[place]
            saved.u[place][slot, :n] = self.plan.u[:n, :width]

    # ------------------------------------------------------------------ backward

    def backward(self, dx: Tensor, grads: AdapterGradients) -> None:
        """Add adapter gradients for dx [R, H] float32, the gradient of x after all layers (overwritten)."""
        layers = self.decoder.layers
        for i in range(len(layers) - 1, -1, -1):
            if self.checkpointing:
                self.plan.buffers.x[: self._n] = self.saved.x_in[i, : self._n]
                self.plan.run_layer(i, self._plans, self._tap)
            self._mlp_backward(i, dx, grads)
            self._attention_backward(i, dx, grads)

    def _experts_backward(self, i: int, block: ExpertBlock, dx: Tensor, grads: AdapterGradients) -> None:
        n, layer, eps = self._n, self.decoder.layers[i], self.decoder.spec.rms_norm_eps
        plan, workspace = self.plan.experts[i], self.plan.workspace
        assert plan is not None
        assert workspace is not None
        x, normed = self.saved.x_mid[self.saved.slot(i), :n], self.plan.buffers.xn[:n]
        norm_step(x, layer.post_norm, normed, eps, self._scratch).run()
        d_normed = torch.zeros(n, self.decoder.spec.hidden_size)
        adapter = self._adapter.model.experts[i] if self._adapter is not None else None
        expert_backward(block, workspace, normed, plan.routed, dx, d_normed, adapter, grads.experts[i])
        norm_backward(x, layer.post_norm, d_normed, dx, eps)

    def _mlp_backward(self, i: int, dx: Tensor, grads: AdapterGradients) -> None:
        layer, n, slot = self.decoder.layers[i], self._n, self.saved.slot(i)
        if layer.experts is not None:
            self._experts_backward(i, layer.experts, dx, grads)
            return
        assert layer.gate_up is not None
        assert layer.down is not None
        dy = dx.to(self._operand)
        du, d_act = self._linear_backward(i, "down", layer.down, dy)
        gate_up, width = self.saved.gate_up[slot], layer.down.columns
        args = [gate_up.data_ptr(), d_act.data_ptr(), width, self._d_gate_up.data_ptr(), self._act.data_ptr()]
        args += [is_bf16(gate_up), self._scratch.address, ROWS_PER_TASK, n]
        swiglu_backward.bind(-(-n // ROWS_PER_TASK), args).run()
        self._weight_gradients(i, "down", dy, du, self._act[:n], grads)
        d_gate_up = self._d_gate_up[:n]
        self._through_norm(i, "gate_up", layer.gate_up, d_gate_up, self.saved.x_mid[slot], layer.post_norm, dx, grads)

    def _attention_backward(self, i: int, dx: Tensor, grads: AdapterGradients) -> None:
        layer, n, slot = self.decoder.layers[i], self._n, self.saved.slot(i)
        dy = dx.to(self._operand)
        du, d_att = self._linear_backward(i, "o", layer.o, dy)
        self._weight_gradients(i, "o", dy, du, self.saved.att[slot, :n], grads)
        self._scores_backward(i, d_att)
        self._finish_backward(i)
        self._through_norm(i, "qkv", layer.qkv, self._dqkv[:n], self.saved.x_in[i], layer.input_norm, dx, grads)

    def _scores_backward(self, i: int, d_att: Tensor) -> None:
        spec, layout, slot = self.decoder.spec, self._layout, self.saved.slot(i)
        assert layout is not None
        keys = self.pages.keys[:, i].transpose(-1, -2).contiguous()
        values = self.pages.values[:, i].transpose(-1, -2).contiguous()
        self._dkv[: layout.sequences].zero_()
        q, table = self.saved.q[slot], self.plan.buffers.table
        args: list[int | float] = [q.data_ptr(), q.shape[1], spec.n_heads, spec.n_kv_heads, spec.head_dim]
        args += [d_att.data_ptr()]
        args += [self.pages.addresses(i)[0], keys.data_ptr(), values.data_ptr(), is_bf16(keys)]
        args += [table.data_ptr(), table.shape[1]]
        args += [t.data_ptr() for t in (layout.start, layout.length, layout.first)]
        args += [self.saved.lse[slot].data_ptr(), 1.0 / math.sqrt(spec.head_dim)]
        args += [self._dq.data_ptr(), self._dkv.data_ptr(), self._dkv.shape[3]]
        args += [self._scratch.address, self._scratch.floats, self.pages.blocks, self.decoder.window(i)]
        attention_backward.bind(layout.sequences * spec.n_kv_heads, args).run()

    def _finish_backward(self, i: int) -> None:
        decoder, layout, slot = self.decoder, self._layout, self.saved.slot(i)
        spec, layer = decoder.spec, decoder.layers[i]
        assert layout is not None
        raw = self.saved.raw
        args = [self._dq.data_ptr(), self._dkv.data_ptr(), self._dkv.shape[3]]
        args += [spec.n_heads, spec.n_kv_heads, spec.head_dim]
        args += [layout.segment.data_ptr(), layout.prefix.data_ptr(), layout.sequences, layout.position.data_ptr()]
        args += [decoder.cos.data_ptr(), decoder.sin.data_ptr()]
        args += [t.data_ptr() if t is not None else 0 for t in (layer.q_norm, layer.k_norm)]
        args += [raw[slot].data_ptr() if raw is not None else 0, raw.shape[2] if raw is not None else 0]
        values = [*args, float(spec.rms_norm_eps), self._dqkv.data_ptr(), is_bf16(self._dqkv), self._scratch.address]
        values += [spec.rotary_dim // 2, int(spec.norms_qk == "full")]
        finish_qkv_backward.bind(self._n, values).run()

    def _through_norm(
        self,
        i: int,
        place: str,
        linear: Linear,
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        dx: Tensor,
        grads: AdapterGradients,
    ) -> None:
        """Gradients of a linear that reads a normed residual; its share is added to dx."""
        n, eps = self._n, self.decoder.spec.rms_norm_eps
        du, d_normed = self._linear_backward(i, place, linear, dy)
        if du is not None:
            normed = self.plan.buffers.xn[:n]
            norm_step(x[:n], weight, normed, eps, self._scratch).run()
            self._weight_gradients(i, place, dy, du, normed, grads)
        norm_backward(x[:n], weight, d_normed, dx, eps)

    # ------------------------------------------------------------------ linears and their adapters

    def _linear_backward(self, i: int, place: str, linear: Linear, dy: Tensor) -> tuple[Tensor | None, Tensor]:
        """(du, d_input): du = dy·B for all sites of the place side by side (operand, unscaled; None without an
        adapter), d_input = dy·W̃ + scale·du·A, float32 [R, in]."""
        assert self._adapter is not None
        found = self._adapter.places[i].get(place)
        du, added = None, list[LowRank]()
        if found is not None:
            du = torch.zeros(dy.shape[0], found.width, dtype=self._operand)
            for s in found.sites:
                columns = du[:, s.start : s.start + s.rank]
                s.b_transposed.matmul(dy[:, s.site.start : s.site.stop], columns)
                added.append((columns, s.a_transposed, s.scale))
        d_input = torch.empty(dy.shape[0], linear.columns)
        start = 0
        for part in linear.parts:
            transposed = part.transposed(self._weights[: part.transposed_numel])
            ends = start + part.rows == linear.rows and self.dropout is None
            rows = dy[:, start : start + part.rows]
            transposed.matmul(rows, d_input, add=start > 0, low_rank=added if ends else ())
            start += part.rows
        if self.dropout is not None and added:
            share = torch.zeros_like(d_input)
            for u, a_transposed, scale in added:
                a_transposed.matmul(u, share, add=True, factor=scale)
            d_input += self.dropout.apply_mask(i, place, share)
        return du, d_input

    def _weight_gradients(
        self, i: int, place: str, dy: Tensor, du: Tensor | None, x: Tensor, grads: AdapterGradients
    ) -> None:
        """dA += scale·duᵀ·x and dBᵀ += scale·uᵀ·dy for the sites of a place."""
        if du is None:
            return
        assert self._adapter is not None
        if self.dropout is not None:
            x = self.dropout.apply_mask(i, place, x)
        u = self.saved.u[place][self.saved.slot(i), : self._n]
        du_t, u_t = _even_transpose(du), _even_transpose(u)
        inputs = pack_transposed(x, self._panels)
        for s, into in zip(self._adapter.places[i][place].sites, grads.places[i][place], strict=True):
            rows = slice(s.start, s.start + s.rank)
            inputs.matmul(du_t[rows], into.a, add=True, factor=s.scale)
        for s, into in zip(self._adapter.places[i][place].sites, grads.places[i][place], strict=True):
            rows = slice(s.start, s.start + s.rank)
            outputs = pack_transposed(dy[:, s.site.start : s.site.stop], self._panels)
            outputs.matmul(u_t[rows], into.b_transposed, add=True, factor=s.scale)


def _even_transpose(x: Tensor) -> Tensor:
    """xᵀ with an even number of columns (a zero column follows an odd one): products read pairs."""
    n = x.shape[0]
    if n % 2 == 0:
        return x.t().contiguous()
    return torch.nn.functional.pad(x.t(), (0, 1))


def norm_backward(x: Tensor, weight: Tensor, dy: Tensor, dx: Tensor, eps: float) -> None:
    """dx [R, H] += the input gradient of RMS norm for dy [R, H] (float32, overwritten)."""
    rows, width = x.shape
    args = [x.data_ptr(), weight.data_ptr(), dy.data_ptr(), dx.data_ptr(), width, float(eps), ROWS_PER_TASK, rows]
    rms_norm_backward.bind(-(-rows // ROWS_PER_TASK), args).run()
