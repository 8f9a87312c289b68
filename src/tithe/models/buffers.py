"""Fixed buffers that launches run on, and the launch that both passes share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tithe.models.decoder import Decoder
from tithe.models.kernels import rms_norm
from tithe.quant import Launch, kernel_threads

ROWS_PER_TASK = 8


class Scratch:
    """float32 scratch of every kernel thread."""

    def __init__(self, floats: int) -> None:
        self.floats = floats
        self.buffer = torch.empty(kernel_threads() * floats)

    @property
    def address(self) -> int:
        """Where it begins."""
        return self.buffer.data_ptr()


@dataclass(frozen=True, eq=False)
class RowBuffers:
    """Buffers of R rows. Operand buffers (xn, att, act, u) have the operand dtype, the others are float32."""

    x: Tensor
    xn: Tensor
    qkv: Tensor
    att: Tensor
    gate_up: Tensor
    act: Tensor
    position: Tensor
    sequence: Tensor
    table: Tensor
    lse: Tensor | None = None
    q_a: Tensor | None = None
    """Latent attention: normed queries in their bottleneck, operands; None without one, as `q`."""
    q: Tensor | None = None

    @staticmethod
    def allocate(decoder: Decoder, rows: int, sequences: int, pages_per_sequence: int, *, with_lse: bool) -> RowBuffers:
        """Fresh buffers; the block table is [sequences, pages_per_sequence]."""
        spec, operand = decoder.spec, decoder.options.operand_dtype
        latent = decoder.layers[0].latent
        bottleneck = latent.q_b if latent is not None else None
        return RowBuffers(
            x=torch.empty(rows, spec.hidden_size),
            xn=torch.empty(rows, spec.hidden_size, dtype=operand),
            qkv=torch.empty(rows, decoder.layers[0].qkv.rows),
            att=torch.empty(rows, decoder.layers[0].o.columns, dtype=operand),
            gate_up=torch.empty(rows, 2 * decoder.dense_width),
            act=torch.empty(rows, decoder.dense_width, dtype=operand),
            position=torch.zeros(rows, dtype=torch.int32),
            sequence=torch.zeros(rows, dtype=torch.int32),
            table=torch.zeros(sequences, pages_per_sequence, dtype=torch.int32),
            lse=torch.empty(rows, spec.n_heads) if with_lse else None,
            q_a=torch.empty(rows, bottleneck.columns, dtype=operand) if bottleneck is not None else None,
            q=torch.empty(rows, bottleneck.rows) if bottleneck is not None else None,
        )

    def inputs(self) -> dict[str, Tensor]:
        """The operand buffer each place reads."""
        inputs = {"qkv": self.xn, "o": self.att, "gate_up": self.xn, "down": self.act}
        return inputs if self.q_a is None else inputs | {"q_b": self.q_a}

    def outputs(self) -> dict[str, Tensor]:
        """The float32 buffer each place writes or adds to."""
        outputs = {"qkv": self.qkv, "o": self.x, "gate_up": self.gate_up, "down": self.x}
        return outputs if self.q is None else outputs | {"q_b": self.q}


def is_bf16(t: Tensor) -> int:
    """1 for a bf16 tensor, else 0: how kernels are told."""
    return int(t.dtype == torch.bfloat16)


def norm_step(x: Tensor, weight: Tensor, out: Tensor, eps: float, scratch: Scratch) -> Launch:
    """out = RMS norm of the rows of x."""
    rows, width = x.shape
    args = [x.data_ptr(), weight.data_ptr(), out.data_ptr(), width, float(eps), is_bf16(out), scratch.address]
    return rms_norm.bind(-(-rows // ROWS_PER_TASK), [*args, ROWS_PER_TASK, rows], (x, weight, out, scratch.buffer))
