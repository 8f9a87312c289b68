"""Optimizer steps on float32 masters, of adapters and whole models: clipping, schedule, what a resume needs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tithe.errors import ResumeError
from tithe.losses import LossMetrics, LossOutput, summarize
from tithe.models import AdamW, clip
from tithe.trainer.full_shard import copy_whole, whole
from tithe.trainer.settings import TrainerSettings

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of every master, float32 in the master's shape."""


@dataclass(frozen=True)
class StepResult:
    """One optimizer step. `skipped` steps had a non-finite loss or gradient and changed nothing."""

    metrics: dict[str, float]
    skipped: bool


@dataclass(frozen=True)
class Applied:
    """What an optimizer step was made with: the gradients' global norm before clipping, the learning rate, and whether
    everything was finite."""

    norm: float
    rate: float
    finite: bool


@dataclass
class Tally:
    """What the micro-batches of one batch add up to. `train_s` is the time of their forward and backward."""

    loss: float = 0.0
    train_s: float = 0.0
    metrics: list[LossMetrics] = field(default_factory=list)

    def add(self, output: LossOutput, started_s: float) -> None:
        """Count a micro-batch that was begun at `started_s` of `time.perf_counter`."""
        self.metrics.append(output.metrics)
        self.loss += float(output.loss.detach())
        self.train_s += time.perf_counter() - started_s


class Adam:
    """AdamW over named masters, which `step` changes in place.

    Masters may be shares of sharded tensors; every rank then calls the same methods in the same order.
    """

    def __init__(self, masters: Mapping[str, Tensor], settings: TrainerSettings) -> None:
        self._masters, self.settings = dict(masters), settings
        self._adamw = AdamW(self._masters, betas=settings.betas, weight_decay=settings.weight_decay)
        self.steps = 0
        """Batches given to `step`, skipped ones included: the place in the schedule."""

    def step(self, grads: Mapping[str, Tensor], tally: Tally) -> StepResult:
        """One step on a batch's gradients, clipped by global norm (they are scaled in place); skipped when the loss or
        the norm is not finite. A batch without micro-batches changes nothing."""
        applied = self.apply(grads, tally.loss if tally.metrics else None)
        metrics = {"loss": tally.loss, "grad_norm": applied.norm, "lr": applied.rate, "train_compute_s": tally.train_s}
        if tally.metrics:
            metrics.update(summarize(tally.metrics))
        return StepResult(metrics, skipped=not applied.finite)

    def apply(self, grads: Mapping[str, Tensor], loss: float | None) -> Applied:
        """As `step`, without metrics; a loss of None is that of nothing, and changes nothing."""
        s = self.settings
        norm = float(whole(torch.nn.utils.get_total_norm(list(grads.values()))))
        finite = bool(np.isfinite(norm) and (loss is None or np.isfinite(loss)))
        rate = s.rate(self.steps)
        if finite and loss is not None:
            self._adamw.step(clip(grads, norm, s.max_grad_norm), rate)
        self.steps += 1
        return Applied(norm, rate, finite)

    # ------------------------------------------------------------------ state

    def state_tensors(self) -> dict[str, Tensor]:
        """``optimizer/exp_avg/…`` and ``optimizer/exp_avg_sq/…`` by master, whole; empty before the first step. No
        copies on one rank: the next `step` changes them."""
        return dict(self.each_tensor())

    def each_tensor(self) -> Iterator[tuple[str, Tensor]]:
        """`state_tensors`, one after the other: of sharded masters each is put together when it is asked for."""
        for name, moments in self._adamw.moments.items():
            for key, moment in zip(MOMENTS, moments, strict=True):
                yield f"optimizer/{key}/{name}", whole(moment)

    def state(self) -> dict[str, int]:
        """The numbers that go with `state_tensors`."""
        return {"optimizer_step": self.steps, "adam_step": self._adamw.steps}

    def load_state(self, tensors: Mapping[str, Tensor], state: Mapping[str, int]) -> None:
        """Take back (copies of) what `state_tensors` and `state` gave, bit for bit, on any number of ranks. Raises
        `ResumeError` naming what is missing, and takes nothing then."""
        keys = MOMENTS if state["adam_step"] > 0 else ()
        wanted = {f"optimizer/{key}/{name}": m.shape for name, m in self._masters.items() for key in keys}
        wrong = sorted(name for name, shape in wanted.items() if name not in tensors or tensors[name].shape != shape)
        if wrong:
            raise ResumeError(f"the checkpoint lacks optimizer state: {', '.join(wrong[:4])}")
        self._adamw.moments.clear()
        for name, master in self._masters.items() if keys else ():
            self._adamw.moments[name] = torch.zeros_like(master), torch.zeros_like(master)
            for key, moment in zip(MOMENTS, self._adamw.moments[name], strict=True):
                copy_whole(moment, tensors[f"optimizer/{key}/{name}"])
        self._adamw.steps = state["adam_step"]
        self.steps = state["optimizer_step"]
