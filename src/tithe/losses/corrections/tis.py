"""Truncated importance sampling (FlashRL, 2025; verl's `rollout_is`, miles' `vanilla_tis_function`)."""

from __future__ import annotations

from tithe.losses.corrections.correction import Correction, importance
from tithe.losses.record import CorrectionSettings, PolicyLossInput


def tis(inp: PolicyLossInput, settings: CorrectionSettings) -> Correction:
    """min(w, `high`): a token that the trainer finds much likelier than the sampler did counts `high` times, no more.

    Nothing is cut from below, as in verl; miles can. verl's cap is 2, TRL's 3.
    """
    return importance(inp, settings, reject=False)
