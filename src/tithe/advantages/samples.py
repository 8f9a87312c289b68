"""What advantages are made of, rollout by rollout, and what they come to.

Shape legend: _T completion tokens of one rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Sample:
    """One usable rollout: its reward, `mask` [T] of the tokens that the model wrote, `penalty` [T] that each token
    costs (a KL times its weight; None: nothing), `value` [T] of the critic before each token (None: no critic)."""

    reward: float
    mask: NDArray[np.bool_]
    penalty: NDArray[np.float64] | None = None
    value: NDArray[np.float64] | None = None

    def to_come(self) -> NDArray[np.float64]:
        """The penalties of each token and those after it, FP64 [T]; tokens off the mask cost nothing."""
        if self.penalty is None:
            return np.zeros(len(self.mask))
        return np.cumsum(np.where(self.mask, self.penalty, 0.0)[::-1])[::-1]

    def token_rewards(self) -> NDArray[np.float64]:
        """The reward on the last token under the mask, less the penalties, FP64 [T]; 0 off the mask."""
        rewards_T = np.zeros(len(self.mask))
        if self.penalty is not None:
            rewards_T -= np.where(self.mask, self.penalty, 0.0)
        last = np.flatnonzero(self.mask)
        if len(last):
            rewards_T[last[-1]] += self.reward
        return rewards_T


Samples = Sequence[Sequence[Sample | None]]
"""Per group, per rollout; None is not trained and has no part in any mean."""


@dataclass(frozen=True)
class AdvantageRule:
    """`estimator`: one of `ESTIMATORS`. `scale`: what is done to its outcome, one of `SCALES`. `gamma` and `lam` are
    the discount of rewards and of GAE's terms per token."""

    estimator: str = "group"
    scale: str = "std"
    gamma: float = 1.0
    lam: float = 1.0


@dataclass(frozen=True, eq=False)
class Estimated:
    """`advantage` [T] before scaling over the batch; `returns` [T] for a critic, else None."""

    advantage: NDArray[np.float64]
    returns: NDArray[np.float64] | None = None


Estimator = Callable[[Sequence[Sample | None], AdvantageRule], list[Estimated | None]]
"""Advantages of one group."""
