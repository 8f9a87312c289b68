"""Training every parameter on two ranks: shares of one model, the gradient and the state of one rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from support.checkpoints import build_hf
from support.learning import batch, group, rollout, snapshot
from support.ranks import on_ranks_of
from tithe.models import ALONE, Ranks
from tithe.trainer import BatchScorer, FullTrainer, ScoringPlan, StepResult
from unit.trainer.test_full import EXACT, N_TOKENS

SETTINGS = replace(EXACT, micro_batch_tokens=16, betas=(0.5, 0.95), max_grad_norm=0.5, kl_coef=0.1)


def learner(base: Path, ranks: Ranks) -> FullTrainer:
    return FullTrainer(base, N_TOKENS, SETTINGS, dtype=torch.float32, ranks=ranks)


def trained(trainer: FullTrainer, steps: int) -> list[StepResult]:
    """On a batch of three micro-batches, which two ranks cannot share evenly."""
    answers = [[7, 8, 40, 12, 9], [60, 61, 33, 20, 50]]
    groups = [
        group([5 + g, 9, 33, 4, 6], [rollout(ids, sample=s, logp=[-4.7] * 5) for s, ids in enumerate(answers)], g)
        for g in range(3)
    ]
    results = []
    for _ in range(steps):
        for micro in trainer.plan(batch(groups, [[1.0, -0.5]] * 3)):
            trainer.accumulate(micro)
        results.append(trainer.step())
    assert not any(result.skipped for result in results)
    return results


def scored(trainer: FullTrainer) -> np.ndarray | None:
    """What policy and reference say of three groups beforehand, flat, on rank 0."""
    scorer = BatchScorer(trainer, ScoringPlan(prox=True, reference=True))
    answers = [[7, 8, 40, 12, 9], [60, 61, 33, 20, 50]]
    groups = [group([5 + g, 9, 33], [rollout(ids, sample=s) for s, ids in enumerate(answers)], g) for g in range(3)]
    for micro in scorer.share_out(groups)[trainer.ranks.rank]:
        scorer.score(micro)
    if trainer.ranks.rank > 0:
        scorer.contribute()
        return None
    found = scorer.scores()
    rows = [one for part in (found.prox_logp, found.ref_logp) for row in part or [] for one in row if one is not None]
    assert len(rows) == 12
    return np.concatenate(rows)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_two_ranks_train_what_one_trains(tmp_path: Path, family: str) -> None:
    """Two steps, then a state of one rank on two and back. A mixture's router keeps what it holds beside parameters."""
    sizes = {"tie_word_embeddings": False} if family == "llama" else {}
    base = build_hf(tmp_path / "m", family, dtype="float32", **sizes)
    one = learner(base, ALONE)
    wanted = trained(one, 2)
    alone, numbers = snapshot(one.state_tensors()), one.state()
    before = scored(one)

    def work(ranks: Ranks) -> Any:
        trainer = learner(base, ranks)
        folder = tmp_path / "published"
        folder.mkdir(exist_ok=True)
        results = trained(trainer, 1)
        trainer.probe([5, 9, 33], [7, 8])
        assert all(isinstance(p, DTensor) for p in trainer.policy.parameters()), "a rank holds the whole head"
        trainer.write(folder)
        results += trained(trainer, 1)  # what lies between two steps leaves no trace
        late = snapshot(trainer.state_tensors())
        beforehand = scored(trainer)
        probe = trainer.probe([5, 9, 33], [7, 8])
        trainer.load_state(alone, numbers)
        again = trainer.state_tensors()
        trainer.write(folder)
        assert all(torch.equal(tensor, again[name]) for name, tensor in alone.items())
        return late, results, probe, trainer.memory_bytes(), beforehand

    first, second = on_ranks_of(2, tmp_path / "ranks", work)
    assert first[0].keys() == alone.keys()
    for name, tensor in alone.items():
        torch.testing.assert_close(first[0][name], tensor, rtol=1e-4, atol=1e-6, msg=name)
        assert torch.equal(first[0][name], second[0][name])
    for mine, theirs in zip(first[1], wanted, strict=True):
        assert mine.metrics.keys() == theirs.metrics.keys()
        for key in mine.metrics.keys() - {"train_compute_s"}:
            assert mine.metrics[key] == pytest.approx(theirs.metrics[key], rel=1e-4, abs=1e-6), key
    assert first[1] == second[1]
    assert first[2] == second[2] == pytest.approx(one.probe([5, 9, 33], [7, 8]), abs=1e-4)
    assert first[3] + second[3] == one.memory_bytes()
    np.testing.assert_allclose(first[4], before, atol=1e-4)
    published, before = load_file(tmp_path / "published" / "model.safetensors"), load_file(base / "model.safetensors")
    assert {n: t.shape for n, t in published.items()} == {n: t.shape for n, t in before.items()}
    kept = [name for name in before if name.endswith("e_score_correction_bias")]
    assert bool(kept) == (family == "deepseek_v3")
    assert all(torch.equal(published[name], before[name]) for name in kept)
    assert not torch.equal(published["model.norm.weight"], before["model.norm.weight"])
