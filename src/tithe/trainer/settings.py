"""What the trainer needs to know of a run, without the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tithe.losses import KLControl, LossSettings
from tithe.trainer.schedule import Scheduler, learning_rate


@dataclass(frozen=True)
class CriticSettings:
    """A second adapter with a value head. `value_clip` is how far a value may move in one batch before its loss is
    clipped (None: not), `warmup_steps` how many optimizer steps it learns alone. Its learning rate is the policy's."""

    value_clip: float | None = 0.2
    warmup_steps: int = 0


@dataclass(frozen=True)
class TrainerSettings:
    """Objective, optimizer and memory. Names are those of the configuration's `rl` and `optimizer`.

    `norm_tokens` is the constant length of `seq_mean_token_sum_norm` (rollout.max_new_tokens). `kl_coef` weighs the KL
    to the reference, in the loss or, with `kl_placement` reward, as a penalty per token on the advantage; with a target
    in `kl_control` it is where that weight begins. `reference_every`: optimizer steps after which the reference becomes
    a copy of the policy, None: it stays. A batch is trained in `ppo_epochs` passes of `mini_batches` optimizer steps
    each. `total_steps` shapes the schedule, in optimizer steps. `micro_batch_tokens` bounds the rows of a micro-batch,
    the trainer's peak memory. `critic` None: no critic.
    """

    algorithm: str
    loss: LossSettings
    norm_tokens: int
    kl_coef: float = 0.0
    kl_placement: Literal["loss", "reward"] = "loss"
    kl_control: KLControl = field(default_factory=KLControl)
    reference_every: int | None = None
    ppo_epochs: int = 1
    mini_batches: int = 1
    critic: CriticSettings | None = None
    lr: float = 2e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    lr_scheduler: Scheduler = "constant"
    warmup_steps: int = 0
    total_steps: int = 100
    micro_batch_tokens: int = 512
    activation_checkpointing: bool = False
    dropout: float = 0.0
    seed: int = 0

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps that a batch is trained with."""
        return self.ppo_epochs * self.mini_batches

    def rate(self, step: int) -> float:
        """The learning rate of optimizer step `step`, the first being 0."""
        return learning_rate(
            step,
            peak=self.lr,
            kind=self.lr_scheduler,
            warmup_steps=self.warmup_steps,
            total_steps=self.total_steps,
        )
