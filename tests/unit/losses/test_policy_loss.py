"""Policy losses against frozen public numbers and a slow reference; masks, extremes, metrics."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tithe.errors import ConfigError
from tithe.losses import LOSSES, Aggregation, Denominators, LossSettings, dapo, summarize
from unit.losses.oracle import BATCH, FROZEN, FROZEN_GRADIENT, NORM_TOKENS, Sequences, slow_loss

TOKEN_MEAN = LossSettings(Aggregation.TOKEN_MEAN)


@pytest.mark.parametrize("mode", list(Aggregation))
@pytest.mark.parametrize("clips", list(FROZEN))
@pytest.mark.parametrize("name", ["dapo", "dr_grpo", "grpo", "ppo", "reinforce_pp", "rloo"])
def test_frozen_public_numbers(name: str, clips: tuple[float | None, float | None], mode: Aggregation) -> None:
    for kl_coef, wanted in zip((0.0, 0.1), FROZEN[clips][mode], strict=True):
        loss = LOSSES[name](BATCH.packed(), LossSettings(mode, *clips, kl_coef=kl_coef)).loss
        assert loss.item() == pytest.approx(wanted, abs=1e-8 if mode is Aggregation.SEQ_MEAN_TOKEN_MEAN else 1e-11)


def test_frozen_public_gradient() -> None:
    inp = BATCH.packed()
    dapo(inp, LossSettings(Aggregation.TOKEN_MEAN, 0.2, 0.28, kl_coef=0.1)).loss.backward()
    assert inp.logp.grad is not None
    assert inp.logp.grad.tolist() == pytest.approx(FROZEN_GRADIENT, abs=1e-11)


@st.composite
def ragged(draw: st.DrawFn) -> Sequences:
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    logp = st.floats(-8, -0.001)

    def rows(values: st.SearchStrategy[float]) -> list[list[float]]:
        return [draw(st.lists(values, min_size=n, max_size=n)) for n in lengths]

    masks = [draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in lengths]
    masks[0][0] = True
    return Sequences(rows(logp), rows(logp), rows(logp), rows(st.floats(-3, 3)), masks)


@settings(max_examples=60, deadline=None)
@given(
    batch=ragged(),
    clips=st.sampled_from([(None, None), (0.2, None), (0.2, 0.28), (1.0, 5.0)]),
    mode=st.sampled_from(list(Aggregation)),
    kl_coef=st.sampled_from([0.0, 0.3]),
)
def test_slow_reference(
    batch: Sequences, clips: tuple[float | None, float | None], mode: Aggregation, kl_coef: float
) -> None:
    loss = dapo(batch.packed(), LossSettings(mode, *clips, kl_coef=kl_coef)).loss
    wanted = slow_loss(batch, *clips, kl_coef, mode, batch.counts())
    assert loss.item() == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def test_gradient_agrees_with_differences() -> None:
    inp = BATCH.packed()
    given_settings = LossSettings(Aggregation.SEQ_MEAN_TOKEN_MEAN, 0.2, 0.28, kl_coef=0.1)

    def loss_of(logp: torch.Tensor) -> torch.Tensor:
        return dapo(replace(inp, logp=logp), given_settings).loss

    assert torch.autograd.gradcheck(loss_of, (inp.logp,))


@pytest.mark.parametrize("mode", list(Aggregation))
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_masked_tokens_change_nothing(mode: Aggregation, garbage: float) -> None:
    """C13, C17: whatever a tool token holds, loss, gradient and metrics stay bit for bit."""
    given_settings = LossSettings(mode, kl_coef=0.1, entropy_coef=0.01)
    clean = replace(BATCH.packed(), entropy=torch.full((10,), 2.0, dtype=torch.float64))

    def spoil(values: torch.Tensor) -> torch.Tensor:
        return values.detach().masked_fill(~clean.mask, garbage)

    assert clean.ref_logp is not None
    assert clean.entropy is not None
    dirty = replace(
        clean,
        logp=spoil(clean.logp).requires_grad_(),
        old_logp=spoil(clean.old_logp),
        ref_logp=spoil(clean.ref_logp),
        advantage=spoil(clean.advantage),
        entropy=spoil(clean.entropy),
    )
    outputs = [dapo(inp, given_settings) for inp in (clean, dirty)]
    for output in outputs:
        output.loss.backward()
    assert outputs[0].loss.item() == outputs[1].loss.item()
    assert summarize([outputs[0].metrics]) == summarize([outputs[1].metrics])
    assert clean.logp.grad is not None
    assert dirty.logp.grad is not None
    assert torch.equal(clean.logp.grad, dirty.logp.grad)
    assert (dirty.logp.grad[~dirty.mask] == 0).all()


def test_mask_decides_which_tokens_are_averaged() -> None:
    """C13: model, tool, tool, model with losses 1, 100, 100, 3."""
    rows = Sequences([[-1.0] * 4], [[-1.0] * 4], [[-1.0] * 4], [[-1.0, -100, -100, -3]], [[True, False, False, True]])
    assert dapo(rows.packed(), TOKEN_MEAN).loss.item() == 2.0


@pytest.mark.parametrize("mode", list(Aggregation))
@pytest.mark.parametrize("clip_range", [0.2, None])
@pytest.mark.parametrize("difference", [92.0, -92.0, 1e4])
def test_extreme_ratios_stay_finite(mode: Aggregation, clip_range: float | None, difference: float) -> None:
    """C17, in FP32: advantages 1, 0, -1 and a masked token, against a sampler `difference` nats away."""
    behaviour = -3.0 - difference
    ref, advantages, mask = [-3.0 + difference] * 4, [1.0, 0.0, -1.0, 1.0], [True, True, True, False]
    row = Sequences([[behaviour] * 4], [[-3.0] * 4], [ref], [advantages], [mask])
    inp = row.packed(dtype=torch.float32)
    output = dapo(inp, LossSettings(mode, clip_range, kl_coef=0.1))
    output.loss.backward()
    assert torch.isfinite(output.loss)
    assert inp.logp.grad is not None
    assert torch.isfinite(inp.logp.grad).all()
    assert inp.logp.grad[3] == 0
    assert all(math.isfinite(value) for value in summarize([output.metrics]).values())


def test_clip_takes_gradient_only_where_it_binds() -> None:
    """PPO's four corners, then the higher upper clip, then none."""

    def gradients(low: float | None, high: float | None) -> list[bool]:
        up, down = math.log(1.25), math.log(0.7)
        new, flat = [-1 + up, -1 + up, -1 + down, -1 + down], [-1.0] * 4
        batch = Sequences([flat], [new], [flat], [[1, -1, 1, -1]], [[True] * 4])
        inp = batch.packed()
        dapo(inp, LossSettings(Aggregation.TOKEN_SUM, low, high)).loss.backward()
        assert inp.logp.grad is not None
        return (inp.logp.grad != 0).tolist()

    assert gradients(0.2, None) == [False, True, True, False]
    assert gradients(0.2, 0.28) == [True, True, True, False]
    assert gradients(None, None) == [True, True, True, True]


