from __future__ import annotations

import pytest

from tithe.sandbox import Sandbox, SandboxUnavailableError


@pytest.fixture(scope="session")
def sandbox():
    """One for all tests: what one program leaves behind would show in the next."""
    try:
        opened = Sandbox(slots=4)
    except SandboxUnavailableError as error:
        pytest.skip(f"no sandbox of full strength here, and there is no weaker one: {error}")
    with opened:
        yield opened
