"""How a base is held and multiplied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from tithe.quant import HAS_AMX, HAS_BF16_DOT


@dataclass(frozen=True)
class ModelOptions:
    """`compute`: packed keeps the file's bits, dequantized one BF16 (FP32) copy of the same W̃. `base_dtype`: what W̃ is
    rounded to. `compute_dtype`: the operands of the products; fp32 operands with a bf16 base widen W̃, they do not
    change it. `quantize` packs unquantized linears on load (int4 or int8, groups of 32). `max_context` bounds
    positions, in tokens.
    """

    compute: Literal["packed", "dequantized"] = "packed"
    base_dtype: Literal["bf16", "fp32"] = "bf16"
    compute_dtype: Literal["bf16", "fp32"] = "bf16"
    quantize: Literal["none", "int4", "int8"] = "none"
    max_context: int = 2048

    @property
    def rounded(self) -> bool:
        """True when W̃ is rounded to bf16."""
        return self.base_dtype == "bf16"

    @property
    def operand_dtype(self) -> torch.dtype:
        """dtype of activations that enter a product, of cached keys and values, and of published adapters."""
        return torch.bfloat16 if self.compute_dtype == "bf16" else torch.float32

    @property
    def numeric_mode(self) -> str:
        """The name under which an adapter's numbers are valid. Packed and dequantized storage share W̃ and every bit
        of the product, so they share a mode; the product kernel is part of it, because its rounding order is."""
        dot = "amx" if HAS_AMX else "dot"
        product = dot if self.compute_dtype == "bf16" and HAS_BF16_DOT else "fma"
        return f"base={self.base_dtype};compute={self.compute_dtype};product={product};attention=page16"
