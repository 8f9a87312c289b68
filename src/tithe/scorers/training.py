"""Trains an adapter and a head on the frozen base from pairs of replies.

Shape legend: _Q replies of one micro-batch, two of each pair in turn; _H the model's width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tithe.errors import NonFiniteError
from tithe.lora import LoraSpec
from tithe.models import (
    AdamW,
    AdapterGradients,
    Decoder,
    Passes,
    TrainAdapter,
    clip,
    new_value_head,
    split_experts,
    stack_experts,
)
from tithe.models.value_head import BIAS, WEIGHT
from tithe.packing import MicroBatch
from tithe.scorers.decoder_scorer import DecoderScorer
from tithe.scorers.preference import ReplyPair, preference_loss
from tithe.scorers.replies import plan_replies
from tithe.scorers.score_head import ScoreHead

MAX_SKIPPED = 3
"""Steps in a row with a loss or gradient that is not finite, after which training ends."""


@dataclass(frozen=True)
class PreferenceSettings:
    """`rate` gives the learning rate of a step, the first being 0. `centre` weighs the pull of scores towards 0.
    `micro_batch_tokens` bounds the rows of a micro-batch (a pair stays whole), and with them the peak of memory."""

    rate: Callable[[int], float]
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    centre: float = 0.0
    micro_batch_tokens: int = 512
    activation_checkpointing: bool = False


@dataclass(frozen=True)
class PreferenceStep:
    """One step. `loss` and `accuracy` are means over its pairs, before it; `skipped` changed nothing."""

    loss: float
    accuracy: float
    grad_norm: float
    skipped: bool


class PreferenceTrainer:
    """`step` a batch of pairs; `scorer` and `published` give what has been learned. Everything runs on the lane.

    Mutates only its own tensors: float32 masters of adapter and head, gradients, Adam's moments. The forward uses the
    published cast of the adapter, the one that scores later.
    """

    def __init__(
        self, decoder: Decoder, spec: LoraSpec, tensors: Mapping[str, Tensor], settings: PreferenceSettings
    ) -> None:
        """`tensors` are the adapter's first values; the head begins at zero, so that no reply is preferred yet."""
        self.spec, self._settings = spec, settings
        adapter = dict(sorted(stack_experts(tensors).items()))
        self._names = list(adapter)
        named = adapter | new_value_head(decoder.spec.hidden_size)
        self._masters = {name: t.detach().float().clone() for name, t in named.items()}
        self._adapter = TrainAdapter.build(decoder, self._adapter_masters(), spec)
        self._passes = Passes(
            decoder, self._adapter.widths(), checkpointing=settings.activation_checkpointing, dropout=0.0
        )
        self._adamw = AdamW(self._masters, betas=settings.betas, weight_decay=settings.weight_decay)
        self.steps, self._skipped = 0, 0

    def _adapter_masters(self) -> dict[str, Tensor]:
        return {name: self._masters[name] for name in self._names}

    @property
    def head(self) -> ScoreHead:
        """The head as it is. No copy."""
        return ScoreHead(self._masters[WEIGHT].detach(), self._masters[BIAS].detach())

    def step(self, pairs: Sequence[ReplyPair]) -> PreferenceStep:
        """One AdamW step on the mean loss of pairs, clipped by global norm. Raises `NonFiniteError` after three in a
        row that could not be made."""
        loss, right, grads = self.gradients(pairs)
        norm = float(torch.nn.utils.get_total_norm(list(grads.values())))
        finite = bool(torch.isfinite(torch.tensor([norm, loss])).all())
        if finite:
            self._apply(grads, norm)
        self.steps += 1
        self._skipped = 0 if finite else self._skipped + 1
        if self._skipped == MAX_SKIPPED:
            raise NonFiniteError(
                f"{MAX_SKIPPED} steps in a row had a loss or gradient that is no number; lower optimizer.lr"
            )
        return PreferenceStep(loss, right / len(pairs), norm, not finite)

    def gradients(self, pairs: Sequence[ReplyPair]) -> tuple[float, float, dict[str, Tensor]]:
        """The pairs' mean loss, how many are ranked right (equal scores count half), and the loss's gradient by
        master."""
        groups = [(pair.prompt_ids, (pair.chosen, pair.rejected)) for pair in pairs]
        budget = max(self._settings.micro_batch_tokens, *(pair.n_tokens for pair in pairs))
        sums = AdapterGradients(self._passes.decoder, self._adapter)
        head = {name: torch.zeros_like(self._masters[name]) for name in (WEIGHT, BIAS)}
        loss = right = 0.0
        for micro in plan_replies(groups, budget):
            one, ranked = self._accumulate(micro, len(pairs), sums, head)
            loss, right = loss + one, right + ranked
        self._passes.release()
        return loss, right, {**sums.named(self._adapter_masters()), **head}

    def _accumulate(
        self, micro: MicroBatch, n_pairs: int, sums: AdapterGradients, head: dict[str, Tensor]
    ) -> tuple[float, float]:
        """Forward and backward of a micro-batch's share of the mean loss."""
        rows_QH = self._passes.hidden(micro, self._adapter, keep=True)
        with torch.no_grad():
            score_Q, normed_QH = self.head.score(self._passes.head, rows_QH)
        score_Q = score_Q.requires_grad_()
        chosen, rejected = score_Q[0::2], score_Q[1::2]
        loss = preference_loss(chosen, rejected, self._settings.centre) / n_pairs
        loss.backward()
        assert score_Q.grad is not None
        head[WEIGHT] += score_Q.grad @ normed_QH
        head[BIAS] += score_Q.grad.sum()
        d_normed = score_Q.grad[:, None] * self.head.weight
        self._passes.backward(micro, rows_QH, d_normed, sums)
        gap = (chosen - rejected).detach()
        return float(loss.detach()), float((gap > 0).sum() + 0.5 * (gap == 0).sum())

    def _apply(self, grads: Mapping[str, Tensor], norm: float) -> None:
        clipped = clip(grads, norm, self._settings.max_grad_norm)
        self._adamw.step(clipped, self._settings.rate(self.steps))
        self._passes.forget(self._adapter)
        self._adapter = TrainAdapter.build(self._passes.decoder, self._adapter_masters(), self.spec)

    def scorer(self) -> DecoderScorer:
        """Scores by what has been learned so far; until the next step."""
        return DecoderScorer(self._passes, self._adapter, self.head, batch_tokens=self._settings.micro_batch_tokens)

    def published(self) -> dict[str, Tensor]:
        """The adapter's float32 masters by PEFT name, experts one by one."""
        tensors = {name: master.detach() for name, master in self._adapter_masters().items()}
        return dict(split_experts(tensors, repeat=self._passes.decoder.n_experts))

    def memory_bytes(self) -> int:
        """Masters, gradient sums and Adam's two moments."""
        return 4 * sum(master.numel() * master.element_size() for master in self._masters.values())
