"""The rows of one micro-batch: what is computed, what attends to what, and what is predicted.

Shape legend: _R rows (positions that pass the linears), _S attention segments, _N targets (completion tokens),
_Q sequences (rollouts) of the micro-batch, _P prompt tokens of a group, _T completion tokens of a rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tithe.types import PerRollout, TrainingBatch

Int64Array = NDArray[np.int64]
Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
BoolArray = NDArray[np.bool_]

NO_PREFIX = -1
"""Value of `seg_prefix` on a prompt's segment."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Whole rollouts, each group's prompt once, in numpy arrays.

    Rows come group part by group part: the P prompt rows at positions 0..P-1, then for each rollout its completion
    tokens *except the last* at positions P..P+T-2 (the last token is only ever predicted). Every prompt is one segment
    with ``seg_prefix`` -1, whose rows attend causally to each other. Every rollout is one segment with ``seg_prefix`` =
    index of its prompt's segment: its rows attend to all P prompt rows and causally to their own segment. A rollout of
    one token has a segment of length 0. Targets come rollout by rollout: target t of a rollout is predicted by the row
    that holds the token before it, which for t = 0 is the last prompt row; several rollouts share that row.

    =============== ========== ====================================================================================
    field           shape      meaning
    =============== ========== ====================================================================================
    input_ids       int64 [R]  token of each row (R counts padding, if `pad_rows` added any, at the end)
    positions       int32 [R]  position of the row within its own prompt + completion
    seg_start       int32 [S]  first row of the segment
    seg_len         int32 [S]  rows of the segment; segments lie end to end in row order
    seg_prefix      int32 [S]  -1 for a prompt, else the index of the prompt's segment
    target_rows     int64 [N]  row whose hidden state predicts the target
    target_ids      int64 [N]  the completion token
    old_logp        f32 [N]    the sampler's log-softmax(logits / T) of the target, nats
    advantage       f32 [N]    advantage of the target
    loss_mask       bool [N]   True where the model wrote the token; the others are carried and never trained
    temperature     f32 [N]    T of the rollout
    seq_index       int64 [N]  which sequence of this micro-batch the target belongs to, non-decreasing
    seq_group       int32 [Q]  index of the sequence's group in `TrainingBatch.groups`
    seq_rollout     int32 [Q]  index of the sequence in its group's `rollouts`
    experts         int32      [R, L, k]: the experts that the sampler took at each row, -1 where that is not known;
                               None when no rollout has any
    behaviour_logp  f32 [N]    `old_logp` renormalised over what top-p, top-k and min-p kept; None where that
                               changes nothing
    prox_logp       f32 [N]    of `BatchScores`, as the next three; None where nothing was scored
    ref_logp        f32 [N]
    old_value       f32 [N]    the critic's `value`
    returns         f32 [N]
    =============== ========== ====================================================================================

    Two rollouts [7, 8, 2] and [9] of the prompt [4, 5]:

    >>> from tithe.types import FinishReason, Rollout, RolloutGroup
    >>> def rollout(sample, ids):
    ...     ids = np.array(ids, np.int32)
    ...     logp = np.zeros(len(ids), np.float32)
    ...     return Rollout(sample, ids, np.ones(len(ids), bool), logp, logp, ids * 0, 1.0, FinishReason.STOP)
    >>> group = RolloutGroup(0, "p", np.array([4, 5], np.int32), (rollout(0, [7, 8, 2]), rollout(1, [9])), 0, 0)
    >>> batch = TrainingBatch([group], [[np.full(3, 0.5, np.float32), np.full(1, -0.5, np.float32)]], serial=0)
    >>> micro = lay_out(batch, [(0, 0), (0, 1)])
    >>> micro.input_ids.tolist(), micro.positions.tolist()
    ([4, 5, 7, 8], [0, 1, 2, 3])
    >>> micro.seg_start.tolist(), micro.seg_len.tolist(), micro.seg_prefix.tolist()
    ([0, 2, 4], [2, 2, 0], [-1, 0, 0])
    >>> micro.target_rows.tolist(), micro.target_ids.tolist(), micro.seq_index.tolist()
    ([1, 2, 3, 1], [7, 8, 2, 9], [0, 0, 0, 1])
    """

    input_ids: Int64Array
    positions: Int32Array
    seg_start: Int32Array
    seg_len: Int32Array
    seg_prefix: Int32Array
    target_rows: Int64Array
    target_ids: Int64Array
    old_logp: Float32Array
    advantage: Float32Array
    loss_mask: BoolArray
    temperature: Float32Array
    seq_index: Int64Array
    seq_group: Int32Array
    seq_rollout: Int32Array
    experts: Int32Array | None = None
    behaviour_logp: Float32Array | None = None
    prox_logp: Float32Array | None = None
    ref_logp: Float32Array | None = None
    old_value: Float32Array | None = None
    returns: Float32Array | None = None

    @property
    def n_seqs(self) -> int:
        """Rollouts in this micro-batch (Q)."""
        return len(self.seq_group)

    @property
    def n_rows(self) -> int:
        """Rows that belong to a segment; ``len(input_ids) - n_rows`` rows at the end are padding."""
        return int(self.seg_len.sum())

    @property
    def n_trained_tokens(self) -> int:
        """Targets with the loss mask on."""
        return int(np.count_nonzero(self.loss_mask))


def lay_out(batch: TrainingBatch, members: Sequence[tuple[int, int]]) -> MicroBatch:
    """Lay out the rollouts `members` = (group index, rollout index), all trained; the members of a group adjacent.

    Copies everything it needs, so that the pool's arrays may go.
    """
    rollouts = [batch.groups[g].rollouts[r] for g, r in members]
    lengths_Q = np.array([len(rollout.token_ids) for rollout in rollouts], np.int64)
    ids_S: list[NDArray[np.int32]] = []
    prefix_S: list[int] = []
    prompt_of_Q: list[int] = []  # segment index of each sequence's prompt
    prompt = NO_PREFIX
    for i, (g, _) in enumerate(members):
        if i == 0 or members[i - 1][0] != g:
            prompt = len(ids_S)
            ids_S.append(batch.groups[g].prompt_ids)
            prefix_S.append(NO_PREFIX)
        prompt_of_Q.append(prompt)
        ids_S.append(rollouts[i].token_ids[:-1])
        prefix_S.append(prompt)

    seg_prefix = np.array(prefix_S, np.int64)
    seg_len = np.array([len(ids) for ids in ids_S], np.int64)
    seg_start = np.cumsum(seg_len) - seg_len
    first_position_S = np.where(seg_prefix == NO_PREFIX, 0, seg_len[seg_prefix])
    rows_R = np.arange(seg_len.sum())
    own_start_Q = seg_start[seg_prefix != NO_PREFIX]
    last_prompt_row_Q = (seg_start + seg_len - 1)[prompt_of_Q]

    offset_N = _ramp(lengths_Q)  # 0..T-1 within each rollout
    scores = batch.scores
    before_N = np.repeat(own_start_Q, lengths_Q) + offset_N - 1
    return MicroBatch(
        input_ids=np.concatenate(ids_S).astype(np.int64),
        positions=(rows_R + np.repeat(first_position_S - seg_start, seg_len)).astype(np.int32),
        seg_start=seg_start.astype(np.int32),
        seg_len=seg_len.astype(np.int32),
        seg_prefix=seg_prefix.astype(np.int32),
        target_rows=np.where(offset_N == 0, np.repeat(last_prompt_row_Q, lengths_Q), before_N),
        target_ids=np.concatenate([r.token_ids for r in rollouts]).astype(np.int64),
        old_logp=np.concatenate([r.logp for r in rollouts]).astype(np.float32),
        advantage=np.concatenate([_advantage(batch, g, r) for g, r in members]).astype(np.float32),
        loss_mask=np.concatenate([r.loss_mask for r in rollouts]).astype(np.bool_),
        temperature=np.repeat(np.array([r.temperature for r in rollouts], np.float32), lengths_Q),
        seq_index=np.repeat(np.arange(len(members), dtype=np.int64), lengths_Q),
        seq_group=np.array([g for g, _ in members], np.int32),
        seq_rollout=np.array([r for _, r in members], np.int32),
        experts=_experts(batch, members, seg_start, seg_len),
        behaviour_logp=_behaviour(batch, members),
        prox_logp=_scored(scores and scores.prox_logp, members),
        ref_logp=_scored(scores and scores.ref_logp, members),
        old_value=_scored(scores and scores.value, members),
        returns=_scored(scores and scores.returns, members),
    )


def _behaviour(batch: TrainingBatch, members: Sequence[tuple[int, int]]) -> Float32Array | None:
    rollouts = [batch.groups[g].rollouts[r] for g, r in members]
    if all(np.array_equal(r.logp, r.logp_behaviour) for r in rollouts):
        return None
    return np.concatenate([r.logp_behaviour for r in rollouts]).astype(np.float32)


def _scored(part: PerRollout | None, members: Sequence[tuple[int, int]]) -> Float32Array | None:
    if part is None:
        return None
    found = [part[g][r] for g, r in members]
    missing = [member for member, one in zip(members, found, strict=True) if one is None]
    if missing:
        raise ValueError(f"rollout {missing[0][1]} of group {missing[0][0]} was not scored and cannot be trained")
    return np.concatenate([one for one in found if one is not None]).astype(np.float32)


def _experts(
    batch: TrainingBatch, members: Sequence[tuple[int, int]], seg_start: Int64Array, seg_len: Int64Array
) -> Int32Array | None:
    """The rows' experts as the sampler took them. A prompt's rows take those of its first rollout here."""
    shapes = {r.experts.shape[1:] for g, i in members if (r := batch.groups[g].rollouts[i]).experts is not None}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise ValueError(f"rollouts of one batch come from models of different experts: {sorted(shapes)}")
    rows = np.full((int(seg_len.sum()), *shapes.pop()), -1, np.int32)
    segment = 0
    for i, (g, r) in enumerate(members):
        found, prompt = batch.groups[g].rollouts[r].experts, len(batch.groups[g].prompt_ids)
        if i == 0 or members[i - 1][0] != g:
            if found is not None:
                rows[seg_start[segment] : seg_start[segment] + prompt] = found[:prompt]
            segment += 1
        if found is not None:
            rows[seg_start[segment] : seg_start[segment] + seg_len[segment]] = found[prompt:]
        segment += 1
    return rows


def pad_rows(micro: MicroBatch, multiple: int, token_id: int = 0) -> MicroBatch:
    """Append rows until R is a multiple of `multiple`, for kernels with fixed tiles.

    Padding rows hold `token_id` (any valid id) at position 0, come after all real rows, belong to no segment and are
    the row of no target: nothing they compute is ever read, so they change neither loss nor gradient. Real rows,
    segments and targets stay as they are. Raises `ValueError` when `multiple` < 1.

    >>> n_padding(5, 4), n_padding(8, 4)
    (3, 0)
    """
    extra = n_padding(len(micro.input_ids), multiple)
    if extra == 0:
        return micro
    unknown = ((0, extra), (0, 0), (0, 0))
    return replace(
        micro,
        input_ids=np.concatenate([micro.input_ids, np.full(extra, token_id, np.int64)]),
        positions=np.concatenate([micro.positions, np.zeros(extra, np.int32)]),
        experts=None if micro.experts is None else np.pad(micro.experts, unknown, constant_values=-1),
    )


def n_padding(n_rows: int, multiple: int) -> int:
    """Rows missing up to the next multiple."""
    if multiple < 1:
        raise ValueError(f"rows are padded to a multiple of at least 1, not {multiple}")
    return -n_rows % multiple


def _ramp(lengths: Int64Array) -> Int64Array:
    """0..n-1 for each n of `lengths`, end to end."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _advantage(batch: TrainingBatch, group: int, rollout: int) -> NDArray[np.float32]:
    advantage = batch.advantages[group][rollout]
    if advantage is None:
        raise ValueError(f"rollout {rollout} of group {group} has no advantage and cannot be trained")
    return advantage
