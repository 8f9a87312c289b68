"""A tiny run's files for the composition root's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.runs import RunFiles, write_run_files
from support.threads import one_thread


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="package")
def files(tmp_path_factory: pytest.TempPathFactory) -> RunFiles:
    return write_run_files(tmp_path_factory.mktemp("run"))
