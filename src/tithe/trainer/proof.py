"""Log-probs of given sequences by the training path, for probes and parity certificates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tithe.lora import LoraSpec
from tithe.models import ALONE, IdlePass, Passes, Ranks, TrainAdapter
from tithe.packing import MicroBatch, plan_micro_batches
from tithe.types import FinishReason, Rollout, RolloutGroup, TrainingBatch

NOISE = 1e-7
"""Relative change of the adapter whose effect on log-probs is called the noise floor."""


@dataclass(frozen=True, eq=False)
class ScoredBatch:
    """Per group, per rollout: log-probs [T] by the training path (None where nothing was scored)."""

    logp: list[list[np.ndarray | None]]


class Perturbed(Mapping[str, Tensor]):
    """Every entry of the given tensors times 1 + 1e-7·n, n drawn from a standard normal; made when it is read.

    A tensor's draws follow from the seed and its place in the sorted names, so it is the same at every reading.
    """

    def __init__(self, tensors: Mapping[str, Tensor], seed: int = 0) -> None:
        self._tensors, self._seed = tensors, seed
        self._place = {name: place for place, name in enumerate(sorted(tensors))}

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        state = np.random.SeedSequence((self._seed, self._place[name])).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(state[0]))
        return torch.randn(tensor.shape, generator=generator).mul_(NOISE).add_(1.0).mul_(tensor.detach())

    def __iter__(self) -> Iterator[str]:
        return iter(self._place)

    def __len__(self) -> int:
        return len(self._place)


def score_packed(
    groups: Sequence[RolloutGroup],
    micro_batch_tokens: int,
    score: Callable[[MicroBatch], np.ndarray],
    ranks: Ranks = ALONE,
    take_part: Callable[[], None] = lambda: None,
) -> list[list[np.ndarray | None]]:
    """Per group, per rollout: log-probs [T], packed as training packs (None where the model wrote nothing); `score`
    gives a micro-batch's [N].

    Several ranks share the micro-batches and tell each other, so that all have the same answer; `take_part` is what one
    does while only others have rows.
    """
    ones = [[np.ones(len(r.token_ids), np.float32) if r.loss_mask.any() else None for r in g.rollouts] for g in groups]
    out = [[None if one is None else np.zeros(len(one), np.float32) for one in row] for row in ones]
    micros = plan_micro_batches(TrainingBatch(groups, ones, 0), micro_batch_tokens)
    for round_ in range(-(-len(micros) // ranks.size)):
        at = round_ * ranks.size + ranks.rank
        if at >= len(micros):
            take_part()
            continue
        micro = micros[at]
        logp = score(micro)
        for q in range(micro.n_seqs):
            out[micro.seq_group[q]][micro.seq_rollout[q]] = logp[micro.seq_index == q]
    ranks.sum(
        [torch.from_numpy(one) for row in out for one in row if one is not None]
    )  # one rank's and zeros; in place
    return out


def score_groups(
    passes: Passes,
    groups: Sequence[RolloutGroup],
    adapter: TrainAdapter,
    micro_batch_tokens: int,
    ranks: Ranks = ALONE,
) -> ScoredBatch:
    """Score rollouts as training does: packed groups, gradient mode (everything saved), dropout off. On the lane."""

    def score(micro: MicroBatch) -> np.ndarray:
        return passes.forward(micro, adapter, dropout_seed=None, entropy_gradient=False)[0].logp

    def take_part() -> None:
        IdlePass(passes.decoder).forward(adapter.model)

    return ScoredBatch(score_packed(groups, micro_batch_tokens, score, ranks, take_part))


def probe_group(prompt: Sequence[int], target: Sequence[int]) -> RolloutGroup:
    """A probe's question and completion as a group of one rollout, at T = 1."""
    n = len(target)
    zeros = np.zeros(n, np.float32)
    ids = np.array(target, np.int32)
    rollout = Rollout(0, ids, np.ones(n, bool), zeros, zeros, np.zeros(n, np.int32), 1.0, FinishReason.STOP)
    return RolloutGroup(0, "probe", np.array(prompt, np.int32), (rollout,), 0, 0)


def answer_of(scored: Sequence[Sequence[np.ndarray | None]]) -> list[float]:
    """The log-probs of a scored `probe_group`."""
    logp = scored[0][0]
    assert logp is not None
    return [float(x) for x in logp]


def probe_logp(
    passes: Passes, prompt: Sequence[int], target: Sequence[int], adapter: TrainAdapter, ranks: Ranks = ALONE
) -> list[float]:
    """log-probs at T = 1 of a probe's completion under an adapter, by the training path. On the lane."""
    group = probe_group(prompt, target)
    return answer_of(score_groups(passes, [group], adapter, len(prompt) + len(target), ranks).logp)


def probe_masters(
    passes: Passes,
    prompt: Sequence[int],
    target: Sequence[int],
    tensors: Mapping[str, Tensor],
    spec: LoraSpec,
    ranks: Ranks = ALONE,
) -> list[float]:
    """`probe_logp` under given masters, cast as for publication. On the lane."""
    adapter = TrainAdapter.for_scoring(passes.decoder, tensors, spec)
    logp = probe_logp(passes, prompt, target, adapter, ranks)
    passes.forget(adapter)
    return logp
