"""Grouped products on a GPU: Triton kernels over a bank of experts whose bytes stay as published.

`tithe.quant.grouped` is the same on a CPU. Importing this package does not import Triton (`pip install -e '.[gpu]'`).
"""

from tithe.quant.triton.bank import PublishedBank
from tithe.quant.triton.blocks import ROWS, RowBlocks
from tithe.quant.triton.launch import grouped_input_gradient, grouped_product

__all__ = ["ROWS", "PublishedBank", "RowBlocks", "grouped_input_gradient", "grouped_product"]
