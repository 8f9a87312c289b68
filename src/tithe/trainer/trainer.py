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
from tithe.losses import LOSSES, Denominators
from tithe.models import ALONE, AdapterGradients, Decoder, Passes, Ranks, TrainAdapter, stack_experts
from tithe.packing import MicroBatch
from tithe.trainer.adam import Adam, StepResult, Tally
from tithe.trainer.critic import Critic
from tithe.trainer.kl_weight import KLWeight
from tithe.trainer.objective import loss_input
from tithe.trainer.ranks import Idle, Shares, Sums, check_alike, empty_micro_batch, is_idle, share_out, sum_gradients
from tithe.trainer.reference import Reference
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
        *,
        reference: Reference | None = None,
        critic: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`tensors` are the adapter's first values; `critic` those of a critic's, with `settings.critic`. `reference`
        None: the bare base, or with `reference_every` a copy of the policy."""
        self.decoder, self.spec, self.settings, self.ranks = decoder, spec, settings, ranks
        together = sorted(stack_experts(tensors).items())
        self._masters = {name: t.detach().float().clone() for name, t in together}
        self._adam = Adam(self._masters, settings)
        self._adapter = TrainAdapter.build(decoder, self._masters, spec)
        self._gradients: AdapterGradients | None = None
        self._idle = Idle(decoder)
        self.passes = Passes(
            decoder,
            self._adapter.widths(),
            checkpointing=settings.activation_checkpointing,
            dropout=settings.dropout,
        )
        self.reference = reference or Reference(self.passes)
        if settings.reference_every is not None:
            self.reference.take(self._masters, spec)
        self.critic = Critic(self.passes, spec, critic, settings, ranks) if critic is not None else None
        self._kl = KLWeight(settings)
        self._tally = Tally()
        self._denominators: Denominators | None = None
        self._micro_index = 0
        self._knows_reference = False
        """Whether the batch comes with the reference's log-probs."""

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
        """Who computes what of a batch. Changes nothing."""
        return share_out(batch, self.settings, self.ranks.size)

    def begin(self, denominators: Denominators | None, *, knows_reference: bool) -> None:
        """Begin a batch that was shared out: its micro-batches follow, with the reference's log-probs or without."""
        self._tally, self._micro_index, self._denominators = Tally(), self.ranks.rank, denominators
        self._knows_reference = knows_reference
        self._gradients = None if denominators is None else AdapterGradients(self.decoder, self._adapter)
        if self.critic is not None:
            self.critic.begin()

    def accumulate(self, micro: MicroBatch) -> None:
        """Forward and backward of one micro-batch; gradients add up to the batch's."""
        assert self._gradients is not None
        assert self._denominators is not None
        started = time.perf_counter()
        settings = self.settings
        if self.critic is not None:
            self.critic.accumulate(micro, self._denominators)
            if self._critic_learns_alone:
                return
        reference = self._reference_of(micro)
        if is_idle(micro):
            idle = self._idle.take()
            idle.forward(self._adapter.model)
            idle.backward(self._adapter.model, self._gradients, recompute=settings.activation_checkpointing)
            self._micro_index += self.ranks.size
            return
        seed = self._dropout_seed() if settings.dropout > 0 else None
        self._micro_index += self.ranks.size
        bonus = settings.loss.entropy_coef > 0
        scored, rows = self.passes.forward(micro, self._adapter, dropout_seed=seed, entropy_gradient=bonus)
        logp = torch.from_numpy(scored.logp).requires_grad_()
        entropy = torch.from_numpy(scored.entropy).requires_grad_(bonus)
        given = loss_input(micro, logp, entropy, reference, self._denominators, settings, self.kl_coef)
        output = LOSSES[settings.algorithm](*given)
        output.loss.backward()
        assert logp.grad is not None
        d_normed = logp.grad[:, None] * scored.d_logp
        if scored.d_entropy is not None and entropy.grad is not None:
            d_normed += entropy.grad[:, None] * scored.d_entropy
        self.passes.backward(micro, rows, d_normed, self._gradients)
        self._tally.add(output, started)

    @property
    def _critic_learns_alone(self) -> bool:
        critic = self.settings.critic
        return critic is not None and self.optimizer_step < critic.warmup_steps

    def _reference_of(self, micro: MicroBatch) -> np.ndarray | None:
        if self._knows_reference:
            return micro.ref_logp
        return self.reference.score(micro) if self.kl_coef > 0 else None

    def score_policy(self, micro: MicroBatch) -> np.ndarray:
        """log-probs [N] under the policy as it is."""
        if is_idle(micro):
            self._idle.take().forward(self._adapter.model)
            return np.zeros(0, np.float32)
        return self.passes.score(micro, self._adapter)

    def score_reference(self, micro: MicroBatch) -> np.ndarray:
        """log-probs [N] under the reference."""
        return self.reference.score(micro)

    def blank(self, _: MicroBatch) -> MicroBatch:
        """What a rank scores in a round in which only others have rows."""
        return empty_micro_batch()

    def _dropout_seed(self) -> int:
        """32 bits that follow (run seed, step, micro-batch), for run seeds of any size."""
        place = (self.settings.seed, self.optimizer_step, self._micro_index)
        return int(np.random.SeedSequence(place).generate_state(1)[0])

    def step(self) -> StepResult:
        """One AdamW step on the accumulated gradients, clipped by global norm; skipped when anything is not finite."""
        self.passes.release()
        self._idle.release()
        self.reference.release()
        grads = self._gradients.named(self._masters) if self._gradients is not None else {}
        if self.ranks.size > 1:
            grads = sum_gradients(self.ranks, grads, self.decoder.n_experts)
            self._sum_over_ranks()
        self._adam.settings = self.settings
        result = self._adam.step(grads, self._tally)
        agreement = self.passes.take_agreement()
        if agreement is not None:
            result.metrics["router_agreement"] = agreement
        if self._tally.metrics and not result.skipped:
            check_alike(self.ranks, self._masters)
            self._rebuild()
            self._steer(result.metrics)
        if self.critic is not None and self._denominators is not None:
            result.metrics.update(self.critic.step(self.settings))
        self._gradients = None
        return result

    def _steer(self, metrics: dict[str, float]) -> None:
        """After a step: the KL's weight follows the KL, a moving reference the policy."""
        settings = self.settings
        if self.kl_coef > 0:
            metrics["kl_coef"] = self.kl_coef
        assert self._denominators is not None
        self._kl.observe(settings, metrics, self._denominators.n_seqs)
        if settings.reference_every is not None and self.optimizer_step % settings.reference_every == 0:
            self.reference.take(self._masters, self.spec)

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
        if self.settings.reference_every is not None:
            adapter |= {f"reference/{name}": t for name, t in self.reference.tensors().items()}
        if self.critic is not None:
            adapter |= self.critic.state_tensors()
        return adapter | self._adam.state_tensors()

    def state(self) -> dict[str, float]:
        """The numbers that go with `state_tensors`."""
        return {**self._adam.state(), **self._kl.state(), **(self.critic.state() if self.critic is not None else {})}

    def load_state(self, tensors: Mapping[str, Tensor], state: Mapping[str, float]) -> None:
        """Take back what `state_tensors` and `state` gave, bit for bit. Raises `ResumeError` naming what is missing."""
        adapter = {n.removeprefix("adapter/"): t for n, t in tensors.items() if n.startswith("adapter/")}
        if {n: t.shape for n, t in adapter.items()} != {n: m.shape for n, m in self._masters.items()}:
            known = {n: m.shape for n, m in self._masters.items()}
            odd = sorted(n for n in adapter.keys() | known if n not in adapter or known.get(n) != adapter[n].shape)
            raise ResumeError(f"the checkpoint's adapter has other tensors than this run: {', '.join(odd[:4])}")
        copied = {n.removeprefix("reference/"): t for n, t in tensors.items() if n.startswith("reference/")}
        if self.settings.reference_every is not None and copied.keys() != adapter.keys():
            raise ResumeError("the checkpoint lacks the moving reference of this run")
        if self.critic is not None:
            self.critic.load_state(tensors, state)
        self._adam.load_state(tensors, {name: int(state[name]) for name in self._adam.state()})
        self._kl.load_state(state)
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(adapter[name])
        self._rebuild()
        if self.settings.reference_every is not None:
            self.reference.take(copied, self.spec)

    def memory_bytes(self) -> int:
        """Masters, gradient sums and Adam state (two moments), a reference's copy of an adapter, and the critic's."""
        own = 4 * sum(master.numel() * master.element_size() for master in self._masters.values())
        return own + self.reference.memory_bytes() + self.critic_bytes()

    def critic_bytes(self) -> int:
        """Of `memory_bytes`, the critic's."""
        return 0 if self.critic is None else self.critic.memory_bytes()
