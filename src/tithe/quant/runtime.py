"""Kernels compiled by Numba that run inside torch's own OpenMP pool.

Two thread pools on a small machine fight: while torch's idle workers spin, a second pool's workers are
scheduled away for milliseconds at a time. So a kernel here is a C function compiled by Numba (no compiler at
install), and `Launch.run` hands it to the `GOMP_parallel` of the very libgomp that torch loaded: one pool, no
oversubscription. Work is split by an atomic counter in the argument block, hence the same kernel is right on one thread
too, which is what happens where no libgomp is found.

An argument block is an int64 array: slot 0 is the work counter, slot 1 the number of tasks, slot 2 the next free
scratch slot (one per thread that joined), the rest pointers and sizes. Every task must write only its own output, so
results never depend on the number of threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import math
import os
import platform
import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# The switch that makes torch behave like a processor without AVX-512 must bind these kernels too.
if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":
    os.environ.setdefault("NUMBA_CPU_NAME", "haswell")
    os.environ.setdefault("NUMBA_CPU_FEATURES", "")

from llvmlite import binding, ir

# Processors with bf16 products keep their clock with 512-bit vectors, but LLVM still prefers 256 bits on some, at the
# cost of a tenth to a third of the time of what is no product. Lanes are independent: no bit of a result depends on it.
if binding.get_host_cpu_features().get("avx512bf16", False):
    os.environ.setdefault("NUMBA_CPU_FEATURES", binding.get_host_cpu_features().flatten() + ",-prefer-256-bit")

from numba import njit, types
from numba.core import cgutils
from numba.core.bytecode import FunctionIdentity
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.typing import signature
from numba.extending import intrinsic as numba_intrinsic

# A kernel on disk brings the functions it calls along, and the linker takes the first of equal names. Numba tells apart
# the closures of one factory by a number alone that every process counts up from 1, so kernels that two processes
# compiled could call each other's closures. Each process counts from a place of its own.
FunctionIdentity._unique_ids = itertools.count(secrets.randbits(48))  # noqa: SLF001 - there is no other way

_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")

COUNTER, TASKS, SLOT, FIRST = 0, 1, 2, 3
_ARGUMENTS, _RESULT = (types.CPointer(types.int64),), types.void


def _gomp_parallel() -> Any | None:
    """`GOMP_parallel` of the libgomp already mapped into this process, or None (then kernels run serially)."""
    try:
        with Path("/proc/self/maps").open() as maps:
            paths = {line.split(maxsplit=5)[5].strip() for line in maps if "libgomp" in line}
    except OSError:
        return None
    for path in sorted(paths):
        entry = ctypes.CDLL(path).GOMP_parallel
        entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        entry.restype = None
        return entry
    return None


class _Pool:
    """Where launches run; the process's one compute setting, as `torch.set_num_threads` is torch's."""

    threads = 1
    parallel: Any | None = None
    owner = 0


_pool = _Pool()


def set_kernel_threads(n: int) -> None:
    """Number of OpenMP threads of every later launch of this thread; another thread's run on one, without a team.

    Call after torch is imported, with torch's own number.
    """
    _pool.threads = max(1, n)
    _pool.parallel = _gomp_parallel()
    _pool.owner = threading.get_ident()


def kernel_threads() -> int:
    """Threads of every launch: kernels need scratch for as many."""
    return _pool.threads


def _host_features() -> frozenset[str]:
    if os.environ.get("NUMBA_CPU_NAME", "") not in ("", binding.get_host_cpu_name()):
        return frozenset()
    return frozenset(name for name, present in binding.get_host_cpu_features().items() if present)


HAS_AVX512: bool = "avx512f" in _host_features()
HAS_BF16_DOT: bool = HAS_AVX512 and "avx512bf16" in _host_features()


def _may_use_amx() -> bool:
    """Whether there are matrix registers for bf16, and Linux lets this process have them (they must be asked for)."""
    if not (HAS_BF16_DOT and {"amx-tile", "amx-bf16"} <= _host_features()):
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18  # asm/prctl.h, asm/fpu/types.h
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


HAS_AMX: bool = _may_use_amx()


class Launch:
    """A kernel with its argument block, ready to run any number of times. Keeps alive the tensors it points to."""

    __slots__ = ("_address", "args", "keep", "of")

    def __init__(self, of: Kernel, args: np.ndarray, keep: Any = None) -> None:
        self.args = args
        self.keep = keep
        self.of = of
        self._address: int = args.ctypes.data

    def run(self) -> None:
        """Run all tasks and return; the GIL is released meanwhile."""
        args = self.args
        args[COUNTER] = 0
        args[SLOT] = 0
        parallel = _pool.parallel
        if parallel is None or _pool.threads == 1 or args[TASKS] == 1 or _pool.owner != threading.get_ident():
            self.of.serial(self._address)
        else:
            parallel(self.of.address, self._address, _pool.threads, 0)


def sources_digest(*folders: Path) -> str:
    """sha256 over every source file of the folders that kernels are made of."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.glob("*.py")):
            source = path.read_bytes()
            if b"numba" in source or b"@kernel" in source:
                digest.update(source)
    return digest.hexdigest()


