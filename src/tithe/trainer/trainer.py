"""Forward, backward and optimizer step of the adapter. Knows no loop, no engine, no file.

Master weights and Adam state are float32; every forward uses the published cast, the one the sampler reads.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from tithe.errors import ResumeError
from tithe.lora import LoraSpec
from tithe.losses import LOSSES, Denominators, denominators
from tithe.models import ALONE, AdapterGradients, Decoder, IdlePass, Ranks, TrainAdapter, stack_experts
from tithe.packing import MicroBatch
from tithe.trainer.adam import Adam, StepResult, Tally
from tithe.trainer.objective import loss_input
from tithe.trainer.passes import Passes
from tithe.trainer.ranks import Sums, check_alike, plan_for_ranks, sum_gradients, take_part
from tithe.trainer.settings import TrainerSettings
from tithe.types import TrainingBatch


class Trainer:
    """`plan` a batch, `accumulate` its micro-batches, `step`. Everything but `plan` runs on the lane.

    Mutates only its own tensors: masters, gradients, Adam state. On several ranks all call the same methods with the
    same batches, and hold the same tensors afterwards; see `tithe.trainer.ranks`.
    """

    def __init__(
        self,
        decoder: Decoder,
        spec: LoraSpec,
        tensors: Mapping[str, Tensor],
        settings: TrainerSettings,
        ranks: Ranks = ALONE,
    ) -> None:
        self.decoder, self.spec, self.settings, self.ranks = decoder, spec, settings, ranks
        together = sorted(stack_experts(tensors).items())
        self._masters = {name: t.detach().float().clone().requires_grad_() for name, t in together}
        self._adam = Adam(self._masters, settings)
        self._adapter = TrainAdapter.build(decoder, self._masters, spec)
        self._gradients: AdapterGradients | None = None
        self._idle: IdlePass | None = None
        self.passes = Passes(
            decoder,
            self._adapter.widths(),
            checkpointing=settings.activation_checkpointing,
            dropout=settings.dropout,
        )
        self._tally = Tally()
        self._denominators: Denominators | None = None
        self._micro_index = 0

    # ------------------------------------------------------------------ a batch

    def plan(self, batch: TrainingBatch) -> list[MicroBatch]:
        """This rank's micro-batches, with the whole batch's denominators fixed; empty when nothing is trained."""
        micros, own = plan_for_ranks(batch, self.settings.micro_batch_tokens, self.ranks)
        self._tally, self._micro_index = Tally(), self.ranks.rank
        self._denominators = denominators(micros, self.settings.norm_tokens) if micros else None
        self._gradients = AdapterGradients(self.decoder, self._adapter) if micros else None
        return own

    def accumulate(self, micro: MicroBatch) -> None:
        """Forward and backward of one micro-batch; gradients add up to the batch's."""
        assert self._gradients is not None
        assert self._denominators is not None
        started = time.perf_counter()
        settings = self.settings
        if len(micro.input_ids) == 0:
            self._idle = self._idle or IdlePass(self.decoder)
            take_part(self._idle, self._adapter, self._gradients, settings)
            self._micro_index += self.ranks.size
            return
        reference = self.passes.score(micro, None) if settings.kl_coef > 0 else None
        seed = self._dropout_seed() if settings.dropout > 0 else None
        self._micro_index += self.ranks.size
        bonus = settings.loss.entropy_coef > 0
        scored, rows = self.passes.forward(micro, self._adapter, dropout_seed=seed, entropy_gradient=bonus)
        logp = torch.from_numpy(scored.logp).requires_grad_()
        entropy = torch.from_numpy(scored.entropy).requires_grad_(bonus)
        output = LOSSES[settings.algorithm](
            loss_input(micro, logp, entropy, reference, self._denominators, settings), settings.loss
        )
        output.loss.backward()
        assert logp.grad is not None
        d_normed = logp.grad[:, None] * scored.d_logp
        if scored.d_entropy is not None and entropy.grad is not None:
            d_normed += entropy.grad[:, None] * scored.d_entropy
        self.passes.backward(micro, rows, d_normed, self._gradients)
        self._tally.add(output, started)

    def _dropout_seed(self) -> int:
        """32 bits that follow (run seed, step, micro-batch), for run seeds of any size."""
        place = (self.settings.seed, self.optimizer_step, self._micro_index)
        return int(np.random.SeedSequence(place).generate_state(1)[0])

    def step(self) -> StepResult:
        """One AdamW step on the accumulated gradients, clipped by global norm; skipped when anything is not finite."""
        self.passes.release()
        self._idle = None
        grads = self._gradients.named(self._masters) if self._gradients is not None else {}
        if self.ranks.size > 1:
            grads = sum_gradients(self.ranks, grads, self.decoder.n_experts)
            self._sum_over_ranks()
        result = self._adam.step(grads, self._tally)
        agreement = self.passes.take_agreement()
        if agreement is not None:
            result.metrics["router_agreement"] = agreement
        if self._tally.metrics and not result.skipped:
            check_alike(self.ranks, self._masters)
            self._rebuild()
        self._gradients = None
        return result

    def _sum_over_ranks(self) -> None:
        own = self._tally
        sums = Sums(own.loss, own.train_s, self.passes.agreeing, self.passes.replayed, own.metrics).over(self.ranks)
        self._tally = Tally(sums.loss, sums.train_s, sums.metrics)
        self.passes.agreeing, self.passes.replayed = sums.agreeing, sums.replayed

    def _rebuild(self) -> None:
        self.passes.forget(self._adapter)
        self._adapter = TrainAdapter.build(self.decoder, self._masters, self.spec)

    # ------------------------------------------------------------------ state

    @property
    def optimizer_step(self) -> int:
        """Optimizer steps so far, skipped ones included."""
        return self._adam.steps

    @property
    def adapter(self) -> TrainAdapter:
        """The masters in the published cast, as the next micro-batch will read them."""
        return self._adapter

    def adapter_tensors(self) -> dict[str, Tensor]:
        """The float32 masters by PEFT name, experts stacked: what is published. No copies: the next `step` changes
        them."""
        return {name: master.detach() for name, master in self._masters.items()}

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything a resume needs: ``adapter/…``, ``optimizer/exp_avg/…``, ``optimizer/exp_avg_sq/…``.

        No copies, as in `adapter_tensors`.
        """
        adapter = {f"adapter/{name}": t for name, t in self.adapter_tensors().items()}
        return adapter | self._adam.state_tensors()

    def state(self) -> dict[str, int]:
        """The numbers that go with `state_tensors`."""
        return self._adam.state()

    def load_state(self, tensors: Mapping[str, Tensor], state: Mapping[str, int]) -> None:
        """Take back what `state_tensors` and `state` gave, bit for bit. Raises `ResumeError` naming what is missing."""
        adapter = {n.removeprefix("adapter/"): t for n, t in tensors.items() if n.startswith("adapter/")}
        if {n: t.shape for n, t in adapter.items()} != {n: m.shape for n, m in self._masters.items()}:
            known = {n: m.shape for n, m in self._masters.items()}
            odd = sorted(n for n in adapter.keys() | known if n not in adapter or known.get(n) != adapter[n].shape)
            raise ResumeError(f"the checkpoint's adapter has other tensors than this run: {', '.join(odd[:4])}")
        self._adam.load_state(tensors, state)
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(adapter[name])
        self._rebuild()

    def memory_bytes(self) -> int:
        """Masters, gradient sums and Adam state (two moments)."""
        return 4 * sum(master.numel() * master.element_size() for master in self._masters.values())
