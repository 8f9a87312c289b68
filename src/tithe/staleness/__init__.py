"""When rollout may start, when training may begin, when a version must be published, what is too old.

Pure functions over counters. The two loops, the pool and the simulator call these and decide nothing about
staleness by themselves; the bounds are proved in `tithe.staleness.bounds`.
"""

from tithe.staleness.batches import choose_batch, fit_group
from tithe.staleness.bounds import (
    Bounds,
    may_begin_batch,
    may_start_group,
    must_drop,
    must_publish,
    room_for_rollouts,
)

__all__ = [
    "Bounds",
    "choose_batch",
    "fit_group",
    "may_begin_batch",
    "may_start_group",
    "must_drop",
    "must_publish",
    "room_for_rollouts",
]
