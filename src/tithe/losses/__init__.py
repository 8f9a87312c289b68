"""Policy losses over packed completion tokens: one named algorithm, one small file, one literal registry.

Every loss takes a `PolicyLossInput` and `LossSettings` and gives a `LossOutput`. Denominators are counted over the
whole batch (`denominators`), so the losses and gradients of micro-batches add up to those of the batch however it is
split, and `summarize` does the same for metrics.
"""

from tithe.losses.aggregation import Aggregation, Denominators, denominators, token_weights
from tithe.losses.dapo import dapo
from tithe.losses.dr_grpo import dr_grpo
from tithe.losses.grpo import grpo
from tithe.losses.kl import KL_ESTIMATORS, k1, k2, k3
from tithe.losses.metrics import LossMetrics, summarize
from tithe.losses.record import LossOutput, LossSettings, PolicyLoss, PolicyLossInput

LOSSES: dict[str, PolicyLoss] = {
    "dapo": dapo,
    "dr_grpo": dr_grpo,
    "grpo": grpo,
}
"""The name in `rl.algorithm` → the loss."""

__all__ = [
    "KL_ESTIMATORS",
    "LOSSES",
    "Aggregation",
    "Denominators",
    "LossMetrics",
    "LossOutput",
    "LossSettings",
    "PolicyLoss",
    "PolicyLossInput",
    "dapo",
    "denominators",
    "dr_grpo",
    "grpo",
    "k1",
    "k2",
    "k3",
    "summarize",
    "token_weights",
]
