"""The compute lane: who may compute with several threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tithe.models.lane import Lane
from tithe.quant import pack_dense, set_threads


@pytest.fixture
def lane() -> Iterator[Lane]:
    lane = Lane(threads=2).start()
    try:
        yield lane
    finally:
        lane.close()
        set_threads(1)


def _compute() -> int:
    """A torch operation and a kernel, both large enough to be split; what this process has in threads afterwards."""
    torch.ones(1 << 20).mul_(2.0)
    pack_dense(torch.ones(480, 64)).matmul(torch.ones(64, 64).bfloat16())
    return len(list(Path("/proc/self/task").iterdir()))


def test_no_thread_but_the_lane_gets_a_team(lane: Lane) -> None:
    """A second team would outnumber the processors, and the workers of both would sleep between kernels."""
    before = lane.call(_compute)
    assert lane.call(torch.get_num_threads) == 2
    seen: list[tuple[int, int]] = []
    other = threading.Thread(target=lambda: seen.append((torch.get_num_threads(), _compute())))
    other.start()
    other.join()
    assert seen == [(1, before + 1)]  # the thread itself
    assert torch.get_num_threads() == 1
    assert _compute() == before
