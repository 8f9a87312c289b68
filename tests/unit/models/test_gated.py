"""Gate, up and activation in one launch have the bits of the separate launches, adapters and all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tithe.models.gated import can_gate, gated_launch
from tithe.models.kernels import swiglu as swiglu_kernel
from tithe.quant import HAS_BF16_DOT, PackedMatrix, kernel_threads, pack_dense
from tithe.quant.matrix import rider, set_riders

pytestmark = [
    pytest.mark.usefixtures("two_threads"),
    pytest.mark.skipif(not HAS_BF16_DOT, reason="needs a processor with a bf16 dot product"),
]


def swiglu(gate_up: Tensor, dtype: torch.dtype) -> Tensor:
    """silu(gate)·up of float32 rows [R, 2I] → [R, I] in the operand dtype, by the launch of its own."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    act, scratch = torch.empty(rows, width, dtype=dtype), torch.empty(kernel_threads(), width)
    args = [gate_up.data_ptr(), 0, width, act.data_ptr(), int(dtype == torch.bfloat16), scratch.data_ptr(), 8, rows]
    swiglu_kernel.bind(-(-rows // 8), args).run()
    return act


def bf16(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def separate(
    matrix: PackedMatrix, x: Tensor, low_rank: list[tuple[Tensor, PackedMatrix, int]]
) -> tuple[Tensor, Tensor]:
    """(gate_up float32, act) by a product, products added to it, and the activation."""
    gate_up = matrix.matmul(x)
    for u, b, start in low_rank:
        b.matmul(u, gate_up[:, start : start + b.rows], add=True, factor=0.5)
    return gate_up, swiglu(gate_up, torch.bfloat16)


@pytest.mark.parametrize("rows", [1, 7, 8, 64, 203])
@pytest.mark.parametrize("width", [48, 96, 480])
def test_one_launch_has_the_bits_of_three(rows: int, width: int) -> None:
    matrix, x = pack_dense(bf16(2 * width, 64) * 0.2), bf16(rows, 64, seed=1)
    u, b_gate, b_up = bf16(rows, 8, seed=2), pack_dense(bf16(width, 4, seed=3)), pack_dense(bf16(width, 4, seed=4))
    act, kept = torch.zeros(rows, width, dtype=torch.bfloat16), torch.zeros(rows, 2 * width, dtype=torch.bfloat16)
    launch = gated_launch(matrix, x, act, kept)
    sites = [(u[:, :4], b_gate, 0), (u[:, 4:], b_up, width)]
    riders = torch.tensor([rider(part, b, 0.5, start, start + width) for part, b, start in sites]).numpy()
    set_riders(launch, riders)
    launch.run()
    gate_up, expected = separate(matrix, x, sites)
    assert torch.equal(act, expected)
    assert torch.equal(kept, gate_up.bfloat16())
    set_riders(launch, None)
    launch.run()
    assert torch.equal(act, separate(matrix, x, [])[1])


def test_what_cannot_run_in_one_launch_is_told_apart() -> None:
    """A panel may not hold rows of both halves, and operands are bf16."""
    assert can_gate(pack_dense(bf16(96, 64)), torch.bfloat16)
    assert not can_gate(pack_dense(bf16(96, 64)), torch.float32)
    assert not can_gate(pack_dense(bf16(144, 64)), torch.bfloat16)
    assert not can_gate(pack_dense(torch.randn(96, 64), rounded=False), torch.bfloat16)
