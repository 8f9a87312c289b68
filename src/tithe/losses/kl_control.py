"""The weight of the KL over a run: fixed, or steered to a target (arXiv 1909.08593)."""

from __future__ import annotations

from dataclasses import dataclass

from tithe.errors import ConfigError

LARGEST_ERROR = 0.2
"""Share of the target beyond which more distance does not steer harder."""


@dataclass(frozen=True)
class KLControl:
    """`target` in nats a token (the metric `kl_mean`), None: fixed. `horizon` in rollouts: with KL far above its target
    the weight grows by a fifth per `horizon` rollouts. It stays within `floor` and `ceiling`.

    >>> KLControl(target=6.0, horizon=10_000, floor=1e-3, ceiling=10.0).next(0.1, kl=12.0, rollouts=64)
    0.100128
    """

    target: float | None = None
    horizon: int = 10_000
    floor: float = 0.0
    ceiling: float = 100.0

    def __post_init__(self) -> None:
        if self.target is not None and not self.target > 0:
            raise ConfigError(f"kl_target is above 0, or null for a fixed weight; not {self.target}", "rl.kl_target")
        if not self.horizon > 0:
            raise ConfigError(f"the horizon of kl_target is above 0, not {self.horizon}", "rl.kl_target")
        if not 0 <= self.floor <= self.ceiling:
            raise ConfigError(f"the KL weight stays within [{self.floor}, {self.ceiling}], which is empty")

    def next(self, coef: float, kl: float, rollouts: float) -> float:
        """The weight after a batch of `rollouts` with mean KL `kl`: above the target more, below it less."""
        if self.target is None:
            return coef
        error = min(max(kl / self.target - 1.0, -LARGEST_ERROR), LARGEST_ERROR)
        return min(max(coef * (1.0 + error * rollouts / self.horizon), self.floor), self.ceiling)
