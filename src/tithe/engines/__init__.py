"""Rollout engines: token in, token out, with log-prob and version per token. `SharedEngine` samples on the trainer's
own base.
"""

from tithe.engines.shared import SharedEngine

__all__ = ["SharedEngine"]
