"""Threads of tests on tiny models, where more than one only wait for each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tithe.quant import kernel_threads, set_threads


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread while the block runs. No result depends on it."""
    before = kernel_threads()
    set_threads(1)
    try:
        yield
    finally:
        set_threads(before)
