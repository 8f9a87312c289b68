"""PPO's critic on the policy's own base: a second adapter and a scalar head. No second copy of any weight.

Shape legend: _N targets of one micro-batch, _H the model's width.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from tithe.errors import ResumeError
from tithe.lora import LoraSpec
from tithe.losses import Denominators, ValueLossInput, value_loss
from tithe.models import (
    ALONE,
    AdapterGradients,
    Passes,
    Ranks,
    TrainAdapter,
    new_value_head,
    score_values,
    stack_experts,
)
from tithe.models.value_head import BIAS, WEIGHT
from tithe.packing import MicroBatch
from tithe.trainer.adam import Adam
from tithe.trainer.ranks import Idle, check_alike, is_idle, sum_gradients
from tithe.trainer.settings import TrainerSettings


@dataclass
class _Sums:
    """Over the trained tokens of a batch: for the loss, its clip, and the share of the returns' variance explained."""

    loss: float = 0.0
    clipped: float = 0.0
    tokens: int = 0
    returns: float = 0.0
    returns_squared: float = 0.0
    error: float = 0.0
    error_squared: float = 0.0
    train_s: float = 0.0

    def over(self, ranks: Ranks) -> _Sums:
        """Those of all ranks, in ascending rank; `train_s` is the slowest rank's."""
        names = [field.name for field in fields(self)]
        told = ranks.all_gather(torch.tensor([getattr(self, name) for name in names], dtype=torch.float64))
        total = _Sums(*(sum(float(one[i]) for one in told) for i in range(len(names))))  # pyright: ignore[reportArgumentType]
        total.tokens, total.train_s = int(total.tokens), max(float(one[names.index("train_s")]) for one in told)
        return total

    def metrics(self) -> dict[str, float]:
        n = max(self.tokens, 1)
        spread = self.returns_squared / n - (self.returns / n) ** 2
        unexplained = self.error_squared / n - (self.error / n) ** 2
        return {
            "value_loss": self.loss,
            "value_clip_frac": self.clipped / n,
            "value_explained": 1.0 - unexplained / spread if spread > 1e-12 else 0.0,
            "critic_compute_s": self.train_s,
        }


