"""Decoupled PPO (AReaL, arXiv 2505.24298 eq. 5): the clip is around the weights with which the batch began."""

from __future__ import annotations

from dataclasses import replace

from tithe.losses.corrections.correction import Correction
from tithe.losses.corrections.tis import tis
from tithe.losses.record import CorrectionSettings, PolicyLossInput


def decoupled(inp: PolicyLossInput, settings: CorrectionSettings) -> Correction:
    """`tis` at the level of tokens: (π_prox/π_behaviour)·min(u·A, clip(u)·A) with u = π/π_prox. The paper leaves the
    first factor unbounded (`high` None); AReaL's runs bound it by 5."""
    return tis(inp, replace(settings, level="token"))
