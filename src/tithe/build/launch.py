"""Starts the other ranks of a run on this machine."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import threading
from pathlib import Path

from tithe.build.crew import MEETING, Crew, launched_rank
from tithe.build.rank import main
from tithe.errors import ConfigError
from tithe.utils.durable import explain


def start_crew(size: int) -> Crew:
    """The ranks of a run, on rank 0; `Crew.meet` connects them. `ConfigError` when a launcher has started another
    number, or several of a command that leads, or when the system starts no more processes: none is left then.

    On Linux a process that has no threads yet forks, so that nothing is imported twice; otherwise new interpreters
    start.
    """
    rank = launched_rank()
    if rank is not None:
        given = int(os.environ["WORLD_SIZE"])
        if rank > 0:
            raise ConfigError(
                f"a launcher has started this command as rank {rank}, but only `tithe train` and `tithe resume` follow "
                f"one; start it once, with run.ranks = {given}: it starts the other ranks itself",
                "run.ranks",
            )
        if given != size:
            raise ConfigError(f"run.ranks = {size}, but the launcher started {given}; set it to that", "run.ranks")
        return Crew(size=size)
    if size == 1:
        return Crew()
    folder = Path(tempfile.mkdtemp(prefix="tithe-ranks-"))
    crew = Crew(size=size, folder=folder)
    can_fork = sys.platform.startswith("linux") and threading.active_count() == 1
    make = multiprocessing.get_context("fork").Process if can_fork else multiprocessing.get_context("spawn").Process
    try:
        for rank in range(1, size):
            arguments = rank, size, str(folder / MEETING), os.getpid()
            process = make(target=main, args=arguments, name=f"tithe-rank-{rank}")
            process.start()
            crew.processes[rank] = process
    except OSError as error:
        crew.end()
        message = f"run.ranks = {size}: the system starts no rank {rank} ({explain(error)}); lower it"
        raise ConfigError(message, "run.ranks") from error
    except BaseException:
        crew.end()
        raise
    return crew
