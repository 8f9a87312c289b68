"""Forward with memory and backward of the decoder, by hand: the base gives input gradients only, adapters give theirs.

The forward is the sampler's own (`ForwardPlan`, the same kernels on the same pages), with copies taken between stages.
The backward walks the layers in reverse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tithe.errors import ModelError
from tithe.models.attention_training import GroupedBackward
from tithe.models.buffers import ROWS_PER_TASK, Scratch, is_bf16, norm_step
from tithe.models.decoder import Decoder
from tithe.models.dropout import AdapterDropout
from tithe.models.expert_bank import ExpertBlock
from tithe.models.expert_training import expert_backward
from tithe.models.forward import ForwardPlan
from tithe.models.gradients import rms_norm_backward, swiglu_backward
from tithe.models.kv import KVPages
from tithe.models.latent import NORM_EPS, LatentAdapter
from tithe.models.latent_training import LatentBackward
from tithe.models.layout import PageLayout
from tithe.models.linear import Linear
from tithe.models.linear_training import LinearBackward, Slots
from tithe.models.stages import is_gated
from tithe.models.train_adapter import AdapterGradients, TrainAdapter


class _Saved:
    """Copies of the residual stream and of the MLP's hidden rows, [slots, rows, …]."""

    def __init__(self, decoder: Decoder, rows: int, slots: Slots) -> None:
        spec, operand = decoder.spec, decoder.options.operand_dtype
        self.x_in = torch.empty(spec.n_layers, rows, spec.hidden_size)
        self.x_mid = torch.empty(slots.count, rows, spec.hidden_size)
        self.gate_up = torch.empty(slots.count, rows, 2 * decoder.dense_width, dtype=operand)


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
        self._slots = slots = Slots(1 if checkpointing else spec.n_layers)
        self.saved = _Saved(decoder, rows, slots)
        self.plan = ForwardPlan(
            decoder,
            self.pages,
            max_rows=rows,
            sequences=capacity.sequences + 1,
            max_positions=capacity.positions,
            with_lse=True,
            adapter_inputs=self.dropout.buffers if self.dropout is not None else None,
            kept=[self.saved.gate_up[slots[i]] for i in range(spec.n_layers)],
        )
        buffers = self.plan.buffers
        buffers.table[capacity.sequences] = capacity.pages
        self._linears = LinearBackward(decoder, rows, widths, slots, self.dropout)
        self._attention = _attention_memory(decoder, self.plan, self.pages, capacity, slots)
        widest_norm = max(spec.hidden_size, 0 if buffers.q_a is None else buffers.q_a.shape[1])
        self._scratch = Scratch(max(3 * decoder.dense_width, widest_norm))
        self._d_gate_up = torch.empty(rows, 2 * decoder.dense_width, dtype=operand)
        self._act = torch.empty(rows, decoder.dense_width, dtype=operand)
        self._operand = operand
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
        if self.dropout is not None and adapter is not None and any("kv_b" in layer for layer in adapter.model.layers):
            raise ModelError("lora.dropout above 0 is not supported for adapters on kv_b_proj; set lora.dropout to 0")
        n = len(ids)
        b = self.plan.buffers
        b.position[:n] = layout.position
        b.sequence[:n] = torch.where(layout.segment < 0, self.capacity.sequences, layout.segment)
        b.table[: layout.sequences, : layout.table.shape[1]] = layout.table
        self._n, self._layout, self._adapter = n, layout, adapter
        self._linears.begin(n, adapter)
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
        assert self._layout is not None
        self._attention.save(i, stage, self._layout)
        n, b, saved = self._n, self.plan.buffers, self.saved
        if stage == "o+adapter":
            saved.x_mid[self._slots[i], :n] = b.x[:n]
        elif stage == "activate" and not is_gated(self.decoder, self.decoder.layers[i]):
            saved.gate_up[self._slots[i], :n] = b.gate_up[:n]
        if stage.endswith("+adapter"):
            self._linears.save(i, stage.removesuffix("+adapter"), self.plan.u)

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
        plan, workspace = self.plan.experts[i], self.plan.room.experts
        assert plan is not None
        assert workspace is not None
        x, normed = self.saved.x_mid[self._slots[i], :n], self.plan.buffers.xn[:n]
        norm_step(x, layer.post_norm, normed, eps, self._scratch).run()
        d_normed = torch.zeros(n, self.decoder.spec.hidden_size)
        adapter = self._adapter.model.experts[i] if self._adapter is not None else None
        expert_backward(block, workspace, normed, plan.routed, dx, d_normed, adapter, grads.experts[i])
        norm_backward(x, layer.post_norm, d_normed, dx, eps)

    def _mlp_backward(self, i: int, dx: Tensor, grads: AdapterGradients) -> None:
        layer, n, slot = self.decoder.layers[i], self._n, self._slots[i]
        if layer.experts is not None:
            self._experts_backward(i, layer.experts, dx, grads)
            return
        assert layer.gate_up is not None
        assert layer.down is not None
        dy = dx.to(self._operand)
        du, d_act = self._linears.input_gradient(i, "down", layer.down, dy)
        gate_up, width = self.saved.gate_up[slot], layer.down.columns
        args = [gate_up.data_ptr(), d_act.data_ptr(), width, self._d_gate_up.data_ptr(), self._act.data_ptr()]
        args += [is_bf16(gate_up), self._scratch.address, ROWS_PER_TASK, n]
        swiglu_backward.bind(-(-n // ROWS_PER_TASK), args).run()
        self._linears.weight_gradients(i, "down", dy, du, self._act[:n], grads)
        d_gate_up = self._d_gate_up[:n]
        self._through_norm(i, "gate_up", layer.gate_up, d_gate_up, self.saved.x_mid[slot], layer.post_norm, dx, grads)

    def _attention_backward(self, i: int, dx: Tensor, grads: AdapterGradients) -> None:
        layer, n, layout = self.decoder.layers[i], self._n, self._layout
        assert layout is not None
        dy = dx.to(self._operand)
        du, d_att = self._linears.input_gradient(i, "o", layer.o, dy)
        self._linears.weight_gradients(i, "o", dy, du, self._attention.att[self._slots[i], :n], grads)
        attention = self._attention
        if isinstance(attention, LatentBackward):
            d_qkv = self._latent_backward(i, attention, d_att, grads)
        else:
            d_qkv = attention.run(i, d_att, layout)
        self._through_norm(i, "qkv", layer.qkv, d_qkv, self.saved.x_in[i], layer.input_norm, dx, grads)

    def _latent_backward(self, i: int, memory: LatentBackward, d_att: Tensor, grads: AdapterGradients) -> Tensor:
        """The gradient of the projections into the bottlenecks [n, Q + C + E], operands."""
        latent, n, layout, adapter = self.decoder.layers[i].latent, self._n, self._layout, self._adapter
        assert latent is not None
        assert layout is not None
        assert adapter is not None
        on_kv = adapter.model.layers[i].get("kv_b")
        part = LatentAdapter.of(on_kv, latent) if on_kv is not None else None
        d_queries = memory.queries(i, d_att, layout, part, grads.places[i]["kv_b"][0] if part is not None else None)
        if latent.q_b is not None:
            assert latent.q_norm is not None
            raw = memory.down[self._slots[i], :n, : latent.query_columns].contiguous()
            d_raw = torch.zeros_like(raw)
            self._through_norm(i, "q_b", latent.q_b, d_queries, raw, latent.q_norm, d_raw, grads, NORM_EPS)
            memory.d_down[:n, : latent.query_columns] = d_raw
        memory.finish(i, layout)
        return memory.d_down[:n]

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
        eps: float | None = None,
    ) -> None:
        """Gradients of a linear that reads normed rows x; its share is added to dx. `eps`: the model's unless given."""
        n, eps = self._n, self.decoder.spec.rms_norm_eps if eps is None else eps
        du, d_normed = self._linears.input_gradient(i, place, linear, dy)
        if du is not None:
            normed = self.plan.buffers.inputs()[place][:n]
            norm_step(x[:n], weight, normed, eps, self._scratch).run()
            self._linears.weight_gradients(i, place, dy, du, normed, grads)
        norm_backward(x[:n], weight, d_normed, dx, eps)


def _attention_memory(
    decoder: Decoder, plan: ForwardPlan, pages: KVPages, capacity: Capacity, slots: Slots
) -> GroupedBackward | LatentBackward:
    """What the backward of a decoder's kind of attention keeps."""
    if plan.room.latent is None:
        return GroupedBackward(decoder, plan.buffers, pages, capacity.sequences, capacity.positions, slots)
    work = plan.room.latent
    return LatentBackward(decoder, plan.buffers, pages, work, capacity.sequences, capacity.positions, slots)


def norm_backward(x: Tensor, weight: Tensor, dy: Tensor, dx: Tensor, eps: float) -> None:
    """dx [R, H] += the input gradient of RMS norm for dy [R, H] (float32, overwritten)."""
    rows, width = x.shape
    args = [x.data_ptr(), weight.data_ptr(), dy.data_ptr(), dx.data_ptr(), width, float(eps), ROWS_PER_TASK, rows]
    rms_norm_backward.bind(-(-rows // ROWS_PER_TASK), args).run()
