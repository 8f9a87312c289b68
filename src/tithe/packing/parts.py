"""What of a batch is trained at once, and how much of each rollout.

Shape legend: _T completion tokens of one rollout, _P prompt tokens of its group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

from tithe.types import BatchScores, Rollout, RolloutGroup, TrainingBatch


def split_batch(batch: TrainingBatch, n_parts: int) -> list[TrainingBatch]:
    """`n_parts` batches of whole groups in the batch's order, as equal in groups as can be; fewer with fewer groups.

    Advantages were made over the whole batch and stay; each part's loss has denominators of its own.

    >>> batch = TrainingBatch([], [], 0)
    >>> split_batch(batch, 1) == [batch]
    True
    """
    if n_parts == 1:
        return [batch]
    n = len(batch.groups)
    n_parts = max(1, min(n_parts, n))
    edges = [n * i // n_parts for i in range(n_parts + 1)]
    return [_slice(batch, slice(a, b)) for a, b in pairwise(edges)]


def _slice(batch: TrainingBatch, part: slice) -> TrainingBatch:
    scores = batch.scores
    if scores is not None:
        parts = {f.name: getattr(scores, f.name) for f in fields(BatchScores)}
        parts = {name: value[part] for name, value in parts.items() if isinstance(value, Sequence)}
        scores = replace(scores, **parts)
    return TrainingBatch(batch.groups[part], batch.advantages[part], batch.serial, scores)


@dataclass(frozen=True)
class Cut:
    """What was left out of a batch: tokens, and the rollouts that they are of."""

    tokens: int = 0
    rollouts: int = 0


def cut_rollouts(groups: Sequence[RolloutGroup], max_tokens: int) -> tuple[list[RolloutGroup], Cut]:
    """The groups with only the first `max_tokens` tokens of every completion. Reward, text and the reason for which it
    ended stay those of the whole: what is trained is the beginning of an answer, judged by where it led."""
    long = [r for group in groups for r in group.rollouts if len(r.token_ids) > max_tokens]
    if not long:
        return list(groups), Cut()
    out = [
        replace(group, rollouts=tuple(_cut(r, len(group.prompt_ids), max_tokens) for r in group.rollouts))
        for group in groups
    ]
    return out, Cut(sum(len(r.token_ids) - max_tokens for r in long), len(long))


def _cut(rollout: Rollout, n_prompt: int, max_tokens: int) -> Rollout:
    if len(rollout.token_ids) <= max_tokens:
        return rollout
    return replace(
        rollout,
        token_ids=rollout.token_ids[:max_tokens],
        loss_mask=rollout.loss_mask[:max_tokens],
        logp=rollout.logp[:max_tokens],
        logp_behaviour=rollout.logp_behaviour[:max_tokens],
        serials=rollout.serials[:max_tokens],
        experts=None if rollout.experts is None else rollout.experts[: n_prompt + max_tokens - 1],
    )
