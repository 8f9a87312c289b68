"""Groups for the pool's tests, and the usual steps with them."""

from __future__ import annotations

import numpy as np

from tithe.types import FinishReason, Rollout, RolloutGroup


def make_rollout(sample=0, *, serial=0, n=3, reward=1.0, failure=None, **parts):
    return Rollout(
        sample=sample,
        token_ids=np.arange(n, dtype=np.int32) + 10 * sample,
        loss_mask=np.arange(n) % 2 == 0,
        logp=np.linspace(-1, -0.1, n, dtype=np.float32),
        logp_behaviour=np.linspace(-0.9, -0.05, n, dtype=np.float32),
        serials=np.full(n, serial, np.int32),
        temperature=0.7,
        finish=FinishReason.STOP,
        text=f"text {sample} ünï",
        reward=reward,
        reward_parts=parts,
        failure=failure,
    )


def make_group(group_id, prompt_id="p", *, serial=0, lineage=0, rollouts=None):
    rollouts = rollouts or (make_rollout(0, serial=serial), make_rollout(1, serial=serial, reward=0.0))
    return RolloutGroup(group_id, prompt_id, np.array([1, 2, 3], np.int32), tuple(rollouts), lineage, serial)


def add_ready(pool, n=1, *, serial=0, prompt_id="p"):
    ids = [pool.admit(prompt_id, 0, serial) for _ in range(n)]
    for group_id in ids:
        pool.commit(make_group(group_id, prompt_id, serial=serial, lineage=0))
    return ids


def keep_all(_min_serial):
    return False


def train(pool, n):
    lease = pool.lease_batch(2 * n, pool.serial, keep_all)  # two rollouts a group
    ids = [g.group_id for g in lease.groups]
    assert ids
    pool.mark_trained(ids, pool.serial + 1)
    return ids
