"""IcePop (Ring-1T, arXiv 2510.18855): masked importance sampling of single tokens."""

from __future__ import annotations

from dataclasses import replace

from tithe.losses.corrections.correction import Correction
from tithe.losses.corrections.mis import mis
from tithe.losses.record import CorrectionSettings, PolicyLossInput


def icepop(inp: PolicyLossInput, settings: CorrectionSettings) -> Correction:
    """`mis` at the level of tokens, whatever level is set. The paper keeps 0.5 ≤ w ≤ 5."""
    return mis(inp, replace(settings, level="token"))
