"""No correction: the ratio is taken against the policy that sampled, and its clip is all that bounds it."""

from __future__ import annotations

import torch

from tithe.losses.corrections.correction import Correction
from tithe.losses.record import CorrectionSettings, PolicyLossInput


def none(inp: PolicyLossInput, settings: CorrectionSettings) -> Correction:  # noqa: ARG001  one signature for all
    """Anchor `old_logp`, weight 1."""
    nothing_N = torch.zeros_like(inp.mask)
    return Correction(inp.old_logp, None, nothing_N, nothing_N)
