"""KL estimators: orientation, expectation by enumeration, gradients, overflow."""

from __future__ import annotations

import math

import pytest
import torch

from tithe.losses import KL_ESTIMATORS, k1, k2, k3

P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
REF = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)


def exact_kl(p: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    return (p * (p.log() - ref.log())).sum()


def test_orientation() -> None:
    """C15: the policy comes first."""
    logp, ref = torch.tensor(-2.0, dtype=torch.float64), torch.tensor(-1.2, dtype=torch.float64)
    assert k1(logp, ref).item() == pytest.approx(-0.8)
    assert k2(logp, ref).item() == pytest.approx(0.32)
    assert k3(logp, ref).item() == pytest.approx(0.4255, abs=5e-5)
    assert k3(ref, logp).item() == pytest.approx(0.2493, abs=5e-5)


def test_expectation_is_the_kl() -> None:
    """C15: over all tokens, weighted by the policy."""
    assert exact_kl(P, REF).item() == pytest.approx(0.2180, abs=5e-5)
    for estimate in (k1, k3):
        assert (P * estimate(P.log(), REF.log())).sum().item() == pytest.approx(exact_kl(P, REF).item(), abs=1e-12)


def test_on_policy_gradients_are_those_the_table_names() -> None:
    def gradient(of: torch.Tensor, logits: torch.Tensor) -> list[float]:
        return torch.autograd.grad(of, logits, retain_graph=True)[0].tolist()

    logits = P.log().requires_grad_()
    logp = torch.log_softmax(logits, -1)
    p = logp.exp()
    sampled = {
        name: gradient((P * estimate(logp, REF.log())).sum(), logits) for name, estimate in KL_ESTIMATORS.items()
    }
    assert sampled["k1"] == pytest.approx([0, 0, 0], abs=1e-12)
    assert sampled["k2"] == pytest.approx(gradient(exact_kl(p, REF), logits), abs=1e-12)
    assert sampled["k3"] == pytest.approx(gradient(exact_kl(REF, p), logits), abs=1e-12)


@pytest.mark.parametrize("difference", [92.0, -92.0, 1e4, -1e4, 0.0])
@pytest.mark.parametrize("name", sorted(KL_ESTIMATORS))
def test_extreme_differences_stay_finite(name: str, difference: float) -> None:
    """C17, in FP32."""
    logp = torch.tensor([-3.0], requires_grad=True)
    value = KL_ESTIMATORS[name](logp, logp.detach() + difference)
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert logp.grad is not None
    assert torch.isfinite(logp.grad).all()


def test_k3_is_zero_at_equality_and_never_negative() -> None:
    logp = torch.linspace(-30, 0, 4001)
    assert (k3(logp, logp) == 0).all()
    assert (k3(logp, torch.full_like(logp, -1.0)) >= 0).all()
    assert k3(logp, logp + 1e-3).mean().item() == pytest.approx(math.expm1(1e-3) - 1e-3, rel=0.05)


def test_k3_always_pulls_towards_the_reference() -> None:
    """Up to the bound its gradient has the sign of log p - log p_ref; a symmetric bound would lose the lower side."""
    reference = torch.tensor(-40.0, dtype=torch.float64)
    logp = torch.linspace(-59, 0, 60, dtype=torch.float64).requires_grad_()
    k3(logp, reference).sum().backward()
    assert logp.grad is not None
    assert torch.equal(logp.grad.sign(), (logp.detach() - reference).sign())
