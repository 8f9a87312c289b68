"""A decoder on several ranks: its experts answer for each other, and a rank without rows still answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tithe.errors import ModelError
from tithe.models.decoder import Decoder, ModelAdapter
from tithe.models.expert_bank import BlockAdapter
from tithe.models.expert_plan import ExpertPlan
from tithe.models.expert_training import expert_backward
from tithe.models.expert_workspace import Workspace
from tithe.models.forward import ForwardPlan
from tithe.models.ranks import Ranks
from tithe.models.train_adapter import AdapterGradients

IDLE_ROWS = 1024
"""Rows of others that an idle rank computes at a time, for each of them."""


def on_ranks(decoder: Decoder, ranks: Ranks) -> Decoder:
    """The decoder that `load_model(…, ranks.shard)` gave, its blocks connected; tensors are shared, not copied.

    `ModelError` when a block holds other experts than the rank's.
    """
    layers = []
    for i, layer in enumerate(decoder.layers):
        block = layer.experts
        if block is not None:
            mine = ranks.shard.experts(block.router.n_experts)
            held = range(block.routed.first, block.routed.first + len(block.routed))
            if held != mine:
                raise ModelError(f"layer {i} holds experts {held}, but rank {ranks.rank} of {ranks.size} needs {mine}")
            layer = replace(layer, experts=replace(block, ranks=ranks))  # noqa: PLW2901
        layers.append(layer)
    return replace(decoder, layers=tuple(layers))


def serve(plan: ForwardPlan, adapters: Sequence[ModelAdapter]) -> None:
    """Say which adapters the rows of any rank may be under, in an order that all ranks share, until said anew.

    Needed where ranks run rows under different adapters; without it a run's own segments name all there are.
    """
    for layer, experts in enumerate(plan.experts):
        if experts is not None:
            experts.served = _parts(adapters, layer)


def _parts(adapters: Sequence[ModelAdapter], layer: int) -> list[BlockAdapter]:
    return [part for one in adapters if (part := one.experts[layer]) is not None]


class IdlePass:
    """What a rank without rows runs while others run a pass: the same exchanges, and its experts for their rows.

    Buffers are those of an expert workspace for `IDLE_ROWS` rows. Belongs to the lane.
    """

    def __init__(self, decoder: Decoder, rows: int = IDLE_ROWS) -> None:
        self._blocks = [layer.experts for layer in decoder.layers]
        blocks, operand = decoder.blocks(), decoder.options.operand_dtype
        self._workspace = Workspace(blocks, operand, rows) if blocks else None
        self._x = torch.empty(1, decoder.spec.hidden_size, dtype=operand)
        self._none = torch.empty(0, decoder.spec.hidden_size)
        self._plans = [self._plan(i) for i in range(len(decoder.layers))]

    def _plan(self, layer: int) -> ExpertPlan | None:
        block = self._blocks[layer]
        if block is None or self._workspace is None:
            return None
        plan = ExpertPlan(block, self._workspace, self._x, torch.empty(1, self._x.shape[1]))
        plan.rows = 0
        return plan

    def forward(self, *adapters: ModelAdapter) -> None:
        """Take part in a forward; `adapters` are those that all ranks serve, in their order."""
        for layer in range(len(self._plans)):
            self._forward(layer, adapters)

    def _forward(self, layer: int, adapters: tuple[ModelAdapter, ...]) -> None:
        plan = self._plans[layer]
        if plan is not None:
            plan.served = _parts(adapters, layer)
            plan.run()

    def backward(self, adapter: ModelAdapter, gradients: AdapterGradients, *, recompute: bool) -> None:
        """Take part in a backward: adds the gradients of this rank's experts for the others' rows. `recompute` where
        the others compute each layer's forward again."""
        for layer in range(len(self._plans) - 1, -1, -1):
            plan, block = self._plans[layer], self._blocks[layer]
            if plan is None or block is None or self._workspace is None:
                continue
            if recompute:
                self._forward(layer, (adapter,))
            own = adapter.experts[layer], gradients.experts[layer]
            expert_backward(block, self._workspace, self._x[:0], plan.routed, self._none, self._none, *own)

    def forget(self, adapter: ModelAdapter) -> None:
        """Drop the launches of an adapter that is no longer served."""
        for plan, part in zip(self._plans, adapter.experts, strict=True):
            if plan is not None and part is not None:
                plan.forget(part)
