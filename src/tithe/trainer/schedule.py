"""Learning rate over optimizer steps: linear warm-up, then constant, linear or cosine decay."""

from __future__ import annotations

import math
from typing import Literal

Scheduler = Literal["constant", "linear", "cosine"]


def learning_rate(step: int, *, peak: float, kind: Scheduler, warmup_steps: int, total_steps: int) -> float:
    """Rate of optimizer step `step` (0 = the first) of `total_steps`.

    Warm-up reaches `peak` at step `warmup_steps`; the first step is peak / (warmup_steps + 1), never 0. Decay would
    reach 0 with the step after the last one, so that every step teaches something.

    >>> [round(learning_rate(s, peak=1.0, kind="linear", warmup_steps=1, total_steps=4), 3) for s in range(4)]
    [0.5, 1.0, 0.667, 0.333]
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if kind == "constant":
        return peak
    span = max(1, total_steps - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / span)
    return peak * (1.0 - progress if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress)))
