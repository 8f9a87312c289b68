"""What every test gets: no network, few threads, reproducible property tests."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from hypothesis import HealthCheck, settings

import tithe  # noqa: F401  before torch: how long its idle threads wait

# Two shared cores make single examples slow now and then: no deadline, and the same examples on every machine.
settings.register_profile(
    "house", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("house")
