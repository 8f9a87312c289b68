"""Packs a training batch into micro-batches in which a group's prompt is computed once.

`plan_micro_batches` decides which rollouts ride together and lays out their rows; `pad_rows` fills a micro-batch up
to a kernel's tile. The layout, shifts and masks are described at `MicroBatch`.
"""

from tithe.packing.layout import MicroBatch, pad_rows
from tithe.packing.planning import plan_micro_batches

__all__ = ["MicroBatch", "pad_rows", "plan_micro_batches"]
