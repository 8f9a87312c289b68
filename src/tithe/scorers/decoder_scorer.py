"""Scores replies on a decoder of ours: the run's own base under an adapter, or a classifier's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from tithe.models import Passes, TrainAdapter
from tithe.scorers.replies import Reply, plan_replies
from tithe.scorers.score_head import ScoreHead


class Scorer(Protocol):
    """What a desk asks. `max_tokens` bounds one prompt with its reply."""

    max_tokens: int

    def score(self, replies: Sequence[Reply]) -> list[float]:
        """One number each, which may be NaN or infinite; the same whatever is scored beside it. On the lane."""
        ...

    def memory_bytes(self) -> int:
        """What it holds beside the run's base."""
        ...


class DecoderScorer:
    """Borrows passes, strictly in turn with whoever else does, and mutates nothing else."""

    def __init__(
        self,
        passes: Passes,
        adapter: TrainAdapter | None,
        head: ScoreHead,
        *,
        batch_tokens: int,
        own_bytes: int = 0,
    ) -> None:
        """`own_bytes`: of the decoder, where it is not the run's base. `batch_tokens` bounds the rows of one pass."""
        self._passes, self._adapter, self._head, self._batch_tokens = passes, adapter, head, batch_tokens
        self._own_bytes = own_bytes
        self.max_tokens = passes.decoder.max_context

    def score(self, replies: Sequence[Reply]) -> list[float]:
        """As `Scorer.score`. Replies to one prompt share its rows."""
        by_prompt: dict[tuple[int, ...], list[int]] = {}
        for number, reply in enumerate(replies):
            by_prompt.setdefault(reply.prompt_ids, []).append(number)
        places = list(by_prompt.values())
        groups = [(prompt, [replies[i].reply_ids for i in own]) for prompt, own in by_prompt.items()]
        scores = [0.0] * len(replies)
        with torch.no_grad():
            for micro in plan_replies(groups, self._batch_tokens):
                rows = self._passes.hidden(micro, self._adapter, keep=False)
                found, _ = self._head.score(self._passes.head, rows)
                for group, sample, score in zip(micro.seq_group, micro.seq_rollout, found.tolist(), strict=True):
                    scores[places[group][sample]] = score
        return scores

    def memory_bytes(self) -> int:
        """Adapter, head, and the decoder where it is its own; buffers are borrowed or come and go."""
        adapter = 0 if self._adapter is None else self._adapter.model.n_bytes
        return self._own_bytes + adapter + self._head.memory_bytes()
