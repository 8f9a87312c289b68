"""C07: loss, gradient and metrics do not depend on how a batch falls into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tithe.losses import (
    Aggregation,
    Denominators,
    LossMetrics,
    LossSettings,
    PolicyLossInput,
    dapo,
    denominators,
    summarize,
)
from unit.losses.oracle import Sequences

LENGTHS = [7, 1, 3, 12, 2, 5, 5, 9]
VOCABULARY = 11


@dataclass(frozen=True)
class Counts:
    n_trained_tokens: int
    n_seqs: int


def losses_of(values: list[list[float]]) -> Sequences:
    """On-policy rollouts whose token losses are `values`."""
    zeros = [[0.0] * len(row) for row in values]
    return Sequences(zeros, zeros, zeros, [[-v for v in row] for row in values], [[True] * len(row) for row in values])


@pytest.mark.parametrize("parts", [[[0], [1]], [[1], [0]], [[0, 1]], [[1, 0]]])
def test_token_mean_of_uneven_micro_batches(parts: list[list[int]]) -> None:
    """Six tokens of loss 1 and two of loss 4 give 1.75; a mean of means gives 2.5."""
    batch = losses_of([[1.0] * 6, [4.0] * 2])
    over = denominators([Counts(6, 1), Counts(2, 1)], norm_tokens=64)
    losses = [dapo(batch.take(part).packed(over), LossSettings(Aggregation.TOKEN_MEAN)).loss.item() for part in parts]
    assert sum(losses) == pytest.approx(1.75, abs=1e-12)


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        (Aggregation.TOKEN_MEAN, 1.75),
        (Aggregation.TOKEN_SUM, 14.0),
        (Aggregation.SEQ_MEAN_TOKEN_SUM, 7.0),
        (Aggregation.SEQ_MEAN_TOKEN_MEAN, 2.5),
        (Aggregation.SEQ_MEAN_TOKEN_SUM_NORM, 7.0 / 16),
    ],
)
def test_the_five_modes_by_hand(mode: Aggregation, wanted: float) -> None:
    batch = losses_of([[1.0] * 6, [4.0] * 2])
    assert dapo(batch.packed(), LossSettings(mode)).loss.item() == pytest.approx(wanted)


class Toy:
    """A bigram policy: 8 ragged rollouts, drawn once; gradients are taken with respect to its table."""

    def __init__(self, dtype: torch.dtype) -> None:
        draw = torch.Generator().manual_seed(3)
        self.table = torch.randn(VOCABULARY, VOCABULARY, generator=draw).to(dtype).requires_grad_()
        self.ids = [torch.randint(0, VOCABULARY, (n + 1,), generator=draw) for n in LENGTHS]
        self.old = [self.logp(ids).detach() + 0.3 * torch.randn(len(ids) - 1, generator=draw) for ids in self.ids]
        self.ref = [self.logp(ids).detach() + 0.3 * torch.randn(len(ids) - 1, generator=draw) for ids in self.ids]
        self.advantage = torch.randn(len(LENGTHS), generator=draw).to(dtype)
        self.mask = [torch.rand(n, generator=draw) < 0.8 for n in LENGTHS]
        for mask in self.mask:
            mask[0] = True

    def logp(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(self.table[ids[:-1]], -1).gather(-1, ids[1:, None])[:, 0]

    def entropy(self, ids: torch.Tensor) -> torch.Tensor:
        logp = torch.log_softmax(self.table[ids[:-1]], -1)
        return -(logp.exp() * logp).sum(-1)

    def micro_batch(self, chosen: list[int], over: Denominators) -> PolicyLossInput:
        lengths = torch.tensor([LENGTHS[i] for i in chosen])
        return PolicyLossInput(
            logp=torch.cat([self.logp(self.ids[i]) for i in chosen]),
            old_logp=torch.cat([self.old[i] for i in chosen]),
            ref_logp=torch.cat([self.ref[i] for i in chosen]),
            advantage=self.advantage[chosen].repeat_interleave(lengths),
            mask=torch.cat([self.mask[i] for i in chosen]),
            seq_index=torch.arange(len(chosen)).repeat_interleave(lengths),
            n_seqs=len(chosen),
            denominators=over,
            entropy=torch.cat([self.entropy(self.ids[i]) for i in chosen]),
        )

    def run(self, parts: list[list[int]], settings: LossSettings) -> tuple[float, torch.Tensor, dict[str, float]]:
        counts = [Counts(sum(int(self.mask[i].sum()) for i in part), len(part)) for part in parts]
        over = denominators(counts, norm_tokens=16)
        self.table.grad = None
        loss = 0.0
        metrics: list[LossMetrics] = []
        for part in parts:
            output = dapo(self.micro_batch(part, over), settings)
            output.loss.backward()
            loss += output.loss.item()
            metrics.append(output.metrics)
        assert self.table.grad is not None
        return loss, self.table.grad, summarize(metrics)


SPLITS = {
    "2x4": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "4x2": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "8x1": [[i] for i in range(8)],
    "reordered and uneven": [[7], [3, 0, 5], [6, 1, 4, 2]],
}


@pytest.mark.parametrize("mode", list(Aggregation))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_any_split_gives_the_same_gradient(mode: Aggregation, dtype: torch.dtype, tolerance: float) -> None:
    toy = Toy(dtype)
    settings = LossSettings(mode, 0.2, 0.28, kl_coef=0.05, entropy_coef=0.01)
    loss, gradient, metrics = toy.run([list(range(8))], settings)
    scale = float(gradient.abs().max())
    for name, parts in SPLITS.items():
        split_loss, split_gradient, split_metrics = toy.run(parts, settings)
        assert split_loss == pytest.approx(loss, rel=tolerance, abs=tolerance), name
        assert float((split_gradient - gradient).abs().max()) <= tolerance * scale, name
        assert split_metrics == pytest.approx(metrics, rel=tolerance), name


def test_a_fully_masked_rollout_has_no_say_in_any_denominator() -> None:
    batch = losses_of([[1.0] * 6, [4.0] * 2])
    with_tool = Sequences(
        *[[*field, field[0][:3]] for field in (batch.old, batch.new, batch.ref, batch.advantage)],
        mask=[*batch.mask, [False] * 3],
    )
    for mode in Aggregation:
        one, other = (dapo(rows.packed(), LossSettings(mode)).loss.item() for rows in (batch, with_tool))
        assert one == other
