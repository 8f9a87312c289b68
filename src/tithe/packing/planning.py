"""Which rollouts ride together in one micro-batch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from tithe.errors import DataError
from tithe.packing.layout import MicroBatch, lay_out
from tithe.types import TrainingBatch

Member = tuple[int, int]
"""(group index, rollout index) in a `TrainingBatch`."""


def plan_micro_batches(batch: TrainingBatch, budget_tokens: int) -> list[MicroBatch]:
    """Split the trained rollouts of a batch into micro-batches of at most `budget_tokens` rows each.

    Trained are rollouts that have an advantage and at least one token under the loss mask; all others are left out,
    and a batch without any gives an empty list. A rollout is never cut. A group stays whole when it fits the budget;
    otherwise it is split and its prompt rows are repeated in every part. A rollout that alone exceeds the budget
    (prompt included) gets a micro-batch of its own, the only kind that may exceed it.

    The cost that is balanced is rows, since linears dominate at the lengths trained here. Parts are placed biggest
    first onto the least loaded micro-batch; ties go to the earlier part, so equal batches give equal plans. The list
    is ordered by falling size (the peak of memory is met first), groups and rollouts inside in batch order.

    Raises `ValueError` for a budget below 1 or arrays of unequal length, `DataError` for an empty prompt.
    """
    if budget_tokens < 1:
        raise ValueError(f"the budget of a micro-batch is at least one row, not {budget_tokens}")
    _check_shape(batch)
    parts: list[list[Member]] = []
    rows: list[int] = []
    for g, group in enumerate(batch.groups):
        members = [(g, r) for r in range(len(group.rollouts)) if _is_trained(batch, g, r)]
        if not members:
            continue
        n_prompt = len(group.prompt_ids)
        if n_prompt == 0:
            raise DataError(f"prompt {group.prompt_id!r} has no tokens; nothing could predict its first answer token")
        own_rows = [len(group.rollouts[r].token_ids) - 1 for _, r in members]
        for chosen in _spread(own_rows, budget_tokens - n_prompt):
            parts.append([members[i] for i in chosen])
            rows.append(n_prompt + sum(own_rows[i] for i in chosen))
    plan = [sorted(member for part in chosen for member in parts[part]) for chosen in _spread(rows, budget_tokens)]
    micros = [lay_out(batch, members) for members in plan]
    return sorted(micros, key=lambda micro: (-micro.n_rows, int(micro.seq_group[0]), int(micro.seq_rollout[0])))


def _spread(costs: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of `costs` in balanced bins: longest-processing-time-first onto as few bins as the total allows, a new
    bin whenever the least loaded one has no room. An item above the capacity sits alone. Indices ascend in each bin.
    """
    fitting = [cost for cost in costs if cost <= capacity]
    n_bins = len(costs) - len(fitting) + (-(-sum(fitting) // capacity) if capacity > 0 else 0)
    bins: list[list[int]] = [[] for _ in range(n_bins)]
    loads = [(0, b) for b in range(n_bins)]  # a heap: the least loaded bin first, then the oldest
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        if loads and (not bins[loads[0][1]] or loads[0][0] + costs[i] <= capacity):
            load, b = heapq.heappop(loads)
        else:
            load, b = 0, len(bins)
            bins.append([])
        bins[b].append(i)
        heapq.heappush(loads, (load + costs[i], b))
    return [sorted(chosen) for chosen in bins if chosen]


def _is_trained(batch: TrainingBatch, group: int, rollout: int) -> bool:
    advantage = batch.advantages[group][rollout]
    if advantage is None:
        return False
    one = batch.groups[group].rollouts[rollout]
    n_tokens = len(one.token_ids)
    lengths = {"loss_mask": len(one.loss_mask), "logp": len(one.logp), "advantages": len(advantage)}
    wrong = {name: n for name, n in lengths.items() if n != n_tokens}
    if wrong:
        raise ValueError(f"rollout {rollout} of group {group} has {n_tokens} tokens but {wrong}")
    return bool(one.loss_mask.any())


def _check_shape(batch: TrainingBatch) -> None:
    wanted = [len(group.rollouts) for group in batch.groups]
    given = [len(advantages) for advantages in batch.advantages]
    if wanted != given:
        raise ValueError(f"the groups have {wanted} rollouts but {given} advantages")
