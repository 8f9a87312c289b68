"""When rollout may start, when training may begin, when a version must be published, what is too old.

Four pure functions over counters. The two loops, the pool and the simulator call these and decide nothing about
staleness by themselves; the bounds are proved in `tithe.staleness.bounds`.
"""

from tithe.staleness.bounds import Bounds, may_begin_batch, may_start_group, must_drop, must_publish

__all__ = ["Bounds", "may_begin_batch", "may_start_group", "must_drop", "must_publish"]
