"""The two launches: x·W̃ᵀ and dy·W̃ of every expert's rows, bf16 operands, float32 sums."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import torch
from torch import Tensor

from tithe.errors import UserError
from tithe.quant.triton.bank import PublishedBank
from tithe.quant.triton.blocks import ROWS, RowBlocks

SUM = 64
"""Elements of a sum in a tile of the kernels. With more, some processors spill registers."""


def grouped_product(bank: PublishedBank, x: Tensor, blocks: RowBlocks, out: Tensor) -> None:
    """out [P, N] = x [P, K] · W̃ᵀ, rows by their block's expert; rows of no block are left alone.

    x is bf16, out float32 or bf16 (rounded once). A row's bits do not depend on the other rows. Returns before the
    device is done, allocates nothing; the first call for a shape tries the configurations, so make it outside of
    a CUDA graph. `ValueError` for tensors that do not fit or are not on a CUDA device, `UserError` without Triton.
    """
    _launch("product", bank, x, blocks, out, bank.columns, bank.rows)


def grouped_input_gradient(bank: PublishedBank, dy: Tensor, blocks: RowBlocks, out: Tensor) -> None:
    """out [P, K] = dy [P, N] · W̃, the gradient of the product's input; the rest as `grouped_product`."""
    _launch("input_gradient", bank, dy, blocks, out, bank.rows, bank.columns)


def _launch(name: str, bank: PublishedBank, x: Tensor, blocks: RowBlocks, out: Tensor, taken: int, given: int) -> None:
    _check(bank, x, blocks, out, taken, given)
    kernels = _kernels(x.device)
    if not len(blocks):
        return
    scale = bank.words if bank.scale is None else bank.scale
    operands = (x, x.stride(0), bank.words, scale, blocks.expert, blocks.start, blocks.stop, out, out.stride(0))
    told = {
        "N": bank.rows,
        "K": bank.columns,
        "EXPERT_WORDS": bank.words.stride(0),
        "EXPERT_SCALES": scale.stride(0),
        "GROUP": bank.group,
        "KIND": kernels.KINDS[bank.stored.kind],
        "WIDE": kernels.INTERPRETED,
        "ROWS": ROWS,
        "SUM": SUM,
    }
    if kernels.INTERPRETED:
        outputs = kernels.CONFIGS[0].kwargs["OUTPUTS"]
        getattr(kernels, name)[len(blocks), -(-given // outputs)](*operands, **told, OUTPUTS=outputs)
    else:
        tuned = getattr(kernels, f"tuned_{name}")
        tuned[lambda chosen: (len(blocks), -(-given // chosen["OUTPUTS"]))](*operands, **told)


def _check(bank: PublishedBank, x: Tensor, blocks: RowBlocks, out: Tensor, taken: int, given: int) -> None:
    if x.ndim != 2 or out.ndim != 2 or (x.shape[1], out.shape[1]) != (taken, given) or out.shape[0] != x.shape[0]:
        raise ValueError(f"rows {tuple(x.shape)} and out {tuple(out.shape)} do not fit a product {taken} → {given}")
    if x.dtype != torch.bfloat16 or out.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"the kernels take bf16 rows and give float32 or bf16, not {x.dtype} and {out.dtype}")
    if x.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("the elements of a row must be adjacent")
    devices = {x.device, out.device, bank.device, blocks.expert.device}
    if len(devices) != 1:
        raise ValueError(f"bank, rows, blocks and out lie on several devices: {sorted(map(str, devices))}")


def _kernels(device: torch.device) -> ModuleType:
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"the Triton kernels take tensors on a CUDA device, not {device}: use tithe.quant.grouped")
    try:
        kernels = importlib.import_module("tithe.quant.triton.kernels")  # optional, and takes a second to import
    except ModuleNotFoundError as error:
        raise UserError(f"4-bit experts on a GPU need Triton (pip install -e '.[gpu]'): {error}") from error
    return kernels
