"""Runs micro-batches through a `TrainPass` that grows with what it is given, and scores their targets."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from tithe.models.decoder import Decoder
from tithe.models.head import CHUNK_ROWS, Head, ScoredRows, score_with_gradient
from tithe.models.kv import PAGE, KVPages
from tithe.models.layout import PageLayout, page_layout
from tithe.models.routing import check_replay
from tithe.models.train_adapter import AdapterGradients, TrainAdapter
from tithe.models.training import Capacity, TrainPass, norm_backward
from tithe.packing import MicroBatch


class Passes:
    """Forward, scoring and backward of micro-batches on one decoder; belongs to the lane."""

    def __init__(
        self,
        decoder: Decoder,
        widths: Mapping[str, int],
        *,
        checkpointing: bool,
        dropout: float,
        chunk_rows: int = CHUNK_ROWS,
    ) -> None:
        self.decoder = decoder
        self._widths, self._checkpointing, self._dropout = widths, checkpointing, dropout
        self.head = Head(decoder, chunk_rows)
        self._pass: TrainPass | None = None
        self.agreeing, self.replayed = 0, 0
        """Replayed choices of experts that the policy would have made anyhow, and all replayed ones."""

    @property
    def row_bytes(self) -> int:
        """What a micro-batch keeps of each row for its backward: the residual stream, hidden rows of the MLP, keys and
        values."""
        spec, operand = self.decoder.spec, self.decoder.options.operand_dtype
        layers = 1 if self._checkpointing else spec.n_layers
        hidden = 4 * spec.hidden_size + 2 * self.decoder.dense_width * operand.itemsize
        return spec.n_layers * 4 * spec.hidden_size + layers * hidden + KVPages.page_bytes(spec, operand) // PAGE

    def take_agreement(self) -> float | None:
        """The share of replayed choices that the policy would have made anyhow, since the last call; None for none."""
        share = self.agreeing / self.replayed if self.replayed else None
        self.agreeing, self.replayed = 0, 0
        return share

    def _ensure(self, micro: MicroBatch, layout: PageLayout) -> TrainPass:
        need = Capacity(len(micro.input_ids), layout.sequences, layout.pages, layout.positions)
        if self._pass is None or not self._pass.capacity.holds(need):
            capacity = need if self._pass is None else self._pass.capacity.union(need)
            self._pass = None  # the old buffers go before the new ones come
            self._pass = TrainPass(
                self.decoder, capacity, self._widths, checkpointing=self._checkpointing, dropout=self._dropout
            )
        return self._pass

    def score(self, micro: MicroBatch, adapter: TrainAdapter | None, *, replaying: bool | None = None) -> np.ndarray:
        """log-probs [N] of a micro-batch's targets at their temperatures, nothing kept, dropout off.

        A policy that did not sample chooses its experts itself (`replaying` False; None: that of no adapter).
        """
        replaying = adapter is not None if replaying is None else replaying
        _, x = self._forward(micro, adapter, keep=False, dropout_seed=None, replaying=replaying)
        logp, _ = self.head.score(x[torch.from_numpy(micro.target_rows)], micro.target_ids, micro.temperature)
        return logp

    def hidden(self, micro: MicroBatch, adapter: TrainAdapter | None, *, keep: bool) -> Tensor:
        """Residual rows x [N, H] of the states before the targets, dropout off, experts chosen freely; with `keep`
        `backward` must follow."""
        _, x = self._forward(micro, adapter, keep=keep, dropout_seed=None, replaying=False)
        return x[torch.from_numpy(micro.target_rows)]

    def forward(
        self, micro: MicroBatch, adapter: TrainAdapter, *, dropout_seed: int | None, entropy_gradient: bool
    ) -> tuple[ScoredRows, Tensor]:
        """Scored targets with derivatives, and their residual rows x [N, H]; `backward` must follow."""
        _, x = self._forward(micro, adapter, keep=True, dropout_seed=dropout_seed, replaying=True)
        rows = x[torch.from_numpy(micro.target_rows)]
        scored = score_with_gradient(
            self.head, rows, micro.target_ids, micro.temperature, entropy_gradient=entropy_gradient
        )
        return scored, rows

    def backward(self, micro: MicroBatch, rows: Tensor, d_normed: Tensor, grads: AdapterGradients) -> None:
        """Add adapter gradients for d_normed [N, H] float32, the gradient of the normed target rows."""
        train = self._pass
        assert train is not None
        decoder = self.decoder
        d_rows = torch.zeros_like(rows)
        norm_backward(rows, decoder.final_norm, d_normed, d_rows, decoder.spec.rms_norm_eps)
        dx = torch.zeros(len(micro.input_ids), decoder.spec.hidden_size)
        dx.index_add_(0, torch.from_numpy(micro.target_rows), d_rows)
        train.backward(dx, grads)

    def _forward(
        self, micro: MicroBatch, adapter: TrainAdapter | None, *, keep: bool, dropout_seed: int | None, replaying: bool
    ) -> tuple[TrainPass, Tensor]:
        layout = page_layout(micro)
        train = self._ensure(micro, layout)
        if train.dropout is not None:
            train.dropout.enabled = dropout_seed is not None
            train.dropout.seed = dropout_seed or 0
        replay = None
        if micro.experts is not None and replaying:
            routers = [block.router for block in self.decoder.blocks()]
            replay = [
                check_replay(router, torch.from_numpy(np.ascontiguousarray(micro.experts[:, i])), len(micro.input_ids))
                for i, router in enumerate(routers)
            ]
        x = train.forward(micro.input_ids, layout, adapter, keep=keep, replay=replay)
        if replay is not None:
            agreeing, replayed = train.plan.agreed(len(micro.input_ids))
            self.agreeing, self.replayed = self.agreeing + agreeing, self.replayed + replayed
        return train, x

    def release(self) -> None:
        """Let the buffers go until they are needed again: what is saved for a backward is most of a step's memory."""
        self._pass = None

    def forget(self, adapter: TrainAdapter) -> None:
        """Drop the launches of an adapter that will not be used again."""
        if self._pass is not None:
            self._pass.plan.forget(adapter.model)
