"""The pieces kernels are made of: threads, exp, bf16 rounding, argument blocks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tithe.quant import kernel, set_threads
from tithe.quant.runtime import (
    SLOT,
    as_float,
    bf16_to_f32,
    exp_f32,
    f16_to_f32,
    f32_to_bf16,
    f32p,
    next_slot,
    next_task,
    sources_digest,
    u16p,
)


# x, y (float32), elements per task
@kernel
def exp_rows(args: Any) -> None:
    """y = exp(x) in float32."""
    next_slot(args)
    while True:
        t = next_task(args)
        if t >= args[1]:
            break
        x, y = f32p(args[3] + t * args[5] * 4), f32p(args[4] + t * args[5] * 4)
        for i in range(args[5]):
            y[i] = exp_f32(x[i])


# x (float32), y (uint16), z (float32), elements
@kernel
def round_rows(args: Any) -> None:
    """y = bf16(x), z = float32(y)."""
    while True:
        t = next_task(args)
        if t >= args[1]:
            break
        x, y, z = f32p(args[3]), u16p(args[4]), f32p(args[5])
        for i in range(args[6]):
            y[i] = f32_to_bf16(x[i])
            z[i] = bf16_to_f32(y[i])


# x (uint16), y (float32), a float
@kernel
def widen_halves(args: Any) -> None:
    """y = float32 of every half, times a float from the block."""
    factor = np.float32(as_float(args[5]))
    while True:
        t = next_task(args)
        if t >= args[1]:
            break
        f32p(args[4])[t] = f16_to_f32(u16p(args[3])[t]) * factor


def exp_of(x: np.ndarray, per_task: int = 0) -> np.ndarray:
    x = np.ascontiguousarray(x, np.float32)
    y = np.full_like(x, np.nan)
    per_task = per_task or x.size
    exp_rows.bind(x.size // per_task, [x.ctypes.data, y.ctypes.data, per_task]).run()
    return y


def test_exp_is_within_two_ulp_over_its_whole_range() -> None:
    x = np.concatenate([np.linspace(-87.3, 88.3, 400_000), np.linspace(-1, 1, 100_000)]).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    ulp = np.spacing(exact.astype(np.float32)).astype(np.float64)
    assert (np.abs(exp_of(x) - exact) / ulp).max() <= 2.0


def test_exp_at_the_edges_is_zero_one_and_finite() -> None:
    tiny = float(np.finfo(np.float32).tiny)
    x = np.array([0.0, -0.0, -87.34, -1e4, -3.0e38, -np.inf, 88.4, 1e4, np.inf], np.float32)
    y = exp_of(x)
    assert y[:6].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert np.isfinite(y).all()
    assert (y[6:] == y[6]).all(), "saturates"
    assert y[6] > 2.4e38
    assert tiny <= exp_of(np.array([-87.3364], np.float32))[0] < 2 * tiny, "the last normal answer"


def test_exp_has_the_same_bits_in_a_vector_lane_as_alone() -> None:
    x = np.random.default_rng(0).normal(0, 20, 1024).astype(np.float32)
    np.testing.assert_array_equal(exp_of(x), exp_of(x, per_task=1))


def test_bf16_rounding_is_torchs() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    ties = (rng.integers(0, 2**16, 20_000, dtype=np.uint32) << 16) | 0x8000
    x = np.concatenate([bits, ties, ties + 1, ties - 1]).astype(np.uint32).view(np.float32)
    x = np.concatenate([x[np.isfinite(x)], np.array([0.0, -0.0, np.inf, -np.inf, 3.4e38, 1e-40], np.float32)])
    x = np.ascontiguousarray(x)
    y, z = np.zeros(x.size, np.uint16), np.zeros(x.size, np.float32)
    round_rows.bind(1, [x.ctypes.data, y.ctypes.data, z.ctypes.data, x.size]).run()
    rounded = torch.from_numpy(x).bfloat16()
    np.testing.assert_array_equal(y, rounded.view(torch.uint16).numpy())
    np.testing.assert_array_equal(z, rounded.float().numpy())


def test_every_finite_half_widens_exactly_and_floats_travel_in_the_block() -> None:
    halves = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
    halves = np.ascontiguousarray(halves[np.isfinite(halves.view(np.float16))])
    y = np.zeros(halves.size, np.float32)
    widen_halves.bind(halves.size, [halves.ctypes.data, y.ctypes.data, -0.375]).run()
    np.testing.assert_array_equal(y, halves.view(np.float16).astype(np.float32) * np.float32(-0.375))


def test_every_task_runs_once_on_any_number_of_threads() -> None:
    x = np.random.default_rng(1).normal(0, 10, (97, 33)).astype(np.float32)
    y, expected = np.zeros_like(x), exp_of(x)
    launch = exp_rows.bind(97, [x.ctypes.data, y.ctypes.data, 33])
    try:
        for threads in (1, 2, 3):
            set_threads(threads)
            for _ in range(10):
                y[:] = np.nan
                launch.run()
                np.testing.assert_array_equal(y, expected)
    finally:
        set_threads(1)


@pytest.mark.usefixtures("two_threads")
def test_two_threads_join_a_launch() -> None:
    """Without this, everything is right and half as fast."""
    if "libgomp" not in Path("/proc/self/maps").read_text():
        pytest.skip("this torch has no libgomp: kernels run serially")
    x = np.zeros((4, 8), np.float32)
    y = np.zeros_like(x)
    launch = exp_rows.bind(4, [x.ctypes.data, y.ctypes.data, 8])
    launch.run()
    assert launch.args[SLOT] == 2


def test_cached_kernels_are_keyed_by_every_source_of_kernels(tmp_path: Path) -> None:
    """A change in one file makes the kernels of all files new; files without kernels do not count."""
    (tmp_path / "tile.py").write_text("from numba import njit\n")
    (tmp_path / "plain.py").write_text("x = 1\n")
    before = sources_digest(tmp_path)
    (tmp_path / "plain.py").write_text("x = 2\n")
    assert sources_digest(tmp_path) == before
    (tmp_path / "tile.py").write_text("from numba import njit  # changed\n")
    assert sources_digest(tmp_path) != before
    cache = exp_rows._compiled._cache
    codegen = exp_rows._compiled._targetdescr.target_context.codegen()
    assert cache.digest in cache._index_key(exp_rows._compiled._sig, codegen)


def test_a_launch_without_tasks_does_nothing() -> None:
    y = np.full(4, 7.0, np.float32)
    exp_rows.bind(0, [y.ctypes.data, y.ctypes.data, 4]).run()
    assert (y == 7.0).all()


CLOSURES = """
from typing import Any
import numpy as np
from numba import njit
from tithe.quant.runtime import f32p

