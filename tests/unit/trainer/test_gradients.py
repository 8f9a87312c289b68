"""The gradient of a batch: that of the formula through transformers, however the batch is cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.decoders import hang_adapter, random_adapter, random_ids, transformers_twin
from support.learning import SETTINGS, SPEC, batch, group, rollout
from tithe.losses import Aggregation, LossSettings
from tithe.models import Decoder
from tithe.trainer import Trainer, TrainerSettings
from tithe.types import Rollout, TrainingBatch

EXACT = replace(SETTINGS, betas=(0.0, 0.95), max_grad_norm=1e30, micro_batch_tokens=10_000)
"""Nothing clipped and no memory of earlier steps: Adam's first moment is the gradient itself."""
KINDS = list(Aggregation)


def gradients(decoder: Decoder, what: TrainingBatch, settings: TrainerSettings) -> tuple[dict[str, Tensor], float]:
    """Gradients by name and the loss."""
    trainer = Trainer(decoder, SPEC, random_adapter(decoder, SPEC), settings)
    for micro in trainer.plan(what):
        trainer.accumulate(micro)
    result = trainer.step()
    state = trainer.state_tensors()
    prefix = "optimizer/exp_avg/"
    return {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}, result.metrics["loss"]


def relative(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """‖a − b‖ / ‖b‖ over all tensors; the largest of all tensors, each against the whole."""
    assert a.keys() == b.keys()
    whole = torch.cat([t.flatten() for t in b.values()]).norm()
    assert whole > 0
    return max(float((a[n] - b[n]).norm() / whole) for n in b)


def mixed_batch() -> TrainingBatch:
    """Three groups of unequal prompts and answers: masked tokens, one-token answers, stale log-probs, temperatures."""
    groups = []
    for g, (prompt, lengths, temperature) in enumerate(
        [(19, (9, 1, 16, 5), 1.0), (3, (12, 2, 7, 1), 0.7), (33, (4, 4), 1.3)]
    ):
        rollouts: list[Rollout] = []
        for s, n in enumerate(lengths):
            ids = random_ids(n, 10 * g + s)
            logp = -4.0 - np.random.default_rng(10 * g + s).random(n)
            mask = [i % 4 != 2 for i in range(n)]
            rollouts.append(rollout(ids.tolist(), sample=s, logp=logp.tolist(), mask=mask, temperature=temperature))
        groups.append(group(random_ids(prompt, 50 + g), rollouts, g))
    return batch(groups, [[1.0, -0.5, 0.25, 0.0], [-1.5, 0.75, 0.3, 1.0], [0.6, -0.6]])


def token_losses(
    logits: Tensor, reference: Tensor, r: Rollout, advantage: np.ndarray, settings: LossSettings
) -> Tensor:
    """The objective of each token of a rollout, written out; logits [T, V] predict its tokens."""
    targets = torch.from_numpy(r.token_ids).long()[:, None]
    full = (logits.double() / r.temperature).log_softmax(-1)
    p = full.gather(1, targets)[:, 0]
    q = (reference.double() / r.temperature).log_softmax(-1).gather(1, targets)[:, 0]
    ratio = torch.exp(p - torch.from_numpy(r.logp).double())
    a = torch.from_numpy(advantage).double()
    assert settings.clip_range is not None
    low, high = 1 - settings.clip_range, 1 + (settings.clip_range_high or settings.clip_range)
    policy = torch.maximum(-a * ratio, -a * ratio.clamp(low, high))
    kl = torch.exp(q - p) - (q - p) - 1
    entropy = -(full.exp() * full).sum(-1)
    return policy + settings.kl_coef * kl - settings.entropy_coef * entropy


def plain_way(
    path: Path, decoder: Decoder, what: TrainingBatch, settings: LossSettings
) -> tuple[dict[str, Tensor], float]:
    """Every rollout by itself through transformers, autograd. Ids that the tokenizer lacks are no choice."""
    model, reference = transformers_twin(path), transformers_twin(path)
    leaves = {n: t.clone().requires_grad_() for n, t in random_adapter(decoder, SPEC).items()}
    hang_adapter(model, leaves, SPEC)
    losses: list[Tensor] = []
    for g, row in zip(what.groups, what.advantages, strict=True):
        for r, advantage in zip(g.rollouts, row, strict=True):
            assert advantage is not None
            ids = torch.from_numpy(np.concatenate([g.prompt_ids, r.token_ids])).long()[None]
            at = (0, slice(len(g.prompt_ids) - 1, -1), slice(decoder.n_tokens))
            with torch.no_grad():
                frozen = reference(ids).logits[at]
            losses.append(token_losses(model(ids).logits[at], frozen, r, advantage, settings)[r.loss_mask])
    loss = torch.cat(losses).mean()
    loss.backward()
    return {n: t.grad for n, t in leaves.items() if t.grad is not None}, loss.item()


@pytest.mark.parametrize(
    "terms",
    [
        {"clip_range": 0.2, "clip_range_high": 0.3},
        {"clip_range": 0.9, "kl_coef": 0.3},
        {"clip_range": 0.2, "kl_coef": 0.1, "entropy_coef": 0.2},
    ],
    ids=["clipped", "kl", "entropy"],
)
def test_the_gradient_is_that_of_autograd_through_transformers(base_path, exact, terms) -> None:
    loss = LossSettings(aggregation=Aggregation.TOKEN_MEAN, **terms)
    settings = replace(EXACT, loss=loss, kl_coef=loss.kl_coef, micro_batch_tokens=48)
    mine, my_loss = gradients(exact, mixed_batch(), settings)
    theirs, their_loss = plain_way(base_path, exact, mixed_batch(), loss)
    assert my_loss == pytest.approx(their_loss, rel=1e-5)
    assert relative(mine, theirs) < 1e-5


@pytest.mark.parametrize("aggregation", KINDS)
def test_any_split_into_micro_batches_gives_the_same_gradient(exact, aggregation) -> None:
    """C07: denominators count the whole batch."""
    loss = LossSettings(aggregation=aggregation, kl_coef=0.05)
    settings = replace(EXACT, loss=loss, kl_coef=0.05)
    whole, value = gradients(exact, mixed_batch(), settings)
    for budget in (1, 24, 40, 70):
        split, split_value = gradients(exact, mixed_batch(), replace(settings, micro_batch_tokens=budget))
        assert split_value == pytest.approx(value, rel=1e-6)
        assert relative(split, whole) < 1e-5


def test_bf16_splits_differ_by_rounding_only(decoder, record_property) -> None:
    whole, value = gradients(decoder, mixed_batch(), EXACT)
    split, split_value = gradients(decoder, mixed_batch(), replace(EXACT, micro_batch_tokens=24))
    assert split_value == pytest.approx(value, rel=1e-5), "log-probs do not depend on the split at all"
    difference = relative(split, whole)
    record_property("relative_difference_bf16", difference)
    assert difference < 2e-3


def test_a_groups_order_and_that_of_its_samples_do_not_matter(exact) -> None:
    what = mixed_batch()
    turned = TrainingBatch(
        [replace(g, rollouts=tuple(reversed(g.rollouts))) for g in reversed(what.groups)],
        [list(reversed(row)) for row in reversed(what.advantages)],
        0,
    )
    assert relative(gradients(exact, turned, EXACT)[0], gradients(exact, what, EXACT)[0]) < 1e-5


@pytest.mark.parametrize("mode", ["exact", "decoder"])
def test_activation_checkpointing_gives_the_same_bits(request, mode) -> None:
    base = request.getfixturevalue(mode)
    kept, loss = gradients(base, mixed_batch(), EXACT)
    again, loss_again = gradients(base, mixed_batch(), replace(EXACT, activation_checkpointing=True))
    assert loss == loss_again
    assert all(torch.equal(kept[n], again[n]) for n in kept)


# ------------------------------------------------------------------ what may not matter


def variant(
    exact: Decoder, change: Any, settings: TrainerSettings = EXACT
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Gradient and metrics of a small batch after `change(ids, logp, mask)`."""
    ids, logp, mask = random_ids(6, 1).tolist(), [-4.0] * 6, [True, False, False, True, True, True]
    change(ids, logp, mask)
    what = batch([group(random_ids(5), [rollout(ids, logp=logp, mask=mask), rollout([9, 2])])], [[1.0, -1.0]])
    trainer = Trainer(exact, SPEC, random_adapter(exact, SPEC), settings)
    for micro in trainer.plan(what):
        trainer.accumulate(micro)
    metrics = trainer.step().metrics
    return trainer.state_tensors(), metrics


def test_log_probs_of_tokens_the_model_did_not_write_change_nothing(exact) -> None:
    """C13: neither loss, gradient nor any metric, whatever stands there."""
    settings = replace(EXACT, loss=LossSettings(aggregation=Aggregation.TOKEN_MEAN, kl_coef=0.1), kl_coef=0.1)
    plain, metrics = variant(exact, lambda *_: None, settings)

    def spoil(_ids: list[int], logp: list[float], _mask: list[bool]) -> None:
        logp[1:3] = [float("nan"), -95.0]

    spoilt, same_metrics = variant(exact, spoil, settings)
    assert all(torch.equal(plain[n], spoilt[n]) for n in plain)
    assert {k: v for k, v in metrics.items() if k != "train_compute_s"} == {
        k: v for k, v in same_metrics.items() if k != "train_compute_s"
    }


def test_an_end_token_is_trained_where_it_was_written_and_read_where_it_was_given(exact) -> None:
    """C09: ids tell nothing; eos equal to pad is an ordinary token."""

    def ends_with(token: int) -> dict[str, Tensor]:
        def change(ids: list[int], _logp: list[float], _mask: list[bool]) -> None:
            ids[-1] = token

        return variant(exact, change)[0]

    assert any(not torch.equal(ends_with(2)[n], ends_with(7)[n]) for n in ends_with(2) if "exp_avg/" in n)
    with_end = batch([group([5, 2, 9], [rollout([7, 2]), rollout([8])])], [[1.0, -1.0]])
    without = batch([group([5, 3, 9], [rollout([7, 2]), rollout([8])])], [[1.0, -1.0]])
    assert relative(gradients(exact, with_end, EXACT)[0], gradients(exact, without, EXACT)[0]) > 1e-3


def test_a_stale_sample_far_off_leaves_everything_finite(exact) -> None:
    """C17: a log-ratio of +92 with advantage 1, with advantage 0, and under the mask."""
    rollouts = [
        rollout([9, 8], logp=[-95.0, -3.0]),
        rollout([9, 8], logp=[-95.0, -3.0]),
        rollout([9, 8], logp=[-95.0, -3.0], mask=[False, True]),
    ]
    what = batch([group([5, 6], rollouts)], [[-1.0, 0.0, 1.0]])
    mine, loss = gradients(exact, what, EXACT)
    assert np.isfinite(loss)
    assert all(torch.isfinite(t).all() for t in mine.values())
