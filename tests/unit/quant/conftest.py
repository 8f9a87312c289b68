"""Two compute threads for the kernels' tests, one again afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tithe.quant import set_threads


@pytest.fixture(scope="package", autouse=True)
def _two_threads() -> Iterator[None]:
    set_threads(2)
    yield
    set_threads(1)
