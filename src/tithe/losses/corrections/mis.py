"""Masked importance sampling: what lies outside the bounds is left out (miles' `mis.py`, TRL's `sequence_mask`)."""

from __future__ import annotations

from tithe.losses.corrections.correction import Correction, importance
from tithe.losses.record import CorrectionSettings, PolicyLossInput


def mis(inp: PolicyLossInput, settings: CorrectionSettings) -> Correction:
    """w where `low` ≤ w ≤ `high`, else 0, for single tokens or whole rollouts; a rollout with any token's ratio below
    `veto` is left out. Left-out tokens stay in the denominator, as in AReaL and miles."""
    return importance(inp, settings, reject=True)
