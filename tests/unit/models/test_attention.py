"""Attention over pages against torch: any grouping of heads, any width, one row at a time or all at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from support.attention import Bench, int32, rows
from tithe.models.kernels import rms_norm, swiglu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 32, 64, 80, 128])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
def test_attention_is_torchs(group: int, dim: int, dtype: torch.dtype) -> None:
    bench = Bench(2 * group, 2, dim, dtype)
    n = 37
    position, sequence = torch.arange(n, dtype=torch.int32), torch.zeros(n, dtype=torch.int32)
    qkv = bench.finish(rows(n, bench.width, group), position, sequence)
    out, lse = bench.attend(qkv, position, sequence)
    q, k, v = bench.split(qkv)
    theirs = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1).reshape(n, -1)
    torch.testing.assert_close(out, theirs, rtol=0, atol=2e-6)
    scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * dim**-0.5
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1).T, rtol=1e-6, atol=2e-6)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (3, 80), (7, 16), (8, 128)])
def test_a_decoded_row_has_the_bits_of_the_prefilled_row(group: int, dim: int, dtype: torch.dtype) -> None:
    """One row at a time, while later slots still hold NaN, and beside rows of another sequence."""
    whole, stepwise = Bench(2 * group, 2, dim, dtype), Bench(2 * group, 2, dim, dtype)
    n = 37
    raw, other = rows(n, whole.width), rows(n, whole.width, seed=9)
    position = torch.arange(n, dtype=torch.int32)
    qkv = whole.finish(raw, position, torch.zeros_like(position))
    out, lse = whole.attend(qkv, position, torch.zeros_like(position))
    for i in range(n):
        both, at, of = torch.stack([other[i], raw[i]]), int32(i, i), int32(1, 0)
        finished = stepwise.finish(both, at, of)
        step_out, step_lse = stepwise.attend(finished, at, of)
        assert torch.equal(step_out[1], out[i]), i
        assert torch.equal(step_lse[1], lse[i]), i


def test_rotary_bias_and_head_norms_come_in_transformers_order() -> None:
    bench = Bench(4, 2, 16, torch.float32)
    n = 5
    raw, bias = rows(n, bench.width), rows(1, bench.width, seed=1)[0]
    q_norm, k_norm = 1 + rows(1, 16, seed=2)[0], 1 + rows(1, 16, seed=3)[0]
    position = int32(0, 3, 17, 30, 63)
    finished = bench.finish(raw, position, torch.zeros_like(position), bias, q_norm, k_norm)

    def rms(x: Tensor, weight: Tensor) -> Tensor:
        return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    heads = (raw + bias).reshape(n, 8, 16)
    expected = torch.cat([rms(heads[:, :4], q_norm), rms(heads[:, 4:6], k_norm), heads[:, 6:]], 1)
    cos, sin = (torch.cat([t, t], 1)[position.long()][:, None] for t in (bench.cos, bench.sin))
    rotated = torch.cat([-expected[:, :6, 8:], expected[:, :6, :8]], -1)
    expected[:, :6] = expected[:, :6] * cos + rotated * sin
    torch.testing.assert_close(finished, expected.reshape(n, -1), rtol=0, atol=2e-6)


def test_keys_and_values_land_in_their_own_slot_only() -> None:
    bench = Bench(2, 2, 16, torch.float32)
    qkv = bench.finish(rows(1, bench.width), int32(18), int32(1))
    page = 9  # sequence 1, positions 16..31
    assert torch.equal(bench.keys[page, :, :, 2].reshape(-1), qkv[0, 32:64])
    assert torch.equal(bench.values[page, :, 2].reshape(-1), qkv[0, 64:])
    assert int(torch.isnan(bench.keys).logical_not().sum()) == 32
    assert int(torch.isnan(bench.values).logical_not().sum()) == 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 60, 576])
def test_rms_norm_is_the_formula_and_rows_are_their_own(width: int, dtype: torch.dtype) -> None:
    x, weight, scratch = rows(13, width), 1 + rows(1, width, seed=1)[0], torch.empty(2, width)

    def normed(x: Tensor) -> Tensor:
        out = torch.empty(len(x), width, dtype=dtype)
        args = [x.data_ptr(), weight.data_ptr(), out.data_ptr(), width, 1e-5, int(dtype == torch.bfloat16)]
        rms_norm.bind(-(-len(x) // 8), [*args, scratch.data_ptr(), 8, len(x)]).run()
        return out

    exact = weight * x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(normed(x).double(), exact, rtol=4e-7 if dtype == torch.float32 else 2.0**-8, atol=1e-7)
    for i in range(13):
        assert torch.equal(normed(x[i : i + 1]), normed(x)[i : i + 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 40, 96])
def test_swiglu_is_the_formula_and_rows_are_their_own(width: int, dtype: torch.dtype) -> None:
    gate_up, bias, scratch = 3 * rows(11, 2 * width), rows(1, 2 * width, seed=1)[0], torch.empty(2, width)

    def activated(gate_up: Tensor) -> Tensor:
        out, gate_up = torch.empty(len(gate_up), width, dtype=dtype), gate_up.clone()  # the bias is added in place
        args = [gate_up.data_ptr(), bias.data_ptr(), width, out.data_ptr(), int(dtype == torch.bfloat16)]
        swiglu.bind(-(-len(gate_up) // 8), [*args, scratch.data_ptr(), 8, len(gate_up)]).run()
        return out

    gate, up = (gate_up + bias).double().split(width, 1)
    exact = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(
        activated(gate_up).double(), exact, rtol=1e-6 if dtype == torch.float32 else 2.0**-8, atol=1e-6
    )
    for i in range(11):
        assert torch.equal(activated(gate_up[i : i + 1]), activated(gate_up)[i : i + 1])