def factory(number: int) -> Any:
    @njit
    def fill(out: Any, n: Any) -> None:
        o = f32p(out)
        for i in range(n):
            x = np.float32(i)
            for j in range(i):
                x = x * np.float32(0.5) + np.float32(number) if j % 3 else x + np.float32(number)
            o[i] = x
    return fill

fill_1, fill_2 = factory(1), factory(2)
"""
KERNEL = """
from closures import fill_{n} as fill
from tithe.quant.runtime import kernel

@kernel
def run(args):
    fill(args[3], args[4])
    fill(args[3] + 40, args[4])
    fill(args[3] + 80, args[4])
"""
CALL = """
import importlib, sys
import numpy as np
for n in sys.argv[1:]:
    out = np.zeros(30, np.float32)
    importlib.import_module(f"kernel_{n}").run.bind(1, [out.ctypes.data, 5]).run()
    print(n, *out[:5])
"""


def test_kernels_that_two_processes_compiled_call_their_own_closures(tmp_path: Path) -> None:
    """Too large to be inlined, and equal in name: the linker must not take one for the other."""
    (tmp_path / "closures.py").write_text(CLOSURES)
    for n in (1, 2):
        (tmp_path / f"kernel_{n}.py").write_text(KERNEL.format(n=n))
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3] / "src")])

    def call(*numbers: str) -> list[str]:
        run = subprocess.run(
            [sys.executable, "-c", CALL, *numbers],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": paths},
        )
        return run.stdout.splitlines()

    alone = [*call("1"), *call("2")]
    assert alone == ["1 0.0 2.0 2.5 2.5 3.75", "2 0.0 3.0 4.0 4.25 6.5"]
    assert call("1", "2") == alone, "both from the cache"
