"""The experience pool: every group of rollouts a run made, on SQLite, durable before anyone is told of it.

`Pool` is the one writer: it admits groups, commits them, leases whole batches and records checkpoints, and every leased
group leaves exactly once (trained, dropped with a reason, or requeued). `PoolReader` reads the same file while the run
goes on; so does any SQLite client. `PromptSource` is the order of prompts, `Curriculum` says which of them are passed
over. The life of a group is drawn in `tithe.pool.states`.
"""

from tithe.pool.curriculum import Curriculum, Draw, PromptRecord, adaptive_samples
from tithe.pool.pool import Pool
from tithe.pool.prompts import PromptSource
from tithe.pool.reader import PoolReader
from tithe.pool.states import Admission, Checkpoint, DropReason, GroupState, Lease, PoolCounts, Rewind

__all__ = [
    "Admission",
    "Checkpoint",
    "Curriculum",
    "Draw",
    "DropReason",
    "GroupState",
    "Lease",
    "Pool",
    "PoolCounts",
    "PoolReader",
    "PromptRecord",
    "PromptSource",
    "Rewind",
    "adaptive_samples",
]
