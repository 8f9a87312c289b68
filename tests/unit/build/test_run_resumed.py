"""What a resume leaves of batches that are trained again. No model is involved."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tithe.build.running import _rewind
from tithe.checkpoint import prune, save_checkpoint
from tithe.pool import Pool
from tithe.types import FinishReason, Rollout, RolloutGroup


class Lane:
    def call(self, job, *args):
        return job(*args)


def train_a_batch(pool: Pool) -> None:
    ids, numbers = np.zeros(1, np.int32), np.zeros(1, np.float32)
    rollout = Rollout(0, ids, np.ones(1, np.bool_), numbers, numbers, ids, 1.0, FinishReason.STOP, reward=1.0)
    group_id = pool.admit("p", 0, 0)
    pool.commit(RolloutGroup(group_id, "p", ids, (rollout,), 0, 0))
    pool.lease_batch(1, pool.serial, lambda _: False)
    pool.mark_trained([group_id], pool.serial + 1)


def save_files(run_dir: Path, serial: int) -> Path:
    return save_checkpoint(run_dir / "checkpoints", serial, {"adapter/a": torch.full((2,), float(serial))}, {})


@pytest.mark.parametrize("recorded", [0, 2])
def test_a_checkpoint_that_was_never_recorded_costs_no_later_one(tmp_path: Path, recorded: int) -> None:
    """Killed after the files of batch 4 were complete and before the pool named them; the next ones are of batch 3."""
    with Pool.create(tmp_path / "pool.sqlite", "run") as pool:
        for serial in range(1, 5):
            train_a_batch(pool)
            if serial == recorded:
                pool.record_checkpoint(serial, save_files(tmp_path, serial), {}, keep=1)
        save_files(tmp_path, 4)
        (tmp_path / "eval").mkdir()
        for step in (0, 2, 4):
            (tmp_path / "eval" / f"step_{step:06d}.json").write_text("{}")
    loaded: list[Path] = []
    session = SimpleNamespace(base=SimpleNamespace(lane=Lane()), learner=SimpleNamespace(take_back=loaded.append))
    with Pool.open(tmp_path / "pool.sqlite") as pool:
        _rewind(session, tmp_path, pool)
        assert pool.serial == recorded
        assert [path.name for path in loaded] == (["step_000002"] if recorded else [])
        kept = sorted(path.name for path in (tmp_path / "eval").iterdir())
        assert kept == [f"step_{step:06d}.json" for step in (0, 2) if step <= recorded]
        while pool.serial < 3:
            lease = pool.lease_batch(1, pool.serial, lambda _: False)
            pool.mark_trained([lease.groups[0].group_id], pool.serial + 1)
        pool.record_checkpoint(3, save_files(tmp_path, 3), {}, keep=1)
        prune(tmp_path / "checkpoints", 1)
        (checkpoint,) = pool.checkpoints()
        assert checkpoint.directory.is_dir(), "what the pool names is there"
