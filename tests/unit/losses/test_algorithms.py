"""Every algorithm with every correction: gradients, masks, overflow, what is left out, what is reported."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tithe.errors import ConfigError
from tithe.losses import (
    CORRECTIONS,
    LOSSES,
    NEEDS_PROX,
    Aggregation,
    CorrectionSettings,
    Denominators,
    KLControl,
    LossSettings,
    PolicyLossInput,
    ValueLossInput,
    k3,
    summarize,
    value_loss,
)
from unit.losses.ragged import packed

TOKEN_MEAN = LossSettings(Aggregation.TOKEN_MEAN, 0.2, 0.28)
CORRECTED = {
    "none": CorrectionSettings(),
    "tis": CorrectionSettings("tis", high=2.0),
    "tis sequence": CorrectionSettings("tis", "sequence", high=2.0),
    "mis": CorrectionSettings("mis", "geometric", low=0.5, high=2.0, veto=1e-4),
    "icepop": CorrectionSettings("icepop", low=0.5, high=5.0),
    "decoupled": CorrectionSettings("decoupled"),
    "opsm": CorrectionSettings("opsm", high=0.05),
}
BOTH = list(itertools.product(sorted(LOSSES), CORRECTED))
RATIO_LOSSES = [name for name in sorted(LOSSES) if name not in ("cispo", "gspo")]


def rollout(old: list[float], **fields: list[float]) -> PolicyLossInput:
    """One rollout whose tokens the policy gives -1 each, and what else is given."""
    n = len(old)
    given = {name: torch.tensor(values, dtype=torch.float64) for name, values in fields.items()}
    return PolicyLossInput(
        logp=given.pop("logp", torch.full((n,), -1.0, dtype=torch.float64)).requires_grad_(),
        old_logp=torch.tensor(old, dtype=torch.float64),
        advantage=given.pop("advantage", torch.ones(n, dtype=torch.float64)),
        mask=given.pop("mask", torch.ones(n)).bool(),
        seq_index=torch.zeros(n, dtype=torch.long),
        n_seqs=1,
        denominators=Denominators(n, 1, n),
        **given,
    )


def gradient(inp: PolicyLossInput, name: str, settings: LossSettings) -> torch.Tensor:
    LOSSES[name](inp, settings).loss.backward()
    assert inp.logp.grad is not None
    return inp.logp.grad


# ------------------------------------------------------------------ gradients


@pytest.mark.parametrize("correction", CORRECTED)
@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_gradients_agree_with_differences(correction: str, kl: str, level: str) -> None:
    inp = packed(extreme=False)
    settings = replace(
        TOKEN_MEAN,
        dual_clip=3.0,
        correction=CORRECTED[correction],
        kl_coef=0.1,
        kl_estimator=kl,
        kl_level=level,
        kl_unbiased=True,
    )
    assert torch.autograd.gradcheck(lambda logp: LOSSES["ppo"](replace(inp, logp=logp), settings).loss, (inp.logp,))


def test_gspo_has_the_gradient_of_the_answers_own_ratio() -> None:
    """Its value per token is a device; what is differentiated is s = exp(mean log-ratio), clipped."""
    inp, settings = packed(extreme=False), LossSettings(Aggregation.SEQ_MEAN_TOKEN_MEAN, 0.2, 0.27)

    def of_answers(logp: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=logp.dtype)
        for q in range(inp.n_seqs):
            own = (inp.seq_index == q) & inp.mask
            s = (logp[own] - inp.old_logp[own]).mean().exp()
            a = inp.advantage[own][0]
            total = total + torch.maximum(-a * s, -a * s.clamp(0.8, 1.27)) / inp.n_seqs
        return total

    assert torch.autograd.gradcheck(of_answers, (inp.logp,))
    wanted = torch.autograd.grad(of_answers(inp.logp), inp.logp)[0]
    assert LOSSES["gspo"](inp, settings).loss.item() == pytest.approx(of_answers(inp.logp).item(), rel=1e-12)
    assert torch.allclose(gradient(inp, "gspo", settings), wanted, rtol=1e-12)


def test_cispo_keeps_the_gradient_of_every_token_at_its_clipped_weight() -> None:
    inp = packed(extreme=True)
    settings = LossSettings(Aggregation.TOKEN_SUM, 1.0, 4.0)
    weight = (inp.logp.detach() - inp.old_logp).clamp(-20, 20).exp().clamp(max=5.0)
    assert torch.allclose(gradient(inp, "cispo", settings), -(weight * inp.advantage * inp.mask), rtol=1e-12)


# ------------------------------------------------------------------ masks and overflow


@pytest.mark.parametrize(("name", "correction"), BOTH)
@pytest.mark.parametrize("garbage", [math.nan, -math.inf])
def test_masked_tokens_change_nothing(name: str, correction: str, garbage: float) -> None:
    """C13, C17: bit for bit, whatever a tool's token holds."""
    settings = replace(TOKEN_MEAN, correction=CORRECTED[correction], kl_coef=0.1, kl_level="sequence", kl_unbiased=True)
    clean = packed(extreme=True)

    def spoiled(values: torch.Tensor) -> torch.Tensor:
        return values.detach().masked_fill(~clean.mask, garbage)

    fields = {f: getattr(clean, f) for f in ("old_logp", "prox_logp", "ref_logp", "advantage")}
    fields = {f: spoiled(values) for f, values in fields.items()}
    dirty = replace(clean, logp=spoiled(clean.logp).requires_grad_(), behaviour_logp=fields["old_logp"], **fields)
    outputs = [LOSSES[name](inp, settings) for inp in (clean, dirty)]
    assert outputs[0].loss.item() == outputs[1].loss.item()
    assert summarize([outputs[0].metrics]) == summarize([outputs[1].metrics])
    grads = [torch.autograd.grad(output.loss, inp.logp)[0] for output, inp in zip(outputs, (clean, dirty), strict=True)]
    assert torch.equal(*grads)
    assert (grads[1][~dirty.mask] == 0).all()


