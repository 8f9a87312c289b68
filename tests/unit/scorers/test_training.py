"""Bradley–Terry: the loss, its gradient through head and adapter, what is learned, what is written and read back."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.decoders import FP32, hang_adapter, random_adapter, random_ids, tiny_decoder, transformers_twin
from support.training import relative_error
from tithe.errors import ModelError, NonFiniteError, UserError
from tithe.lora import LoraSpec, init_tensors
from tithe.models import Decoder, Passes
from tithe.models.value_head import BIAS, WEIGHT
from tithe.scorers import (
    PreferenceSettings,
    PreferenceTrainer,
    Reply,
    ReplyPair,
    load_reward_model,
    preference_loss,
    probe_gap,
    rank_pairs,
    read_manifest,
    save_reward_model,
)

SPEC = LoraSpec(r=4, alpha=8)
SETTINGS = PreferenceSettings(rate=lambda step: 1e-2, micro_batch_tokens=96)


def some_pairs() -> list[ReplyPair]:
    lengths = ((21, 5, 40), (16, 17, 2), (21, 1, 9))
    return [
        ReplyPair(
            tuple(random_ids(p, 100 + p).tolist()),
            tuple(random_ids(c, 200 + i).tolist()),
            tuple(random_ids(r, 300 + i).tolist()),
        )
        for i, (p, c, r) in enumerate(lengths)
    ]


def learner(decoder: Decoder, settings: PreferenceSettings = SETTINGS) -> PreferenceTrainer:
    trainer = PreferenceTrainer(decoder, SPEC, random_adapter(decoder, SPEC, 3), settings)
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        trainer._masters[WEIGHT].copy_(torch.randn(decoder.spec.hidden_size, generator=draw) * 0.2)
        trainer._masters[BIAS].fill_(0.3)
    return trainer


def test_the_loss_is_the_formula_and_its_gradient_in_float64() -> None:
    chosen = torch.tensor([0.3, -2.0, 40.0, -800.0], dtype=torch.float64)
    rejected = torch.tensor([0.1, 1.5, -40.0, 800.0], dtype=torch.float64)
    wanted = [math.log1p(math.exp(-0.2)), math.log1p(math.exp(3.5)), 0.0, 1600.0]
    assert float(preference_loss(chosen, rejected)) == pytest.approx(sum(wanted), rel=1e-12)
    centred = sum(wanted) + 0.5 * (0.4**2 + 0.5**2)  # the other two sums are 0
    assert float(preference_loss(chosen, rejected, 0.5)) == pytest.approx(centred, rel=1e-12)
    small = (torch.tensor([0.3, -2.0], dtype=torch.float64), torch.tensor([0.1, 1.5], dtype=torch.float64))
    given = [t.requires_grad_() for t in small]
    assert torch.autograd.gradcheck(lambda c, r: preference_loss(c, r, 0.1), given)


@pytest.mark.parametrize("centre", [0.0, 0.05])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_gradient_is_autograds_through_transformers(
    exact: Decoder, base_path: Path, centre: float, checkpointing: bool
) -> None:
    pairs = some_pairs()
    trainer = learner(exact, replace(SETTINGS, centre=centre, activation_checkpointing=checkpointing))
    loss, _, mine = trainer.gradients(pairs)
    masters = {name: t.detach().clone().requires_grad_() for name, t in trainer._masters.items()}
    twin = transformers_twin(base_path)
    hang_adapter(twin, {n: t for n, t in masters.items() if n not in (WEIGHT, BIAS)}, SPEC)

    def score(pair: ReplyPair, ids: tuple[int, ...]) -> torch.Tensor:
        hidden = twin.model(torch.tensor([pair.prompt_ids + ids])).last_hidden_state[0, -1]
        return hidden @ masters[WEIGHT] + masters[BIAS][0]

    chosen = torch.stack([score(pair, pair.chosen) for pair in pairs])
    rejected = torch.stack([score(pair, pair.rejected) for pair in pairs])
    wanted = preference_loss(chosen, rejected, centre) / len(pairs)
    assert loss == pytest.approx(float(wanted.detach()), rel=1e-5)
    names = [name for name in masters if centre or name != BIAS]
    theirs = dict(zip(names, torch.autograd.grad(wanted, [masters[n] for n in names]), strict=True))
    assert relative_error({name: mine[name] for name in names}, theirs) < 1e-4
    if not centre:
        assert abs(float(mine[BIAS])) < 1e-7, "differences know no offset"


def test_a_pair_is_never_cut_and_micro_batches_do_not_matter(exact: Decoder) -> None:
    pairs = some_pairs()
    whole = learner(exact, replace(SETTINGS, micro_batch_tokens=1000)).gradients(pairs)
    parts = learner(exact, replace(SETTINGS, micro_batch_tokens=1)).gradients(pairs)
    assert whole[0] == pytest.approx(parts[0], rel=1e-6)
    assert (
        relative_error(
            {n: g for n, g in whole[2].items() if n != BIAS}, {n: g for n, g in parts[2].items() if n != BIAS}
        )
        < 1e-5
    )


def likings(n: int, seed: int) -> list[ReplyPair]:
    """Preferred are low token ids, nine times of ten in one reply and once of ten in the other. No prompt comes
    twice."""
    rng = np.random.default_rng(seed)

    def reply(share: float) -> tuple[int, ...]:
        size = int(rng.integers(3, 9))
        low, high = rng.integers(4, 60, size), rng.integers(60, 116, size)
        return tuple(int(t) for t in np.where(rng.random(size) < share, low, high))

    return [ReplyPair(tuple(int(t) for t in rng.integers(4, 116, 6)), reply(0.9), reply(0.1)) for _ in range(n)]


def test_it_learns_a_preference_and_ranks_what_it_has_not_seen(decoder: Decoder) -> None:
    trainer = PreferenceTrainer(
        decoder, SPEC, init_tensors(SPEC, decoder.linear_shapes(), 0), replace(SETTINGS, micro_batch_tokens=512)
    )
    train, held_out = likings(192, 1), likings(64, 2)
    before = rank_pairs(trainer.scorer(), held_out)
    assert before.accuracy == 0.5
    assert before.loss == pytest.approx(math.log(2.0))
    for _ in range(3):
        for at in range(0, len(train), 32):
            step = trainer.step(train[at : at + 32])
            assert not step.skipped
    after = rank_pairs(trainer.scorer(), held_out)
    assert after.accuracy > 0.85
    assert after.loss < 0.5
    assert trainer.memory_bytes() == 16 * sum(t.numel() for t in trainer._masters.values())


def test_three_steps_without_numbers_end_it_and_change_nothing(decoder: Decoder) -> None:
    trainer = learner(decoder)
    before = {name: t.detach().clone() for name, t in trainer._masters.items()}
    with torch.no_grad():
        trainer._masters[WEIGHT][0] = before[WEIGHT][0] = math.nan
    assert trainer.step(some_pairs()).skipped
    assert trainer.step(some_pairs()).skipped
    with pytest.raises(NonFiniteError, match=r"optimizer\.lr"):
        trainer.step(some_pairs())
    assert all(torch.equal(before[n].nan_to_num(7.0), t.nan_to_num(7.0)) for n, t in trainer._masters.items())


# ---------------------------------------------------------------------- on disk


@pytest.fixture
def saved(exact: Decoder, tmp_path: Path) -> tuple[Path, PreferenceTrainer, list[Reply]]:
    trainer = learner(exact)
    replies = [Reply(pair.prompt_ids, pair.chosen) for pair in some_pairs()]
    facts: dict[str, Any] = {
        "base_checksum": exact.checksum,
        "numeric_mode": exact.options.numeric_mode,
        "accuracy": 0.75,
        "accuracy_lo": 0.6,
        "accuracy_hi": 0.9,
        "loss": 0.5,
        "pairs": 30,
        "held_out_pairs": 3,
        "pairs_sha256": "ab",
        "probe": tuple(replies),
        "probe_scores": tuple(trainer.scorer().score(replies)),
    }
    save_reward_model(tmp_path / "rm", trainer.published(), SPEC, trainer.head, facts)
    return tmp_path / "rm", trainer, replies


def opened(path: Path, decoder: Decoder) -> Any:
    passes = Passes(decoder, {}, checkpointing=False, dropout=0.0)
    return load_reward_model(path, read_manifest(path), passes, batch_tokens=64)


def test_what_is_written_scores_as_it_did(saved: tuple[Path, PreferenceTrainer, list[Reply]], exact: Decoder) -> None:
    path, trainer, replies = saved
    scorer, manifest = opened(path, exact), read_manifest(path)
    assert scorer.score(replies) == trainer.scorer().score(replies)
    assert probe_gap(scorer, manifest.probe, manifest.probe_scores) == 0.0
    assert (manifest.accuracy, manifest.pairs, len(manifest.version)) == (0.75, 30, 8)
    with pytest.raises(UserError, match="cannot write"):
        save_reward_model(path, trainer.published(), SPEC, trainer.head, {})
    trainer.step(some_pairs())
    assert probe_gap(trainer.scorer(), manifest.probe, manifest.probe_scores) > 0


def test_another_base_is_refused(saved: tuple[Path, PreferenceTrainer, list[Reply]], tmp_path: Path) -> None:
    other = tiny_decoder(tmp_path / "other", "qwen3", FP32, seed=1)
    with pytest.raises(ModelError, match="another base"):
        opened(saved[0], other)


@pytest.mark.parametrize("what", ["cut", "changed", "missing", "format", "unknown", "no_digest", "text"])
def test_a_damaged_directory_is_refused(saved: tuple[Path, PreferenceTrainer, list[Reply]], what: str) -> None:
    path = saved[0]
    manifest, head = path / "reward_model.json", path / "score_head.safetensors"
    content = json.loads(manifest.read_text())
    if what == "changed":
        data = bytearray(head.read_bytes())
        data[-1] ^= 1
        head.write_bytes(bytes(data))
    elif what == "missing":
        head.unlink()
    elif what == "cut":
        manifest.write_text(manifest.read_text()[:-20])
    elif what == "text":
        manifest.write_text("[1]")
    else:
        changes = {"format": {"format": 2}, "unknown": {"colour": 1}, "no_digest": {"files": {}}}[what]
        manifest.write_text(json.dumps(content | changes))
    with pytest.raises(ModelError, match=r"reward_model\.json"):
        read_manifest(path)
