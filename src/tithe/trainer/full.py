"""Training every parameter, the expensive alternative: transformers' own model, FP32 masters, the adapter's objective.

One rank: the forward reads weights in the base's dtype; masters, gradient sums and AdamW's state are float32 (18 bytes
a parameter with a bf16 forward). Several ranks of a process group: `fully_shard` holds a share of all of it on each,
gathers a layer for its forward and backward, and adds gradients up in float32; each rank takes its part of a batch's
micro-batches. A KL to the base keeps a frozen copy, the third one of a run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tithe.errors import ResumeError
from tithe.losses import LOSSES, Denominators, LossMetrics, denominators, summarize
from tithe.packing import MicroBatch, plan_micro_batches
from tithe.trainer.full_model import FullPolicy, load_full, unpack, write_full
from tithe.trainer.full_shard import copy_whole, shard, whole
from tithe.trainer.objective import loss_input
from tithe.trainer.settings import TrainerSettings
from tithe.trainer.trainer import StepResult
from tithe.types import FinishReason, Rollout, RolloutGroup, TrainingBatch

SCORE_TOKENS = 4096
"""Rows of a micro-batch that is only scored."""


class FullTrainer:
    """`plan` a batch, `accumulate` its micro-batches, `step`, as `Trainer`. Everything but `plan` runs on the lane.

    `dtype` is what the forward multiplies in and what is published. With `group` (more than one rank) every rank calls
    the same methods in the same order with the same batch; `plan` gives each rank its own micro-batches.
    """

    def __init__(
        self,
        directory: Path,
        n_tokens: int,
        settings: TrainerSettings,
        *,
        dtype: torch.dtype = torch.bfloat16,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.directory, self.settings, self.dtype = directory, settings, dtype
        self._ranks, self._rank = (group.size(), group.rank()) if group is not None else (1, 0)
        self.policy = load_full(directory, n_tokens, checkpointing=settings.activation_checkpointing)
        self._reference = frozen_copy(self.policy, dtype) if settings.kl_coef > 0 else None
        if group is not None and self._ranks > 1:
            shard(self.policy, group, dtype)
        named = {name.removeprefix("model."): p for name, p in self.policy.named_parameters()}
        self._parameters: dict[str, torch.nn.Parameter] = named
        self._masters: dict[str, Tensor] = dict(named)
        if self._ranks == 1 and dtype is not torch.float32:
            self._masters = {name: p.data.requires_grad_() for name, p in named.items()}
            for p in named.values():
                p.data = p.data.detach().to(dtype)  # parameters only: rotary tables stay float32
        self._optimizer = torch.optim.AdamW(
            list(self._masters.values()),
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            foreach=False,  # one tensor at a time: no temporary copies of all moments at once
        )
        self.optimizer_step = 0
        self._metrics: list[LossMetrics] = []
        self._loss, self._train_s = 0.0, 0.0
        self._denominators: Denominators | None = None

    # ------------------------------------------------------------------ a batch

    def plan(self, batch: TrainingBatch) -> list[MicroBatch]:
        """This rank's micro-batches, with the whole batch's denominators fixed; empty when nothing is trained.

        Ranks must gather weights together, so each gets as many; where they do not divide, some repeat a micro-batch
        with a loss mask that is off everywhere.
        """
        micros = plan_micro_batches(batch, self.settings.micro_batch_tokens)
        self._metrics, self._loss, self._train_s = [], 0.0, 0.0
        self._denominators = denominators(micros, self.settings.norm_tokens) if micros else None
        self._zero_gradients()
        blank = [_masked(micros[-1])] * (-len(micros) % self._ranks) if micros else []
        return [*micros, *blank][self._rank :: self._ranks]

    def accumulate(self, micro: MicroBatch) -> None:
        """Forward and backward of one micro-batch; gradients add up to the batch's."""
        assert self._denominators is not None
        started = time.perf_counter()
        rows = unpack(micro)
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference = self._reference(*rows)[0].numpy()
        logp, entropy = self.policy(*rows)
        given = loss_input(micro, logp, entropy, reference, self._denominators, self.settings)
        output = LOSSES[self.settings.algorithm](given, self.settings.loss)
        (output.loss * self._ranks).backward()  # ranks average gradients, whose denominators are the batch's
        self._collect()
        self._metrics.append(output.metrics)
        self._loss += float(output.loss.detach())
        self._train_s += time.perf_counter() - started

    def _collect(self) -> None:
        """Add gradients in the forward's dtype to float32 sums, and let them go."""
        for name, parameter in self._parameters.items():
            master = self._masters[name]
            if master is parameter or parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

    def _zero_gradients(self) -> None:
        for name, master in self._masters.items():
            master.grad = self._parameters[name].grad = None

    def step(self) -> StepResult:
        """One AdamW step on the accumulated gradients, clipped by global norm; skipped when anything is not finite."""
        s = self.settings
        grads = [master.grad for master in self._masters.values() if master.grad is not None]
        norm = float(whole(torch.nn.utils.get_total_norm(grads)))
        loss = self._sum_over_ranks(self._loss)
        finite = bool(np.isfinite(norm) and np.isfinite(loss))
        rate = s.rate(self.optimizer_step)
        metrics = {"loss": loss, "grad_norm": norm, "lr": rate, "train_compute_s": self._train_s}
        if self._metrics:
            metrics.update(summarize(self._metrics))
        if finite and self._metrics:
            scale = min(1.0, s.max_grad_norm / (norm + 1e-6))
            for grad in grads:
                grad.mul_(scale)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
            self._cast()
        self._zero_gradients()
        self.optimizer_step += 1
        return StepResult(metrics, skipped=not finite)

    def _sum_over_ranks(self, value: float) -> float:
        if self._ranks == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total)
        return float(total)

    def _cast(self) -> None:
        """The masters in the forward's dtype, where those are two copies."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if self._masters[name] is not parameter:
                    parameter.copy_(self._masters[name])

    # ------------------------------------------------------------------ scoring and publishing

    def score(self, groups: Sequence[RolloutGroup], policy: FullPolicy | None = None) -> list[list[np.ndarray | None]]:
        """Per group, per rollout: log-probs [T] as training computes them (None where nothing was sampled).

        `policy` scores in place of the trained one: another version's.
        """
        model = self.policy if policy is None else policy
        ones = [
            [np.ones(len(r.token_ids), np.float32) if len(r.token_ids) else None for r in g.rollouts] for g in groups
        ]
        out: list[list[np.ndarray | None]] = [[None] * len(g.rollouts) for g in groups]
        with torch.no_grad():
            for micro in plan_micro_batches(TrainingBatch(groups, ones, 0), SCORE_TOKENS):
                logp = model(*unpack(micro))[0].numpy()
                for q in range(micro.n_seqs):
                    out[micro.seq_group[q]][micro.seq_rollout[q]] = logp[micro.seq_index == q]
        return out

    def probe(self, prompt: Sequence[int], target: Sequence[int]) -> list[float]:
        """log-probs at T = 1 of a probe's completion."""
        n = len(target)
        zeros = np.zeros(n, np.float32)
        ids = np.array(target, np.int32)
        rollout = Rollout(0, ids, np.ones(n, bool), zeros, zeros, np.zeros(n, np.int32), 1.0, FinishReason.STOP)
        logp = self.score([RolloutGroup(0, "probe", np.array(prompt, np.int32), (rollout,), 0, 0)])[0][0]
        assert logp is not None
        return [float(x) for x in logp]

    def load_version(self, directory: Path) -> FullPolicy:
        """A published version as a frozen policy in the forward's dtype: one more copy, for as long as it is held."""
        return frozen_copy(load_full(directory, self.policy.n_tokens, checkpointing=False), self.dtype, own=True)

    def write(self, folder: Path) -> None:
        """Fill a folder with a complete Hugging Face directory in the forward's dtype; every rank calls it, the first
        writes."""
        weights = None
        if self._ranks > 1:
            weights = {n: whole(p.detach()).to(self.dtype) for n, p in self._parameters.items()}
        if self._rank == 0:
            write_full(self.policy, folder, self.directory, weights)

    # ------------------------------------------------------------------ state

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything a resume needs: ``model/…``, ``optimizer/exp_avg/…``, ``optimizer/exp_avg_sq/…``, whole.

        No copies on one rank: the next `step` changes them.
        """
        state = {f"model/{name}": whole(master.detach()) for name, master in self._masters.items()}
        for name, master in self._masters.items():
            for key in ("exp_avg", "exp_avg_sq"):
                if master in self._optimizer.state:
                    state[f"optimizer/{key}/{name}"] = whole(self._optimizer.state[master][key].detach())
        return state

    def state(self) -> dict[str, int]:
        """The numbers that go with `state_tensors`."""
        steps = [int(self._optimizer.state[m]["step"]) for m in self._masters.values() if m in self._optimizer.state]
        return {"optimizer_step": self.optimizer_step, "adam_step": max(steps, default=0)}

    def load_state(self, tensors: Mapping[str, Tensor], state: Mapping[str, int]) -> None:
        """Take back what `state_tensors` and `state` gave, bit for bit, on any number of ranks. Raises `ResumeError`
        naming what is missing."""
        moments = ("exp_avg", "exp_avg_sq") if state["adam_step"] > 0 else ()
        wanted = {f"model/{name}": master.shape for name, master in self._masters.items()}
        wanted |= {f"optimizer/{k}/{n}": master.shape for n, master in self._masters.items() for k in moments}
        wrong = sorted(name for name, shape in wanted.items() if name not in tensors or tensors[name].shape != shape)
        if wrong:
            raise ResumeError(f"the checkpoint lacks weights of this run or has others: {', '.join(wrong[:4])}")
        self._optimizer.state.clear()
        with torch.no_grad():
            for name, master in self._masters.items():
                copy_whole(master, tensors[f"model/{name}"])
                if moments:
                    own = {key: torch.zeros_like(master) for key in moments}
                    for key, moment in own.items():
                        copy_whole(moment, tensors[f"optimizer/{key}/{name}"])
                    step = torch.tensor(float(state["adam_step"]))
                    self._optimizer.state[master] = {"step": step, **own}
        self.optimizer_step = state["optimizer_step"]
        self._cast()

    def memory_bytes(self) -> int:
        """Whole model's weights in the forward, masters, gradient sums, Adam state and reference."""
        total = 0
        for name, parameter in self._parameters.items():
            n = parameter.numel()
            total += 16 * n + (n * parameter.element_size() if self._masters[name] is not parameter else 0)
        if self._reference is not None:
            total += sum(p.numel() * p.element_size() for p in self._reference.parameters())
        return total


def frozen_copy(policy: FullPolicy, dtype: torch.dtype, *, own: bool = False) -> FullPolicy:
    """A policy without gradients in another dtype; the given one itself when it is the caller's `own`."""
    copy = policy if own else deepcopy(policy)
    for parameter in copy.parameters():
        parameter.data = parameter.data.to(dtype)
    return copy.requires_grad_(requires_grad=False).eval()


def _masked(micro: MicroBatch) -> MicroBatch:
    return replace(micro, loss_mask=np.zeros_like(micro.loss_mask))
