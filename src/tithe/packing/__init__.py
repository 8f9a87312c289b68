"""Packs a training batch into micro-batches in which a group's prompt is computed once.

`plan_micro_batches` decides which rollouts ride together and lays out their rows; `pad_rows` fills a micro-batch up
to a kernel's tile. The layout, shifts and masks are described at `MicroBatch`. `split_batch` makes the parts of a batch
that get an optimizer step each, `cut_rollouts` leaves the ends of long rollouts out.
"""

from tithe.packing.layout import MicroBatch, pad_rows
from tithe.packing.parts import Cut, cut_rollouts, split_batch
from tithe.packing.planning import plan_micro_batches

__all__ = ["Cut", "MicroBatch", "cut_rollouts", "pad_rows", "plan_micro_batches", "split_batch"]
