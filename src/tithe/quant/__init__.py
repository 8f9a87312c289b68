"""Low-bit formats and their maths: exact references, packed storage, products and expansions with one W̃ each."""

from tithe.quant.matrix import PackedMatrix, launch_matmul, pack_dense, pack_int4, pack_int8, set_threads

__all__ = ["PackedMatrix", "launch_matmul", "pack_dense", "pack_int4", "pack_int8", "set_threads"]