class Critic:
    """`values` of a batch before it is trained; `begin`, `accumulate`, `step` beside the policy's. On the lane.

    It borrows the policy's passes, strictly in turn with it, and mutates only its own tensors. On several ranks all
    call the same methods, and hold the same tensors afterwards, as of the policy.
    """

    def __init__(
        self,
        passes: Passes,
        spec: LoraSpec,
        tensors: Mapping[str, Tensor],
        settings: TrainerSettings,
        ranks: Ranks = ALONE,
    ) -> None:
        """`tensors` are an adapter's first values, of the policy's own spec."""
        assert settings.critic is not None
        self._passes, self._spec, self._clip = passes, spec, settings.critic.value_clip
        self._ranks, self._idle = ranks, Idle(passes.decoder)
        self._recompute = settings.activation_checkpointing
        named = dict(sorted(stack_experts(tensors).items()))
        self._adapter_names = list(named)
        named |= new_value_head(passes.decoder.spec.hidden_size)
        self._masters = {name: t.detach().float().clone() for name, t in named.items()}
        self._adam = Adam(self._masters, settings)
        self._adapter = self._build()
        self._gradients: AdapterGradients | None = None
        self._head: dict[str, Tensor] = {}
        self._sums = _Sums()

    def _build(self) -> TrainAdapter:
        return TrainAdapter.build(self._passes.decoder, self._adapter_masters(), self._spec)

    def _adapter_masters(self) -> dict[str, Tensor]:
        return {name: self._masters[name] for name in self._adapter_names}

    def values(self, micro: MicroBatch) -> np.ndarray:
        """The value [N] of the state before each target."""
        if is_idle(micro):
            self._idle.take().forward(self._adapter.model)
            return np.zeros(0, np.float32)
        return self._score(self._passes.hidden(micro, self._adapter, keep=False)).value.numpy()

    def _score(self, rows_NH: Tensor):  # noqa: ANN202  `Values`
        weight, bias = self._masters[WEIGHT].detach(), self._masters[BIAS].detach()
        return score_values(self._passes.head, rows_NH, weight, bias)

    def begin(self) -> None:
        """A new optimizer step: no gradients yet."""
        self._gradients = AdapterGradients(self._passes.decoder, self._adapter)
        self._head = {name: torch.zeros_like(self._masters[name]) for name in (WEIGHT, BIAS)}
        self._sums = _Sums()

    def accumulate(self, micro: MicroBatch, denominators: Denominators) -> None:
        """Forward and backward of one micro-batch. Raises `ValueError` without old values and returns."""
        assert self._gradients is not None
        if is_idle(micro):
            idle = self._idle.take()
            idle.forward(self._adapter.model)
            idle.backward(self._adapter.model, self._gradients, recompute=self._recompute)
            return
        if micro.old_value is None or micro.returns is None:
            raise ValueError("a critic learns from batches that were scored: values and returns are missing")
        started = time.perf_counter()
        rows_NH = self._passes.hidden(micro, self._adapter, keep=True)
        scored = self._score(rows_NH)
        value_N = scored.value.clone().requires_grad_()
        returns_N, mask_N = torch.from_numpy(micro.returns), torch.from_numpy(micro.loss_mask)
        given = ValueLossInput(value_N, torch.from_numpy(micro.old_value), returns_N, mask_N, denominators)
        loss, clipped = value_loss(given, self._clip)
        loss.backward()
        assert value_N.grad is not None
        self._head[WEIGHT] += value_N.grad @ scored.normed
        self._head[BIAS] += value_N.grad.sum()
        self._passes.backward(micro, rows_NH, value_N.grad[:, None] * scored.d_normed, self._gradients)
        self._count(float(loss.detach()), float(clipped), scored.value[mask_N], returns_N[mask_N])
        self._sums.train_s += time.perf_counter() - started

    def _count(self, loss: float, clipped: float, value: Tensor, returns: Tensor) -> None:
        sums, error = self._sums, (returns - value).double()
        sums.loss, sums.clipped, sums.tokens = sums.loss + loss, sums.clipped + clipped, sums.tokens + len(value)
        sums.returns += float(returns.double().sum())
        sums.returns_squared += float(returns.double().square().sum())
        sums.error, sums.error_squared = (
            sums.error + float(error.sum()),
            sums.error_squared + float(error.square().sum()),
        )

    def step(self, settings: TrainerSettings) -> dict[str, float]:
        """One AdamW step under `settings`, whose learning rate may be another than at first; skipped when anything is
        not finite. Its metrics."""
        assert self._gradients is not None
        self._adam.settings = settings
        self._idle.release()
        grads = {**self._gradients.named(self._adapter_masters()), **self._head}
        if self._ranks.size > 1:
            grads = sum_gradients(self._ranks, grads, self._passes.decoder.n_experts)
            self._sums = self._sums.over(self._ranks)
        applied = self._adam.apply(grads, self._sums.loss if self._sums.tokens else None)
        self._gradients = None
        if applied.finite:
            check_alike(self._ranks, self._masters)
            self._passes.forget(self._adapter)
            self._adapter = self._build()
        return {
            **self._sums.metrics(),
            "critic_grad_norm": applied.norm,
            "critic_skipped": float(not applied.finite),
        }

    # ------------------------------------------------------------------ state

    def state_tensors(self) -> dict[str, Tensor]:
        """``critic/model/…`` and ``critic/optimizer/…``. No copies."""
        state = {f"critic/model/{name}": t.detach() for name, t in self._masters.items()}
        return state | {f"critic/{name}": t for name, t in self._adam.state_tensors().items()}

    def state(self) -> dict[str, int]:
        """The numbers that go with `state_tensors`."""
        return {f"critic_{name}": value for name, value in self._adam.state().items()}

    def load_state(self, tensors: Mapping[str, Tensor], state: Mapping[str, float]) -> None:
        """Take back what `state_tensors` and `state` gave, bit for bit. Raises `ResumeError` naming what is missing."""
        own = {name.removeprefix("critic/"): t for name, t in tensors.items() if name.startswith("critic/")}
        wrong = [n for n, m in self._masters.items() if f"model/{n}" not in own or own[f"model/{n}"].shape != m.shape]
        if wrong or "critic_optimizer_step" not in state:
            raise ResumeError(f"the checkpoint lacks the critic of this run: {', '.join(wrong[:4]) or 'its numbers'}")
        self._adam.load_state(own, {name: int(state[f"critic_{name}"]) for name in self._adam.state()})
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(own[f"model/{name}"])
        self._passes.forget(self._adapter)
        self._adapter = self._build()

    def memory_bytes(self) -> int:
        """Masters, gradient sums and Adam state (two moments)."""
        return 4 * sum(master.numel() * master.element_size() for master in self._masters.values())
