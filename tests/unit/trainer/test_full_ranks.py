"""Training every parameter on two ranks: shares of one model, the gradient and the state of one rank."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support.checkpoints import build_hf
from support.learning import batch, group, rollout, snapshot
from tithe.trainer import FullTrainer

RANKS = 2
TESTS = Path(__file__).resolve().parents[2]


def trained(base: Path, ranks: dist.ProcessGroup | None) -> FullTrainer:
    """Two steps on a batch of three micro-batches, which two ranks cannot share evenly."""
    from unit.trainer.test_full import EXACT, N_TOKENS

    settings = replace(EXACT, micro_batch_tokens=16, betas=(0.5, 0.95), max_grad_norm=0.5)
    trainer = FullTrainer(base, N_TOKENS, settings, dtype=torch.float32, group=ranks)
    answers = [[7, 8, 40, 12, 9], [60, 61, 33, 20, 50]]
    groups = [
        group([5 + g, 9, 33, 4, 6], [rollout(ids, sample=s, logp=[-4.7] * 5) for s, ids in enumerate(answers)], g)
        for g in range(3)
    ]
    for _ in range(2):
        for micro in trainer.plan(batch(groups, [[1.0, -0.5]] * 3)):
            trainer.accumulate(micro)
        assert not trainer.step().skipped
    return trainer


def on_a_rank(rank: int, base: Path, out: Path) -> None:
    """What each process does: trains its part, and checks that a saved state comes back on the ranks."""
    dist.init_process_group("gloo", init_method=f"file://{out}/meet", rank=rank, world_size=RANKS)
    trainer = trained(base, dist.group.WORLD)
    state = snapshot(trainer.state_tensors())
    trainer.load_state(state, trainer.state())
    again = trainer.state_tensors()
    assert all(torch.equal(tensor, again[name]) for name, tensor in state.items())
    folder = out / "published"
    if rank == 0:
        folder.mkdir()
        torch.save(state, out / "state.pt")
    trainer.write(folder)
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_train_what_one_trains(tmp_path: Path) -> None:
    base = build_hf(tmp_path / "m", "llama", dtype="float32", tie_word_embeddings=False)
    path = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "unit.trainer.test_full_ranks"]
    processes = [
        subprocess.Popen([*command, str(rank), str(base), str(tmp_path)], env=environment, stderr=subprocess.PIPE)
        for rank in range(RANKS)
    ]
    said = [process.communicate(timeout=240)[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0] * RANKS, said
    one = trained(base, None).state_tensors()
    two = torch.load(tmp_path / "state.pt", weights_only=True)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.allclose(two[name], tensor, rtol=1e-4, atol=1e-6), name
    from safetensors.torch import load_file

    published = load_file(tmp_path / "published" / "model.safetensors")
    assert all(torch.equal(published[name], two[f"model/{name}"]) for name in published)
    assert len(published) == sum(name.startswith("model/") for name in two)


if __name__ == "__main__":
    on_a_rank(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
