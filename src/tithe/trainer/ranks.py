"""One optimizer step on several ranks: who computes what, and what is summed.

    share_out        the whole batch planned, by rank that computes it
    Idle             a round without rows of one's own                         waits for the others, layer by layer
    sum_gradients    dense and shared tensors summed, those of an expert gathered from its owner
    check_alike      after the step every rank has the same masters, bit for bit

Every rank has the masters and moments of all experts, and takes the same AdamW step on the same bits: a checkpoint of
one rank is everyone's, on any number of ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from tithe.arch import Shard
from tithe.errors import RunError
from tithe.losses import Denominators, LossMetrics, denominators
from tithe.models import Decoder, IdlePass, Ranks
from tithe.models.expert_adapter import EXPERT
from tithe.packing import MicroBatch, plan_micro_batches
from tithe.trainer.settings import TrainerSettings
from tithe.types import TrainingBatch


@dataclass(frozen=True)
class Shares:
    """A planned batch: the whole batch's denominators (None: nothing is trained), and every rank's micro-batches."""

    denominators: Denominators | None
    parts: list[list[MicroBatch]]

    @staticmethod
    def of(micros: Sequence[MicroBatch], parts: list[list[MicroBatch]], norm_tokens: int) -> Shares:
        """`micros` are the batch's, without those that only fill up."""
        return Shares(denominators(micros, norm_tokens) if micros else None, parts)

    @property
    def knows_reference(self) -> bool:
        """Whether the batch comes with the reference's log-probs."""
        return any(micro.ref_logp is not None for part in self.parts for micro in part)


def share_out(batch: TrainingBatch, settings: TrainerSettings, size: int) -> Shares:
    """As many micro-batches for every one of `size` ranks, the last ones without rows where they do not suffice.

    Ranks wait for each other in every layer, so a round costs its largest micro-batch: rounds are made of neighbours in
    the order of size, and micro-batches are cut finer than the budget where that makes the sum over rounds smaller.
    """
    budget = settings.micro_batch_tokens
    micros = plan_micro_batches(batch, budget)
    if size > 1 and micros:
        rows = sum(micro.n_rows for micro in micros)
        each = -(-rows // (-(-len(micros) // size) * size))
        finer = plan_micro_batches(batch, min(each, budget))
        micros = min((micros, finer), key=lambda plan: sum(micro.n_rows for micro in plan[::size]))
    parts: list[list[MicroBatch]] = [[] for _ in range(size)]
    for at in range(0, len(micros), size):
        together = [*micros[at : at + size], *[empty_micro_batch()] * (at + size - len(micros))]
        is_even = at // size % 2 == 0  # the largest takes turns
        for part, micro in zip(parts, together if is_even else reversed(together), strict=True):
            part.append(micro)
    return Shares.of(micros, parts, settings.norm_tokens)


def empty_micro_batch() -> MicroBatch:
    """No rows, no targets."""
    i32, i64, f32 = np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.float32)
    return MicroBatch(
        input_ids=i64,
        positions=i32,
        seg_start=i32,
        seg_len=i32,
        seg_prefix=i32,
        target_rows=i64,
        target_ids=i64,
        old_logp=f32,
        advantage=f32,
        loss_mask=np.zeros(0, np.bool_),
        temperature=f32,
        seq_index=i64,
        seq_group=i32,
        seq_rollout=i32,
    )


def is_idle(micro: MicroBatch) -> bool:
    """Whether only other ranks have rows in this round."""
    return len(micro.input_ids) == 0


class Idle:
    """What a rank runs in rounds in which only others have rows: one pass, made when it is first needed."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._pass: IdlePass | None = None

    def take(self) -> IdlePass:
        """The pass; its buffers stay until `release`."""
        self._pass = self._pass or IdlePass(self._decoder)
        return self._pass

    def release(self) -> None:
        """Let the buffers go."""
        self._pass = None


def sum_gradients(ranks: Ranks, grads: Mapping[str, Tensor], n_experts: int) -> dict[str, Tensor]:
    """The batch's gradients on every rank. Sums run in ascending rank; a tensor that every expert has is put together
    from the ranks' own experts, each of which has already summed the rows of all ranks."""
    sizes = [len(Shard(rank, ranks.size).experts(n_experts)) for rank in range(ranks.size)]
    out: dict[str, Tensor] = {}
    for name, grad in grads.items():
        out[name] = ranks.gather_blocks(grad, sizes) if EXPERT in name else grad.contiguous()
    ranks.sum([out[name] for name in out if EXPERT not in name])
    return out


@dataclass(frozen=True)
class Sums:
    """What one rank, or all, counted in a batch. `train_s` of all is the slowest rank's."""

    loss: float
    train_s: float
    agreeing: int
    replayed: int
    metrics: list[LossMetrics]

    def over(self, ranks: Ranks) -> Sums:
        """Those of all ranks, in ascending rank; the same numbers on every rank."""
        own = torch.tensor(
            [self.loss, self.train_s, self.agreeing, self.replayed, *_flat(self.metrics)], dtype=torch.float64
        )
        told = ranks.all_gather(own)
        loss, _, agreeing, replayed = (sum(float(one[i]) for one in told) for i in range(4))
        metrics = [part for one in told if (part := _unflat(one[4:])) is not None]
        return Sums(loss, max(float(one[1]) for one in told), int(agreeing), int(replayed), metrics)


_NAMES = [field.name for field in fields(LossMetrics)]


def _flat(metrics: Sequence[LossMetrics]) -> list[float]:
    """Per field: in how many parts it is known, and its sum over them (`ratio_max`: the largest)."""
    out: list[float] = []
    for name in _NAMES:
        found = [float(value) for part in metrics if (value := getattr(part, name)) is not None]
        total = max(found, default=0.0) if name == "ratio_max" else sum(found)
        out += [float(len(found)), total]
    return out


def _unflat(values: Tensor) -> LossMetrics | None:
    """None of a rank that had no rows."""
    known = {name: values[2 * i + 1] if values[2 * i] > 0 else None for i, name in enumerate(_NAMES)}
    return LossMetrics(**known) if known["n_tokens"] is not None else None  # pyright: ignore[reportArgumentType]


def check_alike(ranks: Ranks, masters: Mapping[str, Tensor]) -> None:
    """`RunError` when ranks do not hold the same bits."""
    if ranks.size == 1:
        return
    checksum = 0
    for _, master in sorted(masters.items()):
        checksum = zlib.crc32(master.detach().contiguous().view(-1).numpy().data, checksum)
    told = [int(one) for one in ranks.all_gather(torch.tensor([checksum]))]
    if len(set(told)) > 1:
        raise RunError(
            f"after the optimizer step ranks hold different adapters (checksums {told}): they differ in hardware, in "
            "libraries or in the batch they were given; resume from the last checkpoint"
        )
