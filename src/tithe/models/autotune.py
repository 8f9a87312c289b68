"""`compute: auto` and `compute_dtype: auto`: about a second of products of the model's own shapes decides."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from tithe.arch import Checkpoint, TensorFormat
from tithe.models.options import ModelOptions
from tithe.quant import HAS_BF16_DOT, Launch, PackedMatrix, pack_dense, pack_int4, pack_int8

DECODE_ROWS, TRAIN_ROWS = 64, 256
_WORTH = 1.15
"""How much faster dequantized storage must be to be worth several times the memory."""


@dataclass(frozen=True)
class Tuning:
    """What was chosen, and the measured seconds per product pair (decode + training rows) by candidate."""

    options: ModelOptions
    seconds: dict[str, float]


def choose(
    checkpoint: Checkpoint,
    compute: Literal["auto", "packed", "dequantized"],
    compute_dtype: Literal["auto", "bf16", "fp32"],
    options: ModelOptions,
    budget_s: float = 1.0,
) -> Tuning:
    """Settle both settings; nothing is measured when neither is ``auto``.

    bf16 operands are a candidate only where the processor multiplies them (elsewhere they would be widened for every
    product) and the base is bf16. Packed is kept unless dequantized storage is clearly faster.
    """
    dtypes = [compute_dtype] if compute_dtype != "auto" else ["fp32"]
    if compute_dtype == "auto" and HAS_BF16_DOT and options.base_dtype == "bf16":
        dtypes = ["bf16", "fp32"]
    storages = [compute] if compute != "auto" else ["packed", "dequantized"]
    if len(dtypes) * len(storages) == 1:
        return Tuning(_with(options, storages[0], dtypes[0]), {})
    packed = _sample(checkpoint, options)
    matrices = {storage: packed if storage == "packed" else packed.dequantized() for storage in storages}
    seconds = _measure({f"{s}/{d}": (matrices[s], d) for d in dtypes for s in storages}, budget_s)
    best = min(dtypes, key=lambda d: min(seconds[f"{s}/{d}"] for s in storages))
    storage = storages[0]
    if len(storages) == 2 and seconds[f"packed/{best}"] > _WORTH * seconds[f"dequantized/{best}"]:
        storage = "dequantized"
    return Tuning(_with(options, storage, best), seconds)


def _with(options: ModelOptions, storage: str, dtype: str) -> ModelOptions:
    return replace(
        options,
        compute="packed" if storage == "packed" else "dequantized",
        compute_dtype="bf16" if dtype == "bf16" else "fp32",
    )


def _sample(checkpoint: Checkpoint, options: ModelOptions) -> PackedMatrix:
    """A random matrix of the MLP's shape in the checkpoint's own storage."""
    spec = checkpoint.spec
    width = spec.intermediate_size or spec.moe_intermediate_size
    rows, columns = min(2 * width, 8192), spec.hidden_size - spec.hidden_size % 32
    rng = np.random.default_rng(0)
    kind = checkpoint.tensors["model.layers.0.self_attn.o_proj.weight"].format
    if columns and (kind in (TensorFormat.Q4_0, TensorFormat.Q4_1) or options.quantize == "int4"):
        q = rng.integers(0, 16, (rows, columns), dtype=np.uint8)
        scale = np.full((rows, columns // 32), 0.01, np.float16)
        return pack_int4(q, scale, scale, rounded=options.rounded)
    if columns and (kind is TensorFormat.Q8_0 or options.quantize == "int8"):
        q8 = rng.integers(-127, 128, (rows, columns), dtype=np.int8)
        return pack_int8(q8, np.full((rows, columns // 32), 0.01, np.float16), rounded=options.rounded)
    return pack_dense(torch.randn(rows, max(columns, 2)), rounded=options.rounded)


def _measure(candidates: dict[str, tuple[PackedMatrix, str]], budget_s: float) -> dict[str, float]:
    """Seconds of each candidate's two products: in turn, and the least of all rounds, so that what else the
    machine does for a moment decides nothing."""
    launches = {name: _products(matrix, dtype) for name, (matrix, dtype) in candidates.items()}
    best = dict.fromkeys(candidates, math.inf)
    deadline, rounds = time.perf_counter() + budget_s, 0
    while rounds < 5 or time.perf_counter() < deadline:
        rounds += 1
        for name, products in launches.items():
            started = time.perf_counter()
            for product in products:
                product.run()
            best[name] = min(best[name], time.perf_counter() - started)
    return best


def _products(matrix: PackedMatrix, dtype: str) -> list[Launch]:
    operand = torch.bfloat16 if dtype == "bf16" else torch.float32
    inputs = [torch.randn(rows, matrix.columns).to(operand) for rows in (DECODE_ROWS, TRAIN_ROWS)]
    return [matrix.product(x, torch.empty(len(x), matrix.rows)) for x in inputs]
