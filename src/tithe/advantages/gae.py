"""Generalised advantage estimation (arXiv 1506.02438), for a critic.

Shape legend: _T completion tokens of one rollout.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tithe.advantages.samples import AdvantageRule, Estimated, Sample


def gae(group: Sequence[Sample | None], rule: AdvantageRule) -> list[Estimated | None]:
    """`gae_of` each rollout, None without tokens. Raises `ValueError` for a rollout without values."""
    out: list[Estimated | None] = []
    for sample in group:
        if sample is None or not len(sample.mask):
            out.append(None)
            continue
        if sample.value is None:
            raise ValueError("generalised advantages need a critic's values")
        out.append(Estimated(*gae_of(sample, rule.gamma, rule.lam)))
    return out


def gae_of(sample: Sample, gamma: float, lam: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(advantages, returns) [T]: δ_t = r_t + gamma·V_next - V_t, A_t = δ_t + gamma·lam·A_next, and A_t + V_t.

    "Next" is the next token that the model wrote: what a tool wrote is passed over, in value, in δ and in
    gamma, because the model decides nothing there (as in verl); both outcomes are 0 there. After the last one the value
    is 0, also where the length limit cut the answer: its reward is all that will come.
    """
    assert sample.value is not None
    reward_T, value_T = sample.token_rewards(), sample.value
    advantage_T, return_T = np.zeros(len(reward_T)), np.zeros(len(reward_T))
    next_value = next_advantage = 0.0
    for t in reversed(np.flatnonzero(sample.mask)):
        delta = reward_T[t] + gamma * next_value - value_T[t]
        next_advantage = delta + gamma * lam * next_advantage
        next_value = float(value_T[t])
        advantage_T[t], return_T[t] = next_advantage, next_advantage + next_value
    return advantage_T, return_T
