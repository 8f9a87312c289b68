"""A whole expert block of a mixture layer over packed matrices (Qwen3-MoE routing).

Every expert multiplies only the rows routed to it; a row's results are combined in ascending expert id, so they do not
depend on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tithe.models.kernels import swiglu as swiglu_kernel
from tithe.quant import PackedMatrix, kernel_threads


@dataclass(frozen=True, eq=False)
class Experts:
    """Router [E, H] and per expert gate_up [2I, H] and down [H, I]."""

    router: PackedMatrix
    gate_up: tuple[PackedMatrix, ...]
    down: tuple[PackedMatrix, ...]
    per_token: int
    normalise: bool

    def storages(self) -> list[Tensor]:
        """The tensors that hold the block."""
        return [t for m in (self.router, *self.gate_up, *self.down) for t in m.storages()]

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Operand rows [R, H] → (expert ids int64 [R, k] ascending, weights float32 [R, k]); softmax in float32."""
        probabilities = self.router.matmul(x).softmax(-1)
        weights, ids = probabilities.topk(self.per_token, dim=-1)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        ids, order = ids.sort(dim=-1)
        return ids, weights.gather(-1, order)

    def forward(self, x: Tensor, out: Tensor) -> None:
        """out [R, H] float32 += the block's answer for operand rows x [R, H]."""
        ids, weights = self.route(x)
        for e in torch.unique(ids).tolist():
            rows, slot = (ids == e).nonzero(as_tuple=True)
            hidden = self.gate_up[e].matmul(x[rows])
            act = swiglu(hidden, x.dtype)
            out.index_add_(0, rows, self.down[e].matmul(act) * weights[rows, slot, None])


class ExpertStep:
    """The block on fixed buffers with a launch's face; `rows` of the buffers are used."""

    __slots__ = ("args", "experts", "out", "rows", "x")

    def __init__(self, experts: Experts, x: Tensor, out: Tensor) -> None:
        self.experts, self.x, self.out, self.rows, self.args = experts, x, out, x.shape[0], None

    def run(self) -> None:
        """out[:rows] += block(x[:rows])."""
        self.experts.forward(self.x[: self.rows], self.out[: self.rows])


def swiglu(gate_up: Tensor, dtype: torch.dtype) -> Tensor:
    """silu(gate)·up of float32 rows [R, 2I] → [R, I] in the operand dtype."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    act = torch.empty(rows, width, dtype=dtype)
    scratch = torch.empty(kernel_threads(), width)
    args = [gate_up.data_ptr(), 0, width, act.data_ptr(), int(dtype == torch.bfloat16), scratch.data_ptr(), 8, rows]
    swiglu_kernel.bind(-(-rows // 8), args).run()
    return act
