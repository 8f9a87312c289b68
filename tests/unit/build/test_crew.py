"""Starting and meeting the ranks of a run: a launcher's, one's own, and those that never come."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from support.ranks import on_ranks_of
from tithe.build import launch, rank
from tithe.build.crew import Crew, join_launched, launched_rank, threads_of
from tithe.config import load_config
from tithe.errors import ConfigError, RanksLost
from tithe.models import Ranks

LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)


def test_ranks_of_a_launcher_meet_through_its_address(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def work(ranks: Ranks) -> list[bytes]:
        own = {"RANK": ranks.rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in own.items()})
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        if ranks.rank == 0:
            crew = launch.start_crew(2)
            crew.meet()
            launched = crew.ranks
            assert not crew.processes
        else:
            launched = join_launched()
        assert launched_rank() == launched.rank == ranks.rank
        return launched.gather(bytes([ranks.rank]) * (1 + ranks.rank))

    assert on_ranks_of(2, tmp_path, work) == [[b"\0", b"\1\1"]] * 2


def test_another_number_than_the_launchers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "h", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"run\.ranks = 2, but the launcher started 8") as caught:
        launch.start_crew(2)
    assert caught.value.key == "run.ranks"


def test_a_command_that_does_not_follow_is_refused_on_ranks_above_0(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"as rank 1, but only `tithe train`.* run\.ranks = 2"):
        launch.start_crew(2)


def test_a_rank_that_ends_before_it_comes_is_named_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(rank: int, *_: object) -> None:
        if rank == 2:
            os._exit(7)
        time.sleep(600)

    monkeypatch.setattr(launch, "main", late)
    crew = launch.start_crew(3)
    processes = list(crew.processes.values())
    folder = crew.folder
    assert folder is not None
    try:
        with pytest.raises(RanksLost, match="did not meet: rank 2 ended with exit code 7"):
            crew.meet()
    finally:
        crew.end()
    assert [process.exitcode for process in processes] == [-9, 7]
    assert not folder.exists()
    crew.end()


def test_one_rank_starts_nothing() -> None:
    crew = launch.start_crew(1)
    crew.meet()
    crew.begin(load_config(None), None)
    crew.stop()
    crew.end()
    assert (crew.processes, crew.folder, crew.ranks.size) == ({}, None, 1)


def test_cores_are_shared_out_to_the_ranks_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    assert threads_of(load_config(None, ["run.ranks=4"])) == 3
    assert threads_of(load_config(None, ["run.ranks=16"])) == 1
    assert threads_of(load_config(None, ["run.ranks=16", "run.threads=5"])) == 5
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # of 16 on 8 machines
    assert threads_of(load_config(None, ["run.ranks=16"])) == 6


def test_a_crew_is_alone_unless_it_meets_others() -> None:
    assert Crew().ranks.size == Crew().size == 1


def test_ranks_that_started_end_when_the_system_starts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    fork = multiprocessing.get_context("fork").Process

    class Scarce(fork):
        def start(self) -> None:
            if started:
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            super().start()
            started.append(self)

    monkeypatch.setattr(launch, "main", lambda *_: time.sleep(600))
    monkeypatch.setattr(launch.threading, "active_count", lambda: 1)  # others of this process do not matter
    monkeypatch.setattr(multiprocessing.get_context("fork"), "Process", Scarce)
    with pytest.raises(ConfigError, match=r"run\.ranks = 3: the system starts no rank 2 .*unavailable") as caught:
        launch.start_crew(3)
    assert caught.value.key == "run.ranks"
    (one,) = started
    assert one.exitcode == -signal.SIGKILL


def test_a_launchers_followers_leave_interrupts_to_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal sends them to all; a rank that ends by one would end the others before they have saved."""
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(kind) for kind in kinds]
    seen: list[object] = []
    monkeypatch.setattr(rank, "join_launched", Ranks)
    monkeypatch.setattr(rank, "follow", lambda _: seen.extend(signal.getsignal(kind) for kind in kinds))
    try:
        rank.follow_launched()
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)
    assert seen == [signal.SIG_IGN, signal.SIG_IGN]
