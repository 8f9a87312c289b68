"""From residual rows to tokens, log-probs and their derivatives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from support.checkpoints import tokens
from support.decoders import BF16, FP32, WIDE, random_ids, tiny_decoder
from tithe.models.decoder import Decoder
from tithe.models.head import Draws, Head, score_with_gradient

MODES = {"bf16": BF16, "fp32": FP32, "wide": WIDE}
N = 53


@pytest.fixture(params=MODES)
def decoder(request: pytest.FixtureRequest, tmp_path: Path) -> Decoder:
    return tiny_decoder(tmp_path / "m", "llama", MODES[request.param])


@pytest.fixture
def exact(tmp_path: Path) -> Decoder:
    return tiny_decoder(tmp_path / "exact", "qwen2", FP32)


def residual(decoder: Decoder, n: int = N) -> Tensor:
    return torch.randn(n, decoder.spec.hidden_size, generator=torch.Generator().manual_seed(7))


def draws(n: int = N, *, temperature: float = 0.8, top_k: int = 0, top_p: float = 1.0) -> Draws:
    counters = np.stack([np.full(n, 3), np.arange(n), np.zeros(n), np.full(n, 11)], axis=1).astype(np.int64)
    ones = np.ones(n)
    return Draws(ones * temperature, np.full(n, top_k), ones * top_p, np.zeros(n), counters)


def rows_of(d: Draws, rows: np.ndarray) -> Draws:
    return Draws(d.temperature[rows], d.top_k[rows], d.top_p[rows], d.min_p[rows], d.counters[rows])


def test_logits_are_the_normed_rows_times_the_head(exact: Decoder) -> None:
    x, head = residual(exact), Head(exact)
    weight, norm = exact.head.expand(torch.float32).double(), exact.final_norm.double()
    normed = norm * x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + exact.spec.rms_norm_eps)
    torch.testing.assert_close(head.logits(head.normed(x)).double(), normed @ weight.T, rtol=0, atol=1e-5)


def test_only_tokens_of_the_tokenizer_are_sampled(decoder: Decoder) -> None:
    """Case D25 through the whole path: 116 tokens, 128 rows in the file."""
    assert (decoder.n_tokens, decoder.head.rows) == (len(tokens()), 128)
    drawn = Head(decoder).sample(residual(decoder, 400), draws(400, temperature=50.0))
    assert drawn.token.max() == decoder.n_tokens - 1, "the last one is among 400 nearly uniform ones"
    assert np.isfinite(drawn.logp).all()


@pytest.mark.parametrize("limits", [{}, {"top_k": 5, "top_p": 0.9}, {"temperature": 0.0}])
def test_a_row_is_drawn_the_same_in_any_batch_and_any_chunk(decoder: Decoder, limits: dict[str, float]) -> None:
    x, d = residual(decoder), draws(**limits)
    whole = Head(decoder).sample(x, d)
    small = Head(decoder, chunk_rows=8).sample(x, d)
    order = np.random.default_rng(0).permutation(N)[:20]
    some = Head(decoder).sample(x[torch.from_numpy(order)], rows_of(d, order))
    for name in ("token", "logp", "logp_behaviour"):
        np.testing.assert_array_equal(getattr(small, name), getattr(whole, name))
        np.testing.assert_array_equal(getattr(some, name), getattr(whole, name)[order])


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_scores_are_the_samplers_numbers_bit_for_bit(decoder: Decoder, temperature: float) -> None:
    x = residual(decoder)
    drawn = Head(decoder).sample(x, draws(temperature=temperature, top_p=0.95))
    given = np.full(N, temperature, np.float32)
    for chunk in (7, 128):
        logp, entropy = Head(decoder, chunk).score(x, drawn.token, given)
        scored = score_with_gradient(Head(decoder, chunk), x, drawn.token, given, entropy_gradient=True)
        np.testing.assert_array_equal(logp, drawn.logp)
        np.testing.assert_array_equal(scored.logp, drawn.logp)
        np.testing.assert_array_equal(scored.entropy, entropy)


def test_greedy_is_scored_at_temperature_one(decoder: Decoder) -> None:
    x = residual(decoder)
    drawn = Head(decoder).sample(x, draws(temperature=0.0))
    logp, _ = Head(decoder).score(x, drawn.token, np.zeros(N, np.float32))
    np.testing.assert_array_equal(logp, drawn.logp)
    logits = Head(decoder).logits(Head(decoder).normed(x))[:, : decoder.n_tokens]
    np.testing.assert_array_equal(drawn.token, logits.argmax(-1).numpy())


def autograd(decoder: Decoder, normed: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """∂logp/∂normed and ∂entropy/∂normed by torch in float64."""
    weight = decoder.head.expand(torch.float32).double()[: decoder.n_tokens]
    h = normed.double().requires_grad_()
    logp = (h @ weight.T / temperature.double()[:, None]).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum()
    (d_entropy,) = torch.autograd.grad(entropy, h, retain_graph=True)
    (d_logp,) = torch.autograd.grad(logp.gather(1, targets[:, None]).sum(), h)
    return d_logp, d_entropy


@pytest.mark.parametrize("chunk", [16, 128])
def test_derivatives_are_autograds(exact: Decoder, chunk: int) -> None:
    x, targets = residual(exact), torch.from_numpy(random_ids(N)).long()
    temperature = torch.linspace(0.5, 1.5, N)
    scored = score_with_gradient(Head(exact, chunk), x, targets.numpy(), temperature.numpy(), entropy_gradient=True)
    d_logp, d_entropy = autograd(exact, Head(exact).normed(x), targets, temperature)
    torch.testing.assert_close(scored.d_logp.double(), d_logp, rtol=0, atol=1e-5)
    assert scored.d_entropy is not None
    torch.testing.assert_close(scored.d_entropy.double(), d_entropy, rtol=0, atol=1e-5)
    assert d_logp.abs().max() > 0.1
    assert d_entropy.abs().max() > 0.1


def test_bf16_derivatives_are_near_autograds(tmp_path: Path) -> None:
    decoder = tiny_decoder(tmp_path / "m", "llama", BF16)
    x, targets = residual(decoder), torch.from_numpy(random_ids(N)).long()
    temperature = torch.ones(N)
    scored = score_with_gradient(Head(decoder), x, targets.numpy(), temperature.numpy(), entropy_gradient=True)
    d_logp, d_entropy = autograd(decoder, Head(decoder).normed(x).float(), targets, temperature)
    assert scored.d_entropy is not None
    for mine, theirs in ((scored.d_logp, d_logp), (scored.d_entropy, d_entropy)):
        assert (mine.double() - theirs).norm() < 0.01 * theirs.norm()


def test_entropy_earns_no_derivative_unless_asked(exact: Decoder) -> None:
    one = np.ones(N, np.float32)
    scored = score_with_gradient(Head(exact), residual(exact), random_ids(N), one, entropy_gradient=False)
    assert scored.d_entropy is None


def test_more_rows_than_a_chunk_are_refused_by_logits(exact: Decoder) -> None:
    head = Head(exact, chunk_rows=8)
    with pytest.raises(ValueError, match="out has shape"):
        head.logits(torch.zeros(9, exact.spec.hidden_size))