def test_unclipped_gradient_is_the_weighted_policy_gradient() -> None:
    inp = BATCH.packed()
    dapo(inp, LossSettings(Aggregation.TOKEN_SUM, None)).loss.backward()
    wanted = -(inp.advantage * (inp.logp - inp.old_logp).exp() * inp.mask)
    assert inp.logp.grad is not None
    assert torch.allclose(inp.logp.grad, wanted.detach(), rtol=1e-12)


def test_on_policy_gradient_is_minus_advantage_over_tokens() -> None:
    batch = replace(BATCH, old=BATCH.new)
    inp = batch.packed()
    dapo(inp, TOKEN_MEAN).loss.backward()
    assert inp.logp.grad is not None
    assert torch.allclose(inp.logp.grad, -inp.advantage * inp.mask / 9, rtol=1e-12)


def test_a_step_on_the_kl_alone_brings_the_policy_nearer() -> None:
    """C15: zero advantages, beta > 0, one small step."""
    reference = torch.log_softmax(torch.tensor([1.0, 0.2, -0.5], dtype=torch.float64), -1)
    logits = torch.tensor([-0.4, 0.9, 0.1], dtype=torch.float64, requires_grad=True)

    def kl() -> float:
        logp = torch.log_softmax(logits.detach(), -1)
        return float((logp.exp() * (logp - reference)).sum())

    before = kl()
    logp = torch.log_softmax(logits, -1)
    draws = torch.multinomial(logp.detach().exp(), 512, replacement=True, generator=torch.Generator().manual_seed(1))
    zeros = torch.zeros(512, dtype=torch.float64)
    inp = Sequences([[0.0]], [[0.0]], [[0.0]], [[0.0]], [[True]]).packed(Denominators(512, 512, 1))
    inp = replace(
        inp,
        logp=logp[draws],
        old_logp=logp.detach()[draws],
        ref_logp=reference[draws],
        advantage=zeros,
        mask=zeros == 0,
        seq_index=torch.arange(512),
        n_seqs=512,
    )
    dapo(inp, LossSettings(Aggregation.TOKEN_MEAN, kl_coef=1.0)).loss.backward()
    assert logits.grad is not None
    with torch.no_grad():
        logits -= 0.05 * logits.grad
    assert kl() < before