@pytest.mark.parametrize(("name", "correction"), BOTH)
@pytest.mark.parametrize(("difference", "level"), [(92.0, "token"), (-92.0, "sequence"), (1e4, "sequence")])
def test_nothing_overflows(name: str, correction: str, difference: float, level: str) -> None:
    """C17 in float32: advantages 1, 0, -1, and a masked token; the KL by as much the other way."""
    far = [-3.0 - difference] * 4
    inp = rollout(far, logp=[-3.0] * 4, advantage=[1, 0, -1, 1], mask=[1, 1, 1, 0])
    inp = replace(
        inp,
        logp=inp.logp.detach().float().requires_grad_(),
        old_logp=inp.old_logp.float(),
        advantage=inp.advantage.float(),
        prox_logp=torch.full((4,), -3.0),
        ref_logp=torch.full((4,), -3.0 + difference),
    )
    settings = replace(TOKEN_MEAN, clip_range=None, clip_range_high=None, correction=CORRECTED[correction])
    settings = replace(settings, kl_coef=0.1, kl_level=level)
    output = LOSSES[name](inp, settings)
    output.loss.backward()
    assert torch.isfinite(output.loss)
    assert inp.logp.grad is not None
    assert torch.isfinite(inp.logp.grad).all()
    assert inp.logp.grad[3] == 0
    assert all(math.isfinite(value) for value in summarize([output.metrics]).values())


# ------------------------------------------------------------------ clips and corrections


def test_the_dual_clip_bounds_what_a_bad_token_costs() -> None:
    inp = rollout([-1.0 - math.log(8)] * 2, advantage=[-1.0, 1.0])
    dual = replace(TOKEN_MEAN, aggregation=Aggregation.TOKEN_SUM, dual_clip=3.0)
    output = LOSSES["ppo"](inp, dual)
    assert output.loss.item() == pytest.approx(3.0 - 1.28)
    assert summarize([output.metrics])["dual_clip_frac"] == 0.5
    assert (gradient(inp, "ppo", dual) == 0).all()


def test_one_difference_over_many_tokens_counts_once_in_the_geometric_mean() -> None:
    """C21: 300 tokens of difference 0.01, cap 3. The product of ratios is 20.1 and is capped; the mean is 1.010."""
    inp = rollout([-1.01] * 300, prox_logp=[-1.0] * 300)
    weights = {}
    for level in ("token", "sequence", "geometric"):
        settings = replace(TOKEN_MEAN, correction=CorrectionSettings("tis", level, high=3.0))
        weights[level] = summarize([LOSSES["grpo"](inp, settings).metrics])["weight_mean"]
    assert weights == pytest.approx({"token": 1.01005, "sequence": 3.0, "geometric": 1.01005}, abs=1e-5)


def test_what_is_left_out_stays_in_the_denominator() -> None:
    """Four tokens, two of them out of bounds: the others weigh a quarter each and not a half."""
    inp = rollout([-1.0, -4.0, -1.0, 2.0], prox_logp=[-1.0] * 4)
    settings = replace(TOKEN_MEAN, correction=CorrectionSettings("icepop", low=0.5, high=5.0))
    output = LOSSES["grpo"](inp, settings)
    assert gradient(inp, "grpo", settings).tolist() == [-0.25, 0, -0.25, 0]
    assert summarize([output.metrics])["rejected_frac"] == 0.5


