"""A fresh pool for each test."""

from __future__ import annotations

import pytest

from tithe.pool import Pool


@pytest.fixture
def path(tmp_path):
    return tmp_path / "pool.sqlite"


@pytest.fixture
def pool(path):
    with Pool.create(path, "run-1") as pool:
        yield pool
