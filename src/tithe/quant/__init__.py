"""Low-bit formats and their maths: exact references, packed storage, products and expansions with one W̃ each."""

from tithe.quant.bank import PackedBank, stack
from tithe.quant.matrix import PackedMatrix, pack_dense, set_threads, stay_serial
from tithe.quant.pack import pack_int4, pack_int8
from tithe.quant.runtime import HAS_AMX, HAS_BF16_DOT, Kernel, Launch, kernel, kernel_threads

__all__ = [
    "HAS_AMX",
    "HAS_BF16_DOT",
    "Kernel",
    "Launch",
    "PackedBank",
    "PackedMatrix",
    "kernel",
    "kernel_threads",
    "pack_dense",
    "pack_int4",
    "pack_int8",
    "set_threads",
    "stack",
    "stay_serial",
]