class _KernelCache(FunctionCache):
    """Numba's cache on disk, keyed by all sources of kernels together.

    A compiled kernel contains what it calls in other files, but Numba looks at the kernel's own file only.
    """

    digest = sources_digest(Path(__file__).parent, Path(__file__).parents[1] / "models")

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (*super()._index_key(sig, codegen), self.digest)


class _CachedFunction(CFunc):
    _pyfunc: Any

    def enable_caching(self) -> None:
        self._cache = _KernelCache(self._pyfunc)


class Kernel:
    """One compiled kernel: a C function of an argument block. `carries_riders`: see `tithe.quant.product.ride`."""

    def __init__(self, body: Callable[..., None], *, carries_riders: bool = False) -> None:
        self.carries_riders = carries_riders
        self._compiled: Any = _CachedFunction(body, (_ARGUMENTS, _RESULT), {}, {"error_model": "numpy"})
        self._compiled.enable_caching()
        self._compiled.compile()
        self.address: int = self._compiled.address
        self.serial = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)

    def bind(self, tasks: int, values: Sequence[int | float], keep: Any = None) -> Launch:
        """A launch with `tasks` tasks and these arguments; `keep` holds references to the tensors behind addresses."""
        return Launch(self, block(tasks, values), keep)


def kernel(body: Callable[..., None]) -> Kernel:
    """Compile `body(args: int64*)` as a kernel."""
    return Kernel(body)


def carrier(body: Callable[..., None]) -> Kernel:
    """Compile a product whose arguments 21 and 22 are riders: their address and number."""
    return Kernel(body, carries_riders=True)


def block(tasks: int, values: Sequence[int | float]) -> np.ndarray:
    """An argument block; floats travel as their float64 bits (read them with `as_float`)."""
    args = np.empty(FIRST + len(values), np.int64)
    args[COUNTER], args[TASKS], args[SLOT] = 0, tasks, 0
    for i, value in enumerate(values):
        if isinstance(value, float):
            args[FIRST + i] = np.float64(value).view(np.int64)
        else:
            args[FIRST + i] = value
    return args


# ---------------------------------------------------------------- intrinsics: pointers, bits, atomics


def intrinsic(define: Callable[..., Any]) -> Any:
    """Numba's `intrinsic`; to a type checker anything, because callers leave out the typing context."""
    return numba_intrinsic(define)


def _fetch_add(slot: int) -> Any:
    @intrinsic
    def take(typingctx: Any, args: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            place = builder.gep(values[0], [ir.Constant(ir.IntType(64), slot)])
            return builder.atomic_rmw("add", place, ir.Constant(ir.IntType(64), 1), "monotonic")

        return signature(types.int64, args), codegen

    return take


next_task = _fetch_add(COUNTER)  # the next task number
next_slot = _fetch_add(SLOT)  # a scratch slot of this thread, below the number of threads


def _pointer_cast(element: types.Type) -> Any:
    @intrinsic
    def cast(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], context.get_value_type(types.CPointer(element)))

        return signature(types.CPointer(element), types.int64), codegen

    return cast


f32p = _pointer_cast(types.float32)
u32p = _pointer_cast(types.uint32)
u16p = _pointer_cast(types.uint16)
u8p = _pointer_cast(types.uint8)
i8p = _pointer_cast(types.int8)
i32p = _pointer_cast(types.int32)
i64p = _pointer_cast(types.int64)