def test_a_veto_leaves_out_the_rollout_and_no_other() -> None:
    inp = packed(extreme=False)
    assert inp.prox_logp is not None
    old = inp.old_logp.clone()
    hopeless = int(torch.nonzero(inp.mask & (inp.seq_index == 2))[0])
    old[hopeless] = inp.prox_logp[hopeless] + 12.0
    inp = replace(inp, old_logp=old)
    settings = replace(TOKEN_MEAN, correction=CorrectionSettings("mis", low=0.0, high=100.0, veto=1e-4))
    settings = replace(settings, clip_range=None, clip_range_high=None)
    touched = gradient(inp, "grpo", settings) != 0
    assert torch.equal(touched, inp.mask & (inp.seq_index != 2))


def test_a_weight_is_over_what_the_token_was_drawn_from() -> None:
    """At top-p below 1 a token is drawn with more than its probability under the policy."""
    inp = rollout([-1.0, -2.0], prox_logp=[-1.0, -2.0], behaviour_logp=[-0.5, -1.0])
    settings = replace(TOKEN_MEAN, correction=CorrectionSettings("tis", high=2.0))
    metrics = summarize([LOSSES["grpo"](inp, settings).metrics])
    assert metrics["weight_mean"] == pytest.approx((math.exp(-0.5) + math.exp(-1.0)) / 2)
    assert metrics["sampler_kl"] == 0.0, "trainer and sampler agree all the same"


@pytest.mark.parametrize("name", RATIO_LOSSES)
def test_decoupled_clips_around_the_batchs_own_policy(name: str) -> None:
    """Far from the sampler and near the weights the batch began with: nothing is clipped, the sample is weighed."""
    inp = rollout([-3.0] * 2, prox_logp=[-1.05] * 2, advantage=[1.0, 1.0])
    sampler, proximal = (
        summarize([LOSSES[name](inp, replace(TOKEN_MEAN, correction=CorrectionSettings(c))).metrics])
        for c in ("none", "decoupled")
    )
    assert (sampler["clip_frac"], proximal["clip_frac"]) == (1.0, 0.0)
    assert proximal["weight_mean"] == pytest.approx(math.exp(1.95))
    assert proximal["ratio_mean"] == pytest.approx(math.exp(0.05))


def test_three_kls_are_told_apart() -> None:
    inp = packed(extreme=False)
    assert inp.prox_logp is not None
    assert inp.ref_logp is not None
    metrics = summarize([LOSSES["grpo"](inp, replace(TOKEN_MEAN, correction=CorrectionSettings("tis"))).metrics])
    m = inp.mask
    wanted = {
        "sampler_kl": k3(inp.old_logp[m], inp.prox_logp[m]),
        "update_kl": k3(inp.prox_logp[m], inp.logp[m]),
        "kl_mean": k3(inp.logp[m], inp.ref_logp[m]),
    }
    assert {name: metrics[name] for name in wanted} == pytest.approx(
        {n: float(x.detach().mean()) for n, x in wanted.items()}
    )
    assert metrics["approx_kl"] == pytest.approx(metrics["update_kl"]), "the ratio is taken against the batch's policy"


def test_effective_samples_by_hand() -> None:
    inp = rollout([-1.0, -1.0, -1.0 - math.log(3)], prox_logp=[-1.0] * 3)
    free, popped = (
        summarize([LOSSES["grpo"](inp, replace(TOKEN_MEAN, correction=c)).metrics])["ess"]
        for c in (CorrectionSettings("tis"), CorrectionSettings("icepop", low=0.5, high=2.0))
    )
    assert free == pytest.approx(25 / (3 * 11))
    assert popped == pytest.approx(4 / (3 * 2))


# ------------------------------------------------------------------ KL


