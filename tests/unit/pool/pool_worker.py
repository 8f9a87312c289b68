"""A process that drives a pool until it is killed: ``python pool_worker.py POOL SEED``."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import numpy as np

from tithe.pool import DropReason, Pool, PromptSource
from tithe.types import FinishReason, Rollout, RolloutGroup

BATCH = 3
PROMPTS = [f"p{i}" for i in range(400)]


def make_group(admission, serial, lineage):
    rollouts = tuple(
        Rollout(
            sample=sample,
            token_ids=np.arange(4, dtype=np.int32),
            loss_mask=np.ones(4, np.bool_),
            logp=np.zeros(4, np.float32),
            logp_behaviour=np.zeros(4, np.float32),
            serials=np.full(4, serial, np.int32),
            temperature=1.0,
            finish=FinishReason.STOP,
            reward=float(sample),
        )
        for sample in range(2)
    )
    return RolloutGroup(admission.group_id, admission.prompt_id, np.ones(2, np.int32), rollouts, lineage, serial)


def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def work(path: Path, seed: int) -> None:
    """Drive a pool for ever, telling the parent of every call that returned."""
    rng = random.Random(seed)
    pool = Pool.open(path)
    pool.bind_prompts(PromptSource(PROMPTS, 0))
    rewind = pool.rewind_to_checkpoint()
    say("rewound", rewind.serial)
    running = []
    while True:
        serial, lineage = pool.serial, 0
        while len(running) < 4:
            running.append((pool.admit_next(lineage, serial), serial, lineage))
        group = make_group(*running.pop(rng.randrange(len(running))))
        pool.commit(group)
        say("committed", group.group_id)
        lease = pool.lease_batch(2 * BATCH, serial, lambda min_serial, now=serial: now - min_serial > 2)
        if not lease.groups:
            continue
        ids = [g.group_id for g in lease.groups]
        if rng.random() < 0.2:
            pool.requeue(ids)
            continue
        if rng.random() < 0.1:
            pool.drop(ids, DropReason.NON_FINITE)
            say("dropped", *ids)
            continue
        pool.mark_trained(ids, serial + 1)
        say("trained", serial + 1, *ids)
        if serial % 3 == 2:
            pool.record_checkpoint(serial + 1, path.parent / "x", {})
            say("checkpoint", serial + 1)


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]))
