"""Attention kernels on pages of their own for tests, and the same by torch.

bench = Bench(heads=4, kv_heads=2, dim=32, dtype=torch.float32, window=17)
qkv = bench.finish(rows(n, bench.width), position, sequence)     # keys and values lie in pages now
out, lse = bench.attend(qkv, position, sequence)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tithe.models.attention_gradients import BACKWARD_ROWS, attention_backward
from tithe.models.attention_kernels import attention, finish_qkv

PAGES, TABLE = 12, 4
LONGEST = TABLE * 16
EPS = 1e-6


def rows(n: int, width: int, seed: int = 0) -> Tensor:
    """Normal float32 [n, width]."""
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


def int32(*values: int) -> Tensor:
    """An int32 vector."""
    return torch.tensor(values, dtype=torch.int32)


@dataclass
class Bench:
    """Heads, pages and a block table of two sequences; pages begin full of NaN, so that a stale slot would show."""

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    window: int = 0
    sinks: Tensor | None = None
    rotary_dim: int = 0
    """0: the whole head."""

    def __post_init__(self) -> None:
        layers = 3  # this one is the second
        self.keys = torch.full((PAGES, layers, self.kv_heads, self.dim, 16), float("nan"), dtype=self.dtype)[:, 1]
        self.values = torch.full((PAGES, layers, self.kv_heads, 16, self.dim), float("nan"), dtype=self.dtype)[:, 1]
        self.blocks = layers * self.kv_heads
        self.table = torch.tensor([[7, 2, 11, 5], [0, 9, 1, 4]], dtype=torch.int32)
        self.half = (self.rotary_dim or self.dim) // 2
        angles = torch.arange(LONGEST)[:, None] * 0.7 ** torch.arange(self.half)[None]
        self.cos, self.sin = angles.cos().contiguous(), angles.sin().contiguous()
        self.scratch = torch.empty(2, self.group * (LONGEST + self.dim))

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.heads // self.kv_heads

    @property
    def width(self) -> int:
        """Columns of qkv."""
        return (self.heads + 2 * self.kv_heads) * self.dim

    def finish(
        self,
        qkv: Tensor,
        position: Tensor,
        sequence: Tensor,
        bias: Tensor | None = None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        *,
        whole: bool = False,
    ) -> Tensor:
        """qkv after bias, norms and rotary (a copy); keys and values go to their pages."""
        qkv = qkv.clone()
        optional = [t.data_ptr() if t is not None else 0 for t in (bias, q_norm, k_norm)]
        args = [qkv.data_ptr(), self.width, self.heads, self.kv_heads, self.dim, *optional, EPS]
        args += [t.data_ptr() for t in (self.cos, self.sin, position, sequence, self.table)]
        args += [TABLE, self.keys.data_ptr(), self.values.data_ptr(), int(self.dtype == torch.bfloat16)]
        finish_qkv.bind(-(-len(qkv) // 16), [*args, len(qkv), self.blocks, self.half, int(whole)]).run()
        return qkv

    def attend(self, qkv: Tensor, position: Tensor, sequence: Tensor) -> tuple[Tensor, Tensor]:
        """(float32 output [R, Hq·D], log-sum-exp [R, Hq]) of finished rows."""
        out, lse = torch.empty(len(qkv), self.heads * self.dim), torch.empty(len(qkv), self.heads)
        args = [qkv.data_ptr(), self.width, self.heads, self.kv_heads, self.dim]
        args += [self.keys.data_ptr(), self.values.data_ptr(), int(self.dtype == torch.bfloat16)]
        args += [self.table.data_ptr(), TABLE, sequence.data_ptr(), position.data_ptr(), out.data_ptr(), 0]
        tail = [self.scratch.data_ptr(), self.scratch.shape[1], LONGEST, self.blocks, self.window]
        tail.append(self.sinks.data_ptr() if self.sinks is not None else 0)
        attention.bind(len(qkv), [*args, lse.data_ptr(), self.dim**-0.5, *tail]).run()
        return out, lse

    def backward(self, qkv: Tensor, d_out: Tensor, lse: Tensor, *, first: int = 0) -> tuple[Tensor, Tensor]:
        """(dq [R, Hq·D], dkv [Hkv, 2, longest, D]) of rows at positions first, first + 1, … of sequence 0."""
        n = len(qkv)
        dq, dkv = torch.empty(n, self.heads * self.dim), torch.zeros(self.kv_heads, 2, LONGEST, self.dim)
        keys, values = (t.nan_to_num().transpose(-1, -2).contiguous() for t in (self.keys, self.values))
        scratch = torch.empty(2, 2 * BACKWARD_ROWS * self.group * (self.dim + LONGEST))
        segment = [int32(0), int32(n), int32(first)]
        args = [qkv.data_ptr(), self.width, self.heads, self.kv_heads, self.dim, d_out.data_ptr()]
        args += [self.keys.data_ptr(), keys.data_ptr(), values.data_ptr(), int(self.dtype == torch.bfloat16)]
        args += [self.table.data_ptr(), TABLE, *(t.data_ptr() for t in segment), lse.data_ptr(), self.dim**-0.5]
        args += [dq.data_ptr(), dkv.data_ptr(), LONGEST, scratch.data_ptr(), scratch.shape[1], self.blocks, self.window]
        attention_backward.bind(self.kv_heads, args).run()
        return dq, dkv

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [Hq, R, D], k and v [Hkv, R, D]; k and v as the pages hold them."""
        heads = qkv.reshape(len(qkv), -1, self.dim).transpose(0, 1)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads])
        return q, k.to(self.dtype).float(), v.to(self.dtype).float()

    def reference(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(output [R, Hq·D], log-sum-exp [R, Hq]) of the last R of the positions of k and v, by torch."""
        k, v = k.repeat_interleave(self.group, 0), v.repeat_interleave(self.group, 0)
        scores = q @ k.transpose(1, 2) * self.dim**-0.5
        scores = scores.masked_fill(~causal(q.shape[1], k.shape[1], self.window), -torch.inf)
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks[:, None, None].expand(-1, q.shape[1], 1)], -1)
        lse = scores.logsumexp(-1)
        out = (scores - lse[..., None]).exp()[..., : k.shape[1]] @ v
        return out.transpose(0, 1).reshape(q.shape[1], -1), lse.T


def causal(n: int, positions: int, window: int = 0) -> Tensor:
    """bool [n, positions]: what the last n of the positions see."""
    at, other = torch.arange(positions - n, positions)[:, None], torch.arange(positions)[None]
    seen = other <= at
    return seen & (other > at - window) if window else seen