def test_entropy_bonus_lowers_the_loss_and_passes_gradient() -> None:
    entropy = torch.linspace(0.5, 2.0, 10, dtype=torch.float64).requires_grad_()
    inp = replace(BATCH.packed(), entropy=entropy)
    plain = dapo(inp, TOKEN_MEAN).loss.item()
    output = dapo(inp, replace(TOKEN_MEAN, entropy_coef=0.1))
    output.loss.backward()
    mean = float(entropy.detach()[inp.mask].mean())
    assert output.loss.item() == pytest.approx(plain - 0.1 * mean, abs=1e-12)
    assert entropy.grad is not None
    assert torch.allclose(entropy.grad, -0.1 * inp.mask.double() / 9)
    assert summarize([output.metrics])["entropy"] == pytest.approx(mean)


def test_metrics_by_hand() -> None:
    inp = BATCH.packed()
    metrics = summarize([dapo(inp, LossSettings(Aggregation.TOKEN_SUM, 0.2, 0.28)).metrics])
    kept = [
        (new - old, ref - new, advantage)
        for rows in zip(BATCH.old, BATCH.new, BATCH.ref, BATCH.advantage, BATCH.mask, strict=True)
        for old, new, ref, advantage, on in zip(*rows, strict=True)
        if on
    ]
    ratios = [math.exp(log_ratio) for log_ratio, _, _ in kept]
    clipped = [(a > 0 and r > 1.28) or (a < 0 and r < 0.8) for r, (_, _, a) in zip(ratios, kept, strict=True)]
    assert metrics == pytest.approx(
        {
            "clip_frac": sum(clipped) / 9,
            "clip_high_frac": sum(a > 0 and r > 1.28 for r, (_, _, a) in zip(ratios, kept, strict=True)) / 9,
            "dual_clip_frac": 0.0,
            "weight_mean": 1.0,
            "weight_capped_frac": 0.0,
            "rejected_frac": 0.0,
            "ratio_mean": sum(ratios) / 9,
            "ratio_max": max(ratios),
            "approx_kl": sum(math.exp(d) - 1 - d for d, _, _ in kept) / 9,
            "ess": sum(ratios) ** 2 / 9 / sum(r * r for r in ratios),
            "kl_mean": sum(math.exp(d) - 1 - d for _, d, _ in kept) / 9,
        }
    )
    assert metrics["clip_frac"] == pytest.approx(0.4444444439506172)  # verl's pg_clipfrac for this batch


def test_on_policy_metrics_are_exact() -> None:
    inp = replace(BATCH, old=BATCH.new).packed(dtype=torch.float32)
    metrics = summarize([dapo(replace(inp, ref_logp=None), TOKEN_MEAN).metrics])
    ones = {"ratio_mean": 1.0, "ratio_max": 1.0, "weight_mean": 1.0, "ess": 1.0}
    assert metrics == ones | {name: 0.0 for name in metrics if name not in ones}


def test_missing_tensors_and_wrong_shapes_are_named() -> None:
    inp = BATCH.packed()
    with pytest.raises(ValueError, match="no ref_logp"):
        dapo(replace(inp, ref_logp=None), replace(TOKEN_MEAN, kl_coef=0.1))
    with pytest.raises(ValueError, match="no entropy"):
        dapo(inp, replace(TOKEN_MEAN, entropy_coef=0.1))
    with pytest.raises(ValueError, match=r"'mask': \(3,\)"):
        replace(inp, mask=inp.mask[:3])
    with pytest.raises(ValueError, match="without trained tokens"):
        Denominators(0, 0, NORM_TOKENS)
    with pytest.raises(ValueError, match="no trained token"):
        summarize([])


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: LossSettings(Aggregation.TOKEN_MEAN, clip_range=-0.1), "rl.clip_range"),
        (lambda: LossSettings(Aggregation.TOKEN_MEAN, clip_range=None, clip_range_high=0.2), "rl.clip_range"),
        (lambda: LossSettings(Aggregation.TOKEN_MEAN, clip_range_high=0.0), "rl.clip_range_high"),
        (lambda: LossSettings(Aggregation.TOKEN_MEAN, kl_coef=math.nan), "rl.kl_coef"),
        (lambda: LossSettings(Aggregation.TOKEN_MEAN, entropy_coef=-1.0), "rl.entropy_coef"),
        (lambda: LossSettings(Aggregation.TOKEN_MEAN, kl_estimator="k4"), None),
    ],
)
def test_bad_settings_name_the_key(build: Callable[[], LossSettings], key: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        build()
    assert caught.value.key == key
