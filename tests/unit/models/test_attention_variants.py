"""Windows, sinks, partial rotary and norms over whole projections, against torch; gradients against autograd."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from support.attention import EPS, LONGEST, Bench, int32, rows

WINDOWS = (1, 15, 16, 17, 33, 64)
"""At, before and behind the borders of pages."""
EXTREMES = (0.3, 1e4, -1e4, 80.0, -2.9e38)


def sinks(heads: int) -> Tensor:
    return torch.tensor(list(itertools.islice(itertools.cycle(EXTREMES), heads)))


def prefilled(bench: Bench, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(finished rows at positions 0..n-1 of sequence 0, positions)."""
    position = torch.arange(n, dtype=torch.int32)
    return bench.finish(rows(n, bench.width, seed), position, torch.zeros_like(position)), position


def hide_left_pages(bench: Bench, position: int) -> Bench:
    """A bench on the same pages whose table knows only those that the window at a position touches; the rest is NaN."""
    hidden = Bench(bench.heads, bench.kv_heads, bench.dim, bench.dtype, bench.window, bench.sinks)
    hidden.keys, hidden.values, hidden.table = bench.keys, bench.values, bench.table.clone()
    hidden.table[0, : max(0, position + 1 - bench.window) // 16] = 9  # sequence 1's own page: full of NaN
    return hidden


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_window_is_torchs_mask(window: int, group: int, dtype: torch.dtype) -> None:
    bench = Bench(2 * group, 2, 32, dtype, window)
    qkv, position = prefilled(bench, LONGEST, seed=window)
    out, lse = bench.attend(qkv, position, torch.zeros_like(position))
    theirs, their_lse = bench.reference(*bench.split(qkv))
    torch.testing.assert_close(out, theirs, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse, their_lse, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("window", WINDOWS)
def test_only_pages_within_the_window_are_read(window: int) -> None:
    """The forward row by row, with pages of NaN in place of those left of the window."""
    bench = Bench(4, 2, 32, torch.bfloat16, window)
    qkv, position = prefilled(bench, LONGEST)
    out, lse = bench.attend(qkv, position, torch.zeros_like(position))
    for i in range(LONGEST):
        alone = hide_left_pages(bench, i)
        mine, my_lse = alone.attend(qkv[i : i + 1].contiguous(), int32(i), int32(0))
        assert torch.equal(mine[0], out[i]), i
        assert torch.equal(my_lse[0], lse[i]), i


def test_a_window_as_wide_as_the_context_changes_no_bit() -> None:
    everything, wide = Bench(4, 2, 32, torch.float32), Bench(4, 2, 32, torch.float32, LONGEST)
    at = torch.zeros(LONGEST, dtype=torch.int32)
    answers = []
    for bench in (everything, wide):
        qkv, position = prefilled(bench, LONGEST)
        answers.append(bench.attend(qkv, position, at))
    assert torch.equal(answers[0][0], answers[1][0])
    assert torch.equal(answers[0][1], answers[1][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 17])
def test_sinks_are_one_more_logit(window: int, dtype: torch.dtype) -> None:
    bench = Bench(10, 2, 32, dtype, window, sinks(10))
    qkv, position = prefilled(bench, 40)
    out, lse = bench.attend(qkv, position, torch.zeros_like(position))
    theirs, their_lse = bench.reference(*bench.split(qkv))
    torch.testing.assert_close(out, theirs, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse, their_lse, rtol=1e-6, atol=2e-6)
    by_head = out.reshape(40, 10, 32)
    assert not by_head[:, 1].any(), "a large sink takes everything"
    unsunk = Bench(10, 2, 32, dtype, window)
    unsunk.keys, unsunk.values = bench.keys, bench.values
    plain = unsunk.attend(qkv, position, torch.zeros_like(position))[0].reshape(40, 10, 32)
    for nothing in (2, 4):
        assert torch.equal(by_head[:, nothing], plain[:, nothing]), "a very negative one nothing"


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 1, 16, 17])
def test_a_decoded_row_has_the_bits_of_the_prefilled_row(window: int, dtype: torch.dtype) -> None:
    """One row at a time, while later slots still hold NaN, and beside rows of another sequence."""
    whole = Bench(6, 2, 32, dtype, window, sinks(6), rotary_dim=16)
    stepwise = Bench(6, 2, 32, dtype, window, sinks(6), rotary_dim=16)
    n = 37
    raw, other = rows(n, whole.width), rows(n, whole.width, seed=9)
    norms = (1 + rows(1, 192, seed=2)[0], 1 + rows(1, 64, seed=3)[0])
    position = torch.arange(n, dtype=torch.int32)
    qkv = whole.finish(raw, position, torch.zeros_like(position), None, *norms, whole=True)
    out, lse = whole.attend(qkv, position, torch.zeros_like(position))
    for i in range(n):
        both, at, of = torch.stack([other[i], raw[i]]), int32(i, i), int32(1, 0)
        finished = stepwise.finish(both, at, of, None, *norms, whole=True)
        step_out, step_lse = stepwise.attend(finished, at, of)
        assert torch.equal(step_out[1], out[i]), i
        assert torch.equal(step_lse[1], lse[i]), i


