"""Whitening over the trained tokens of a whole batch.

Shape legend: _T completion tokens of one rollout.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tithe.advantages.group import EQUAL_REL

VARIANCE_EPSILON = 1e-8
"""Added to the variance, as verl and TRL do (`masked_whiten`); the variance is the sample's (ddof = 1), as there."""


def whiten(values: Sequence[NDArray[np.float64]], masks: Sequence[NDArray[np.bool_]]) -> list[NDArray[np.float64]]:
    """Per rollout (x - mean) / √(variance + 1e-8), mean and variance over all tokens under the masks; 0 off them.

    Equal values (by maximum minus minimum), one token, or none give exactly 0; verl refuses a batch of one token.

    >>> one = np.ones(2, bool)
    >>> [x.round(4).tolist() for x in whiten([np.array([1.0, 1.0]), np.array([0.0, 0.0])], [one, one])]
    [[0.866, 0.866], [-0.866, -0.866]]
    """
    kept = np.concatenate([x_T[mask_T] for x_T, mask_T in zip(values, masks, strict=True)] or [np.zeros(0)])
    if len(kept) < 2 or np.ptp(kept) <= EQUAL_REL * np.abs(kept).max():
        return [np.zeros(len(x_T)) for x_T in values]
    mean, deviation = kept.mean(), np.sqrt(kept.var(ddof=1) + VARIANCE_EPSILON)
    return [np.where(mask_T, (x_T - mean) / deviation, 0.0) for x_T, mask_T in zip(values, masks, strict=True)]
