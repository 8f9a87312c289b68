"""What the trainer needs to know of a run, without the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tithe.losses import LossSettings
from tithe.trainer.schedule import Scheduler, learning_rate


@dataclass(frozen=True)
class TrainerSettings:
    """Objective, optimizer and memory. Names are those of the configuration's `rl` and `optimizer`.

    `norm_tokens` is the constant length of `seq_mean_token_sum_norm` (rollout.max_new_tokens), `kl_coef` weighs the k3
    estimate in the loss or, with `kl_placement` reward, the per-token k1 penalty on the advantage. `total_steps`
    shapes the schedule. `micro_batch_tokens` bounds the rows of a micro-batch, the trainer's peak memory.
    """

    algorithm: str
    loss: LossSettings
    norm_tokens: int
    kl_coef: float = 0.0
    kl_placement: Literal["loss", "reward"] = "loss"
    lr: float = 2e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    lr_scheduler: Scheduler = "constant"
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0
    total_steps: int = 100
    micro_batch_tokens: int = 512
    activation_checkpointing: bool = False
    dropout: float = 0.0
    seed: int = 0

    def rate(self, step: int) -> float:
        """The learning rate of optimizer step `step`, the first being 0."""
        return learning_rate(
            step,
            peak=self.lr,
            kind=self.lr_scheduler,
            warmup_steps=self.warmup_steps,
            total_steps=self.total_steps,
            min_ratio=self.min_lr_ratio,
        )