def test_the_kl_of_whole_rollouts_is_that_of_their_summed_log_ratio() -> None:
    inp = rollout([-1.0] * 3, ref_logp=[-1.5, -0.8, -1.1], advantage=[0.0] * 3)
    d = 0.5 - 0.2 + 0.1
    for name, wanted in {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}.items():
        settings = LossSettings(Aggregation.SEQ_MEAN_TOKEN_SUM, kl_coef=1.0, kl_estimator=name, kl_level="sequence")
        assert LOSSES["grpo"](inp, settings).loss.item() == pytest.approx(wanted)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_the_unbiased_estimate_has_the_kls_own_value_and_gradient_off_policy(name: str) -> None:
    """Exactly, over all tokens of a small vocabulary, each as often as another policy draws it."""
    sampler = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    reference = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64).log()
    logits = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log().requires_grad_()
    logp = torch.log_softmax(logits, -1)
    exact = (logp.exp() * (logp - reference)).sum()
    wanted = torch.autograd.grad(exact, logits, retain_graph=True)[0]
    value, grad = 0.0, torch.zeros(3, dtype=torch.float64)
    for token in range(3):
        one = rollout([0.0], advantage=[0.0])
        one = replace(one, logp=logp[token : token + 1], old_logp=sampler.log()[token : token + 1])
        one = replace(one, ref_logp=reference[token : token + 1])
        settings = LossSettings(Aggregation.TOKEN_SUM, kl_coef=1.0, kl_estimator=name, kl_unbiased=True)
        loss = LOSSES["grpo"](one, settings).loss
        value += float(sampler[token] * loss.detach())
        grad += sampler[token] * torch.autograd.grad(loss, logits, retain_graph=True)[0]
    assert value == pytest.approx(exact.item(), abs=1e-12)
    assert torch.allclose(grad, wanted, atol=1e-12)


def test_the_kl_weight_follows_the_kl_within_its_bounds() -> None:
    control = KLControl(target=0.1, horizon=1000, floor=0.05, ceiling=0.3)
    assert control.next(0.1, kl=0.11, rollouts=64) > 0.1 > control.next(0.1, kl=0.09, rollouts=64)
    up = down = 0.1
    for _ in range(1000):
        up, down = control.next(up, 10.0, 64), control.next(down, 0.0, 64)
    assert (up, down) == (0.3, 0.05)
    assert KLControl().next(0.1, kl=1e9, rollouts=64) == 0.1, "without a target it is fixed"


# ------------------------------------------------------------------ value loss, bad input


def test_value_gradients_agree_with_differences_and_masked_values_have_none() -> None:
    mask = torch.tensor([True, True, False, True])
    old = torch.tensor([0.1, -0.4, math.nan, 0.2], dtype=torch.float64)
    returns = torch.tensor([1.0, -1.0, math.inf, 0.9], dtype=torch.float64)
    value = torch.tensor([0.5, -0.45, math.nan, 0.3], dtype=torch.float64, requires_grad=True)

    def loss_of(kept: torch.Tensor, clip: float | None) -> torch.Tensor:
        full = value.detach().masked_scatter(mask, kept)
        return value_loss(ValueLossInput(full, old, returns, mask, Denominators(3, 1, 8)), clip)[0]

    for clip in (0.2, None):
        assert torch.autograd.gradcheck(
            lambda kept, clip=clip: loss_of(kept, clip), (value.detach()[mask].requires_grad_(),)
        )
    loss, clipped = value_loss(ValueLossInput(value, old, returns, mask, Denominators(3, 1, 8)), 0.2)
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * (0.7**2 + 0.55**2 + 0.6**2) / 3)
    assert clipped == 1
    assert value.grad is not None
    assert value.grad[2] == 0
    assert value.grad[0] == 0, "beyond the clip and still too low: held"


def test_registries_name_every_algorithm_and_correction() -> None:
    assert {name for name in LOSSES if name.startswith("re")} == {"reinforce_pp", "reinforce_pp_baseline"}
    assert set(CORRECTIONS) >= NEEDS_PROX
    assert {settings.name for settings in CORRECTED.values()} == set(CORRECTIONS)


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: replace(TOKEN_MEAN, dual_clip=1.0), "rl.dual_clip"),
        (lambda: CorrectionSettings("mis", low=-1.0), "rl.correction_bounds"),
        (lambda: CorrectionSettings("mis", low=2.0, high=1.0), "rl.correction_bounds"),
        (lambda: CorrectionSettings("mis", veto=1.0), "rl.correction_veto"),
        (lambda: KLControl(target=0.0), "rl.kl_target"),
        (lambda: KLControl(target=1.0, horizon=0), "rl.kl_target"),
        (lambda: KLControl(floor=2.0, ceiling=1.0), None),
    ],
)
def test_bad_settings_name_the_key(build: Callable[[], object], key: str | None) -> None:
    """F05."""
    with pytest.raises(ConfigError) as caught:
        build()
    assert caught.value.key == key


def test_a_correction_without_its_log_probs_says_so() -> None:
    inp = replace(packed(extreme=False), prox_logp=None)
    with pytest.raises(ValueError, match="tis was given no prox_logp"):
        LOSSES["grpo"](inp, replace(TOKEN_MEAN, correction=CorrectionSettings("tis", high=2.0)))
    with pytest.raises(ValueError, match="opsm needs a bound"):
        LOSSES["grpo"](inp, replace(TOKEN_MEAN, correction=CorrectionSettings("opsm")))
