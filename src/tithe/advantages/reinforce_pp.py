"""REINFORCE++'s estimator (arXiv 2501.03262): discounted rewards to come, without a baseline of the group.

Shape legend: _T completion tokens of one rollout.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tithe.advantages.samples import AdvantageRule, Estimated, Sample


def reinforce_pp(group: Sequence[Sample | None], rule: AdvantageRule) -> list[Estimated | None]:
    """G_t = Σ_{u ≥ t} gamma^(u-t)·(r_u - penalty_u) over the model's own tokens; the batch's mean, taken away by
    whitening (`scale` batch), is its only baseline. Its variant with one is `group_relative` under the same scale."""
    return [None if s is None else Estimated(discounted(s.token_rewards(), s.mask, rule.gamma)) for s in group]


def discounted(reward_T: NDArray[np.float64], mask_T: NDArray[np.bool_], gamma: float) -> NDArray[np.float64]:
    """Discounted sums to come. Tokens off the mask are passed over: they cost no step of gamma and get 0."""
    out_T = np.zeros(len(reward_T))
    to_come = 0.0
    for t in reversed(np.flatnonzero(mask_T)):
        to_come = reward_T[t] + gamma * to_come
        out_T[t] = to_come
    return out_T
