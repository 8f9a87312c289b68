"""One compute thread for the kernels' tests: on a busy machine two threads wait for each other at every launch.

Tests of two threads ask for them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tithe.quant import set_threads


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> None:
    set_threads(1)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Two threads for one test."""
    set_threads(2)
    yield
    set_threads(1)