def _bitcast(source: types.Type, target: types.Type) -> Any:
    @intrinsic
    def cast(typingctx: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            return builder.bitcast(values[0], context.get_value_type(target))

        return signature(target, source), codegen

    return cast


@intrinsic
def f16_to_f32(typingctx: Any, bits: Any) -> Any:
    """The float32 with the same value as the IEEE half bits (uint16)."""

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        return builder.fpext(builder.bitcast(values[0], ir.HalfType()), ir.FloatType())

    return signature(types.float32, types.uint16), codegen


bits_to_f32 = _bitcast(types.uint32, types.float32)
f32_to_bits = _bitcast(types.float32, types.uint32)
as_float = _bitcast(types.int64, types.float64)


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """Fused multiply-add in float32, one rounding, never split: the same in scalar and vector code."""

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        return builder.fma(*values)

    return signature(types.float32, types.float32, types.float32, types.float32), codegen


@intrinsic
def stack_f32(typingctx: Any, n: Any) -> Any:
    """A float32 scratch array of a literal length on the stack."""
    if not isinstance(n, types.IntegerLiteral):
        return None
    length = n.literal_value

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        slot = cgutils.alloca_once(builder, ir.ArrayType(ir.FloatType(), length))
        slot.align = 64
        return builder.bitcast(slot, ir.PointerType(ir.FloatType()))

    return signature(types.CPointer(types.float32), n), codegen


@intrinsic
def address_of(typingctx: Any, pointer: Any) -> Any:
    """The address in a pointer."""

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        return builder.ptrtoint(values[0], ir.IntType(64))

    return signature(types.int64, pointer), codegen


@intrinsic
def _prefetch_line(typingctx: Any, address: Any) -> Any:
    """Ask for the cache line at an address; nothing where there is no such instruction."""

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        if _IS_X86:
            function_type = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
            builder.call(ir.InlineAsm(function_type, "prefetcht1 ($0)", "r", side_effect=True), values)
        return context.get_dummy_value()

    return signature(types.void, types.int64), codegen


@njit
def prefetch(address: Any, n_bytes: Any) -> None:
    """Ask for a stretch of memory that will be read soon; the hardware's own prefetcher stops at page ends."""
    for at in range(0, n_bytes, 64):
        _prefetch_line(address + at)


# ---------------------------------------------------------------- bf16 as uint16


@njit(inline="always")
def bf16_to_f32(x: Any) -> Any:
    """The float32 with the same value as the bf16 bits `x` (uint16)."""
    return bits_to_f32(np.uint32(x) << np.uint32(16))


@njit(inline="always")
def f32_to_bf16(x: Any) -> Any:
    """bf16 bits of a float32, round to nearest even (finite input; a NaN stays a NaN)."""
    bits = f32_to_bits(np.float32(x))
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16(rounded >> np.uint32(16))


@njit
def write_row(source: Any, n: Any, target: Any, as_bf16: Any) -> None:
    """Copy n float32 values to the address `target`, as bf16 or float32."""
    if as_bf16:
        t16 = u16p(target)
        for i in range(n):
            t16[i] = f32_to_bf16(source[i])
    else:
        t32 = f32p(target)
        for i in range(n):
            t32[i] = source[i]


@njit
def put_row(source: Any, n: Any, target: Any, mode: Any) -> None:
    """The same by the output modes of `tithe.quant.rows_tile`."""
    if mode == 2:
        t32 = f32p(target)
        for i in range(n):
            t32[i] = bf16_to_f32(f32_to_bf16(source[i]))
    else:
        write_row(source, n, target, mode == 1)


@njit(inline="always")
def operand(address: Any, i: Any, is_bf16: Any) -> Any:
    """Element i of an operand array (bf16 or float32) as float32."""
    if is_bf16:
        return bf16_to_f32(u16p(address)[i])
    return f32p(address)[i]


# ---------------------------------------------------------------- elementary functions with one answer everywhere

_LOG2E = np.float32(math.log2(math.e))
_LN2_HI = np.float32(0.693359375)
_LN2_LO = np.float32(-2.12194440e-4)


@njit(inline="always")
def exp_f32(x: Any) -> Any:
    """exp for float32 by range reduction and a degree-6 polynomial (Cephes `expf` coefficients), ≤ 2 ulp.

    Vectorises, and gives the same bits in a vector lane as alone. Below -87.3 the answer is 0; above 88.3 it saturates.
    """
    x = min(x, np.float32(88.3762626647949))
    flushed = x < np.float32(-87.3365)
    x = max(x, np.float32(-87.3365))
    n = np.floor(fma(x, _LOG2E, np.float32(0.5)))
    r = fma(n, -_LN2_HI, x)
    r = fma(n, -_LN2_LO, r)
    p = fma(np.float32(1.9875691500e-4), r, np.float32(1.3981999507e-3))
    p = fma(p, r, np.float32(8.3334519073e-3))
    p = fma(p, r, np.float32(4.1665795894e-2))
    p = fma(p, r, np.float32(1.6666665459e-1))
    p = fma(p, r, np.float32(5.0000001201e-1))
    p = fma(p, r * r, r) + np.float32(1.0)
    scale = bits_to_f32(np.uint32(np.int32(n) + np.int32(127)) << np.uint32(23))
    return np.float32(0.0) if flushed else p * scale
