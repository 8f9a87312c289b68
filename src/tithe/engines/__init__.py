"""Rollout engines: token in, token out, with log-prob and version per token. `SharedEngine` samples on the trainer's
own base, `SpreadEngine` on that of several ranks, `CopiedEngine` on a copy per version, where every parameter is
trained.
"""

from tithe.engines.copied import CopiedEngine, SamplerGap
from tithe.engines.shared import SharedEngine
from tithe.engines.spread import ENGINE_ORDERS, EngineShare, Here, SpreadEngine

__all__ = ["ENGINE_ORDERS", "CopiedEngine", "EngineShare", "Here", "SamplerGap", "SharedEngine", "SpreadEngine"]
