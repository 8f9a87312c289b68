"""Prompts with replies as micro-batches: each prompt's rows once, one target per reply, the row of its last token.

Shape legend: _Q replies of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tithe.packing import MicroBatch, plan_micro_batches
from tithe.types import FinishReason, Rollout, RolloutGroup, TrainingBatch

_NEVER_READ = 0
"""A packed rollout's last token is only predicted and has no row: this one stands there, so that a reply's own last
token has one."""


@dataclass(frozen=True)
class Reply:
    """A prompt and one finished reply to it, as token ids; the reply's include how the template ends it.

    >>> Reply((1, 5, 9), (7, 2)).n_tokens
    5
    """

    prompt_ids: tuple[int, ...]
    reply_ids: tuple[int, ...]

    @property
    def n_tokens(self) -> int:
        """Positions that it takes."""
        return len(self.prompt_ids) + len(self.reply_ids)


Group = tuple[tuple[int, ...], Sequence[tuple[int, ...]]]
"""A prompt's ids and those of the replies that share its rows."""


def plan_replies(groups: Sequence[Group], budget_tokens: int) -> list[MicroBatch]:
    """Micro-batches of at most `budget_tokens` rows; `seq_group` and `seq_rollout` [Q] say which reply each of their
    targets [Q] belongs to. A group stays together where it fits the budget."""
    packed = [_as_group(number, *group) for number, group in enumerate(groups)]
    ones = [[np.zeros(len(r.token_ids), np.float32) for r in group.rollouts] for group in packed]
    return [_last_rows(micro) for micro in plan_micro_batches(TrainingBatch(packed, ones, 0), budget_tokens)]


def _as_group(number: int, prompt_ids: tuple[int, ...], replies: Sequence[tuple[int, ...]]) -> RolloutGroup:
    rollouts = tuple(_as_rollout(sample, reply) for sample, reply in enumerate(replies))
    return RolloutGroup(number, str(number), np.array(prompt_ids, np.int32), rollouts, 0, 0)


def _as_rollout(sample: int, reply_ids: tuple[int, ...]) -> Rollout:
    ids = np.array((*reply_ids, _NEVER_READ), np.int32)
    zeros = np.zeros(len(ids), np.float32)
    return Rollout(sample, ids, np.ones(len(ids), bool), zeros, zeros, np.zeros_like(ids), 1.0, FinishReason.STOP)


def _last_rows(micro: MicroBatch) -> MicroBatch:
    """Of each reply the last target alone, whose row holds the reply's last token."""
    last_Q = np.flatnonzero(np.diff(micro.seq_index, append=-1))
    return replace(
        micro,
        target_rows=micro.target_rows[last_Q],
        target_ids=micro.target_ids[last_Q],
        old_logp=micro.old_logp[last_Q],
        advantage=micro.advantage[last_Q],
        loss_mask=micro.loss_mask[last_Q],
        temperature=micro.temperature[last_Q],
        seq_index=np.arange(micro.n_seqs),
    )
