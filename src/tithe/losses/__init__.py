"""Policy losses over packed completion tokens: one named algorithm, one small file, one literal registry.

Every loss takes a `PolicyLossInput` and `LossSettings` and gives a `LossOutput`. Denominators are counted over the
whole batch (`denominators`), so the losses and gradients of micro-batches add up to those of the batch however it is
split, and `summarize` does the same for metrics. `value_loss` is the critic's.
"""

from tithe.losses.aggregation import Aggregation, Denominators, denominators, token_weights
from tithe.losses.cispo import cispo
from tithe.losses.corrections import CORRECTIONS, NEEDS_PROX
from tithe.losses.dapo import dapo
from tithe.losses.dr_grpo import dr_grpo
from tithe.losses.grpo import grpo
from tithe.losses.gspo import gspo
from tithe.losses.kl import KL_ESTIMATORS, k1, k2, k3
from tithe.losses.kl_control import KLControl
from tithe.losses.metrics import LossMetrics, summarize
from tithe.losses.ppo import ppo
from tithe.losses.record import CorrectionSettings, LossOutput, LossSettings, PolicyLoss, PolicyLossInput
from tithe.losses.reinforce_pp import reinforce_pp
from tithe.losses.rloo import rloo
from tithe.losses.value import ValueLossInput, value_loss

LOSSES: dict[str, PolicyLoss] = {
    "cispo": cispo,
    "dapo": dapo,
    "dr_grpo": dr_grpo,
    "grpo": grpo,
    "gspo": gspo,
    "ppo": ppo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp,
    "rloo": rloo,
}
"""The name in `rl.algorithm` → the loss."""

__all__ = [
    "CORRECTIONS",
    "KL_ESTIMATORS",
    "LOSSES",
    "NEEDS_PROX",
    "Aggregation",
    "CorrectionSettings",
    "Denominators",
    "KLControl",
    "LossMetrics",
    "LossOutput",
    "LossSettings",
    "PolicyLoss",
    "PolicyLossInput",
    "ValueLossInput",
    "cispo",
    "dapo",
    "denominators",
    "dr_grpo",
    "grpo",
    "gspo",
    "k1",
    "k2",
    "k3",
    "ppo",
    "reinforce_pp",
    "rloo",
    "summarize",
    "token_weights",
    "value_loss",
]