@pytest.mark.parametrize("rotary_dim", [8, 16, 24])
@pytest.mark.parametrize("whole", [False, True])
def test_partial_rotary_and_norms_over_everything(rotary_dim: int, whole: bool) -> None:
    """MiniMax-M2 has both; GLM-4.5 norms each head."""
    bench = Bench(4, 2, 32, torch.float32, rotary_dim=rotary_dim)
    n, half = 5, rotary_dim // 2
    raw, bias, position = rows(n, bench.width), rows(1, bench.width, seed=1)[0], int32(0, 3, 17, 30, 63)
    weights = [1 + rows(1, w * 32 if whole else 32, seed=w)[0] for w in (4, 2)]
    finished = bench.finish(raw, position, torch.zeros_like(position), bias, *weights, whole=whole)

    def rms(x: Tensor, weight: Tensor) -> Tensor:
        shaped = x.flatten(1) if whole else x
        return (weight * shaped * torch.rsqrt(shaped.pow(2).mean(-1, keepdim=True) + EPS)).reshape(x.shape)

    heads = (raw + bias).reshape(n, 8, 32)
    expected = torch.cat([rms(heads[:, :4], weights[0]), rms(heads[:, 4:6], weights[1]), heads[:, 6:]], 1)
    cos, sin = (t[position.long()][:, None] for t in (bench.cos, bench.sin))
    low, high = expected[:, :6, :half].clone(), expected[:, :6, half:rotary_dim].clone()
    expected[:, :6, :half] = low * cos - high * sin
    expected[:, :6, half:rotary_dim] = high * cos + low * sin
    torch.testing.assert_close(finished, expected.reshape(n, -1), rtol=0, atol=3e-6)


@pytest.mark.parametrize("first", [0, 13, 30])
@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("window", [0, *WINDOWS])
def test_gradients_are_autograds(window: int, sunk: bool, first: int) -> None:
    """Rows from position `first` on: what lies before is read, and gets gradients, too."""
    bench = Bench(6, 2, 32, torch.float32, window, torch.tensor([0.3, -2.0, 4.0, 80.0, -1e4, 1.0]) if sunk else None)
    n = LONGEST
    qkv, position = prefilled(bench, n, seed=3)
    lse = bench.attend(qkv, position, torch.zeros_like(position))[1]
    d_out = rows(n - first, 6 * 32, seed=4)
    dq, dkv = bench.backward(qkv[first:].contiguous(), d_out, lse[first:].contiguous(), first=first)
    q, k, v = (t.clone().requires_grad_() for t in bench.split(qkv))
    out, _ = bench.reference(q[:, first:], k, v)
    theirs = torch.autograd.grad(out, (q, k, v), d_out)
    scale = max(float(t.abs().max()) for t in theirs)
    mine = (dq.reshape(-1, 6, 32).transpose(0, 1), dkv[:, 0], dkv[:, 1])
    for a, b in zip(mine, (theirs[0][:, first:], *theirs[1:]), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6 * scale)
