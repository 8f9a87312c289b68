"""Checkpoints: tensors and state of a run at one step, complete and checksummed or not there at all."""

from tithe.checkpoint.saving import prune, save_checkpoint
from tithe.checkpoint.store import (
    STATE_FILE,
    Checkpoint,
    FoundCheckpoint,
    checkpoint_path,
    find_checkpoints,
    load_checkpoint,
    select_checkpoint,
)

__all__ = [
    "STATE_FILE",
    "Checkpoint",
    "FoundCheckpoint",
    "checkpoint_path",
    "find_checkpoints",
    "load_checkpoint",
    "prune",
    "save_checkpoint",
    "select_checkpoint",
]
