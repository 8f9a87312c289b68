"""The KL's weight as it is now: the settings' own, or steered batch by batch to a target."""

from __future__ import annotations

from collections.abc import Mapping

from tithe.trainer.settings import TrainerSettings


class KLWeight:
    """`of` the settings of a batch; `observe` after each optimizer step. Part of a checkpoint."""

    def __init__(self, settings: TrainerSettings) -> None:
        self._steered, self._is_steered = settings.kl_coef, settings.kl_control.target is not None

    def of(self, settings: TrainerSettings) -> float:
        """The weight now. Without a target it is that of the settings, which a schedule may change."""
        return settings.kl_coef if settings.kl_control.target is None else self._steered

    def observe(self, settings: TrainerSettings, metrics: Mapping[str, float], rollouts: int) -> None:
        """Take in the mean KL of a step on `rollouts`; several passes over one batch together count it once."""
        kl = metrics.get("kl_mean")
        if kl is not None:
            share = rollouts / settings.ppo_epochs
            self._steered = settings.kl_control.next(self._steered, kl, share)

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps; nothing of a fixed weight."""
        return {"kl_coef": self._steered} if self._is_steered else {}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Take back what `state` gave."""
        self._steered = state.get("kl_coef", self._steered)
