"""Training every parameter, the expensive alternative: transformers' own model, FP32 masters, the adapter's objective.

One rank: the forward reads weights in the base's dtype; masters, gradient sums and AdamW's state are float32 (18 bytes
a parameter with a bf16 forward). Several ranks: each loads and holds a share of all of it, `fully_shard` gathers a
layer for its forward and backward, and adds gradients up in float32; each rank takes its part of a batch's
micro-batches. A KL to the base keeps a frozen copy, the third one of a run, sharded likewise. Rank 0 puts versions and
checkpoints together whole.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tithe.errors import ResumeError
from tithe.losses import LOSSES, Denominators
from tithe.models import ALONE, Ranks
from tithe.packing import MicroBatch, plan_micro_batches
from tithe.trainer.adam import Adam, StepResult, Tally
from tithe.trainer.full_model import FullPolicy, load_full, unpack, write_full
from tithe.trainer.full_shard import copy_whole, in_dtype, let_go, load_share, own_numbers, whole
from tithe.trainer.kl_weight import KLWeight
from tithe.trainer.objective import loss_input
from tithe.trainer.proof import answer_of, probe_group, score_packed
from tithe.trainer.ranks import Shares, Sums
from tithe.trainer.settings import TrainerSettings
from tithe.types import RolloutGroup, TrainingBatch

SCORE_TOKENS = 4096
"""Rows of a micro-batch that is only scored."""


class FullTrainer:
    """`plan` a batch, `accumulate` its micro-batches, `step`, as `Trainer`. Everything but `plan` runs on the lane.

    `dtype` is what the forward multiplies in and what is published. On several `ranks` every one calls the same methods
    in the same order with the same batch; `plan` gives each its own micro-batches.
    """

    def __init__(
        self,
        directory: Path,
        n_tokens: int,
        settings: TrainerSettings,
        *,
        dtype: torch.dtype = torch.bfloat16,
        ranks: Ranks = ALONE,
    ) -> None:
        self.directory, self.settings, self.dtype, self.ranks = directory, settings, dtype, ranks
        self.policy, self._reference = self._load(n_tokens)
        named = {name.removeprefix("model."): p for name, p in self.policy.named_parameters()}
        self._parameters: dict[str, torch.nn.Parameter] = named
        self._masters: dict[str, Tensor] = dict(named)
        if ranks.size == 1 and dtype is not torch.float32:
            self._masters = {name: p.data.requires_grad_() for name, p in named.items()}
            for p in named.values():
                p.data = p.data.detach().to(dtype)  # parameters only: rotary tables stay float32
        self._adam = Adam(self._masters, settings)
        self._kl = KLWeight(settings)
        self._tally = Tally()
        self._denominators: Denominators | None = None

    def _load(self, n_tokens: int) -> tuple[FullPolicy, FullPolicy | None]:
        """The policy, and the base where there is a KL to it; over ranks this rank's share of both."""
        checkpointing, asks_base = self.settings.activation_checkpointing, self.settings.kl_coef > 0
        if self.ranks.size == 1:
            policy = load_full(self.directory, n_tokens, checkpointing=checkpointing)
            return policy, in_dtype(deepcopy(policy), self.dtype) if asks_base else None
        load = partial(load_share, self.directory, n_tokens, self.ranks, self.dtype, checkpointing=checkpointing)
        return load(is_trained=True), load(is_trained=False) if asks_base else None

    @property
    def kl_coef(self) -> float:
        """The weight of the KL now."""
        return self._kl.of(self.settings)

    # ------------------------------------------------------------------ a batch

    def plan(self, batch: TrainingBatch) -> list[MicroBatch]:
        """Begin a batch that all ranks have: this rank's micro-batches; empty when nothing is trained."""
        shares = self.share_out(batch)
        self.begin(shares.denominators, knows_reference=shares.knows_reference)
        return shares.parts[self.ranks.rank]

    def share_out(self, batch: TrainingBatch) -> Shares:
        """Who computes what of a batch. Changes nothing.

        Ranks must gather weights together, so each gets as many micro-batches; where they do not divide, some repeat
        one with a loss mask that is off everywhere.
        """
        micros, size = plan_micro_batches(batch, self.settings.micro_batch_tokens), self.ranks.size
        blank = [_masked(micros[-1])] * (-len(micros) % size) if micros else []
        parts = [[*micros, *blank][rank::size] for rank in range(size)]
        return Shares.of(micros, parts, self.settings.norm_tokens)

    def begin(self, denominators: Denominators | None, *, knows_reference: bool) -> None:
        """Begin a batch that was shared out: its micro-batches follow, with the reference's log-probs or without."""
        del knows_reference  # each micro-batch says so itself: none is without rows
        self._tally, self._denominators = Tally(), denominators
        self._zero_gradients()

    def accumulate(self, micro: MicroBatch) -> None:
        """Forward and backward of one micro-batch; gradients add up to the batch's."""
        assert self._denominators is not None
        started = time.perf_counter()
        rows = unpack(micro)
        reference = micro.ref_logp
        if reference is None and self._reference is not None:
            with torch.no_grad():
                reference = self._reference(*rows)[0].numpy()
        logp, entropy = self.policy(*rows)
        given = loss_input(micro, logp, entropy, reference, self._denominators, self.settings, self.kl_coef)
        output = LOSSES[self.settings.algorithm](*given)
        (output.loss * self.ranks.size).backward()  # ranks average gradients, whose denominators are the batch's
        self._collect()
        if micro.loss_mask.any():
            self._tally.add(output, started)

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
        grads = {name: master.grad for name, master in self._masters.items() if master.grad is not None}
        self._sum_over_ranks()
        self._adam.settings = self.settings
        result = self._adam.step(grads, self._tally)
        if self._tally.metrics and not result.skipped:
            self._cast()
            assert self._denominators is not None
            if self.kl_coef > 0:
                result.metrics["kl_coef"] = self.kl_coef
            self._kl.observe(self.settings, result.metrics, self._denominators.n_seqs)
        self._zero_gradients()
        return result

    def _sum_over_ranks(self) -> None:
        if self.ranks.size > 1:
            own = self._tally
            sums = Sums(own.loss, own.train_s, 0, 0, own.metrics).over(self.ranks)
            self._tally = Tally(sums.loss, sums.train_s, sums.metrics)

    def _cast(self) -> None:
        """The masters in the forward's dtype, where those are two copies."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if self._masters[name] is not parameter:
                    parameter.copy_(self._masters[name])

    # ------------------------------------------------------------------ scoring and publishing

    def score_policy(self, micro: MicroBatch) -> np.ndarray:
        """log-probs [N] under the policy as it is."""
        with torch.no_grad():
            logp = self.policy(*unpack(micro))[0].numpy()
        let_go(self.policy)
        return logp

    def blank(self, micro: MicroBatch) -> MicroBatch:
        """What a rank scores in a round in which only others have rows: weights are gathered together. `micro` with a
        loss mask that is off."""
        return _masked(micro)

    def score_reference(self, micro: MicroBatch) -> np.ndarray:
        """log-probs [N] under the frozen base."""
        assert self._reference is not None
        with torch.no_grad():
            return self._reference(*unpack(micro))[0].numpy()

    def score(self, groups: Sequence[RolloutGroup], policy: FullPolicy | None = None) -> list[list[np.ndarray | None]]:
        """Per group, per rollout: log-probs [T] as training computes them (None where nothing was sampled).

        `policy` scores in place of the trained one: another version's.
        """
        model = self.policy if policy is None else policy
        with torch.no_grad():
            scored = score_packed(groups, SCORE_TOKENS, lambda micro: model(*unpack(micro))[0].numpy())
        let_go(model)
        return scored

    def probe(self, prompt: Sequence[int], target: Sequence[int]) -> list[float]:
        """log-probs at T = 1 of a probe's completion."""
        return answer_of(self.score([probe_group(prompt, target)]))

    def load_version(self, directory: Path) -> FullPolicy:
        """A published version as a frozen policy in the forward's dtype: one more copy, for as long as it is held."""
        return in_dtype(load_full(directory, self.policy.n_tokens, checkpointing=False), self.dtype)

    def write(self, folder: Path) -> None:
        """Fill a folder with a complete Hugging Face directory in the forward's dtype; every rank calls it, the first
        holds the whole and writes."""
        if self.ranks.size == 1:
            write_full(self.policy, folder, self.directory)
            return
        weights: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            together = whole(parameter.detach())
            if self.ranks.rank == 0:
                weights[name] = together.to(self.dtype)
        if self.ranks.rank == 0:
            write_full(self.policy, folder, self.directory, weights)

    # ------------------------------------------------------------------ state

    @property
    def optimizer_step(self) -> int:
        """Optimizer steps so far, skipped ones included."""
        return self._adam.steps

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything a resume needs: ``model/…``, ``optimizer/exp_avg/…``, ``optimizer/exp_avg_sq/…``, whole.

        No copies on one rank: the next `step` changes them.
        """
        return dict(self.each_tensor())

    def each_tensor(self) -> Iterator[tuple[str, Tensor]]:
        """`state_tensors`, one after the other, for ranks that hold none of them whole."""
        for name, master in self._masters.items():
            yield f"model/{name}", whole(master.detach())
        yield from self._adam.each_tensor()

    def state(self) -> dict[str, float]:
        """The numbers that go with `state_tensors`."""
        return {**self._adam.state(), **self._kl.state()}

    def load_state(self, tensors: Mapping[str, Tensor], state: Mapping[str, float]) -> None:
        """Take back what `state_tensors` and `state` gave, bit for bit, on any number of ranks. Raises `ResumeError`
        naming what is missing."""
        wanted = {f"model/{name}": master.shape for name, master in self._masters.items()}
        wrong = sorted(name for name, shape in wanted.items() if name not in tensors or tensors[name].shape != shape)
        if wrong:
            raise ResumeError(f"the checkpoint lacks weights of this run or has others: {', '.join(wrong[:4])}")
        self._adam.load_state(tensors, {name: int(state[name]) for name in self._adam.state()})
        self._kl.load_state(state)
        with torch.no_grad():
            for name, master in self._masters.items():
                copy_whole(master, tensors[f"model/{name}"])
        self._cast()

    def memory_bytes(self) -> int:
        """Weights in the forward, masters, gradient sums, Adam state and reference, as far as this rank holds them."""
        total = 0
        for name, parameter in self._parameters.items():
            n = own_numbers(parameter)
            total += 16 * n + (n * parameter.element_size() if self._masters[name] is not parameter else 0)
        if self._reference is not None:
            total += sum(own_numbers(p) * p.element_size() for p in self._reference.parameters())
        return total


def _masked(micro: MicroBatch) -> MicroBatch:
    return replace(micro, loss_mask=np.zeros_like(micro.loss_mask))
