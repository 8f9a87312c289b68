"""Gradients of tiny decoders for tests: by `TrainPass`, and by autograd through transformers.

The loss of a micro-batch is Σ advantage · logp + ENTROPY · Σ entropy over its targets, which has no zero derivative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from support.decoders import random_ids
from tithe.lora import LoraSpec
from tithe.models.decoder import Decoder
from tithe.models.expert_adapter import stack_experts
from tithe.models.head import Head, score_with_gradient
from tithe.models.layout import page_layout
from tithe.models.train_adapter import AdapterGradients, TrainAdapter
from tithe.models.training import Capacity, TrainPass, norm_backward
from tithe.packing import MicroBatch
from tithe.types import FinishReason, Rollout, RolloutGroup, TrainingBatch

ENTROPY = 0.3
LENGTHS = ((21, (5, 1, 40, 17)), (16, (7, 33)), (1, (3,)))
"""Per group: prompt tokens, and completion tokens of each rollout. Across, on and below the borders of pages."""


def random_batch(lengths: Sequence[tuple[int, Sequence[int]]] = LENGTHS, seed: int = 0) -> TrainingBatch:
    """Groups of random tokens with an advantage of its own for every token and a temperature for every rollout."""
    rng = np.random.default_rng(seed)

    def rollout(sample: int, n: int) -> Rollout:
        zeros = np.zeros(n, np.float32)
        ids = random_ids(n, int(rng.integers(2**31)))
        temperature = (0.8, 1.0, 1.3)[sample % 3]
        return Rollout(
            sample, ids, np.ones(n, bool), zeros, zeros, zeros.astype(np.int32), temperature, FinishReason.STOP
        )

    groups = [
        RolloutGroup(g, f"p{g}", random_ids(p, 100 + g), tuple(rollout(i, n) for i, n in enumerate(completions)), 0, 0)
        for g, (p, completions) in enumerate(lengths)
    ]
    advantages = [[rng.normal(size=len(r.token_ids)).astype(np.float32) for r in g.rollouts] for g in groups]
    return TrainingBatch(groups, advantages, 0)


@dataclass
class Result:
    """Gradients by PEFT name; log-prob and entropy of every target in the micro-batches' order."""

    grads: dict[str, Tensor]
    logp: np.ndarray
    entropy: np.ndarray


class Trainee:
    """A decoder with an adapter and one `TrainPass`, which later micro-batches reuse when they fit."""

    def __init__(
        self,
        decoder: Decoder,
        spec: LoraSpec,
        tensors: Mapping[str, Tensor],
        *,
        checkpointing: bool = False,
        dropout: float = 0.0,
        capacity: Capacity | None = None,
    ) -> None:
        self.decoder, self.tensors = decoder, stack_experts(tensors)
        self.adapter = TrainAdapter.build(decoder, tensors, spec)
        self.sums = AdapterGradients(decoder, self.adapter)
        self.head = Head(decoder)
        self.capacity = capacity
        self._options: dict[str, Any] = {"checkpointing": checkpointing, "dropout": dropout}
        self._pass: TrainPass | None = None

    def pass_for(self, micro: MicroBatch) -> TrainPass:
        """The pass, built anew when the micro-batch does not fit."""
        layout = page_layout(micro)
        need = Capacity(len(micro.input_ids), layout.sequences, layout.pages, layout.positions)
        if self._pass is None or not self._pass.capacity.holds(need):
            need = need if self.capacity is None else need.union(self.capacity)
            self._pass = TrainPass(self.decoder, need, self.adapter.widths(), **self._options)
        return self._pass

    def score(self, micro: MicroBatch, adapter: TrainAdapter | None) -> np.ndarray:
        """log-probs of the targets under any adapter; nothing is kept."""
        x = self.pass_for(micro).forward(micro.input_ids, page_layout(micro), adapter, keep=False)
        return self.head.score(x[torch.from_numpy(micro.target_rows)], micro.target_ids, micro.temperature)[0]

    def train(self, micros: Sequence[MicroBatch], *, dropout_seed: int | None = None) -> Result:
        """Gradients summed over micro-batches. `dropout_seed` None turns dropout off."""
        self.sums = AdapterGradients(self.decoder, self.adapter)
        logp: list[np.ndarray] = []
        entropy: list[np.ndarray] = []
        for micro in micros:
            train = self.pass_for(micro)
            if train.dropout is not None:
                train.dropout.enabled, train.dropout.seed = dropout_seed is not None, dropout_seed or 0
            x = train.forward(micro.input_ids, page_layout(micro), self.adapter)
            rows = torch.from_numpy(micro.target_rows)
            target = x[rows].clone()
            scored = score_with_gradient(self.head, target, micro.target_ids, micro.temperature, entropy_gradient=True)
            assert scored.d_entropy is not None
            d_normed = torch.from_numpy(micro.advantage)[:, None] * scored.d_logp + ENTROPY * scored.d_entropy
            d_target = torch.zeros_like(target)
            spec = self.decoder.spec
            norm_backward(target, self.decoder.final_norm, d_normed.contiguous(), d_target, spec.rms_norm_eps)
            dx = torch.zeros(len(micro.input_ids), spec.hidden_size).index_add_(0, rows, d_target)
            train.backward(dx, self.sums)
            logp.append(scored.logp)
            entropy.append(scored.entropy)
        grads = {name: t.clone() for name, t in self.sums.named(self.tensors).items()}
        return Result(grads, np.concatenate(logp), np.concatenate(entropy))


def autograd(
    model: Any, parameters: Mapping[str, Tensor], batch: TrainingBatch, micros: Sequence[MicroBatch], n_tokens: int
) -> Result:
    """The same by autograd, one whole sequence at a time. `parameters` hang in `model` and require gradients."""
    total, logp, entropy = torch.zeros(()), [], []
    for micro in micros:
        for q in range(micro.n_seqs):
            group = batch.groups[micro.seq_group[q]]
            rollout = group.rollouts[micro.seq_rollout[q]]
            own = micro.seq_index == q
            ids = torch.from_numpy(np.concatenate([group.prompt_ids, rollout.token_ids])).long()
            logits = model(ids[None, :-1]).logits[0, len(group.prompt_ids) - 1 :, :n_tokens]
            logs = (logits / rollout.temperature).log_softmax(-1)
            chosen = logs.gather(1, ids[len(group.prompt_ids) :, None])[:, 0]
            spread = -(logs.exp() * logs).sum(-1)
            total = total + (torch.from_numpy(micro.advantage[own]) * chosen).sum() + ENTROPY * spread.sum()
            logp.append(chosen.detach().numpy())
            entropy.append(spread.detach().numpy())
    grads = dict(zip(parameters, torch.autograd.grad(total, list(parameters.values())), strict=True))
    return Result(grads, np.concatenate(logp), np.concatenate(entropy))


def relative_error(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """The largest ‖mine − theirs‖ / ‖theirs‖ of any tensor; names must agree and nothing may be zero."""
    assert mine.keys() == theirs.keys()
    assert all(t.norm() > 0 for t in theirs.values())
    return max(float((mine[name] - theirs[name]).norm() / theirs[name].norm()) for name in theirs)
