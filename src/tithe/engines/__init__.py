"""Rollout engines: token in, token out, with log-prob and version per token. `SharedEngine` samples on the trainer's
own base, `CopiedEngine` on a copy per version, where every parameter is trained.
"""

from tithe.engines.copied import CopiedEngine, SamplerGap
from tithe.engines.shared import SharedEngine

__all__ = ["CopiedEngine", "SamplerGap", "SharedEngine"]
