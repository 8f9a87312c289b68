"""A rank other than 0: loads its share, follows orders, ends when it is told to or when another rank has ended.

Interrupts and terminations are rank 0's affair: it stops the run and then the others.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

from tithe.build.base import open_base, other_storage
from tithe.build.crew import LOST, WIRE, Crew, Setup, join_launched
from tithe.build.learning import make_learning
from tithe.build.objective import batch_scorer
from tithe.config import build_config
from tithe.engines import EngineShare
from tithe.errors import RanksLost, TitheError
from tithe.models import Orders, Ranks, Stop
from tithe.trainer import FullShare, FullTrainer, TrainerShare

_PR_SET_PDEATHSIG = 1
"""An option of Linux's `prctl`."""


def follow(ranks: Ranks) -> None:
    """Carry out rank 0's orders until the last. Raises `RanksLost` when another rank ends first."""
    orders = Orders(ranks, WIRE)
    setup = orders.hear()
    if isinstance(setup, Stop):
        return
    assert isinstance(setup, Setup)
    adapter = None if setup.adapter is None else Path(setup.adapter)
    crew = Crew(ranks, orders, ranks.size)
    base = open_base(build_config(setup.config), lambda _: None, crew, adapter)
    trainer, engine = make_learning(base.cfg, base, adapter, lambda _: None)
    EngineShare(engine, orders)
    TrainerShare(trainer, orders, batch_scorer(base.cfg, trainer), partial(other_storage, base))
    if isinstance(trainer, FullTrainer):
        FullShare(trainer, orders)
    orders.follow()


def follow_launched() -> None:
    """`follow`, in a process that a launcher such as torchrun has started with a rank above 0."""
    _ignore_signals()
    follow(join_launched())


def _ignore_signals() -> None:
    """A terminal and a launcher send them to every rank; the run ends well only if rank 0 ends it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends, even before ranks have met (Linux)."""
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None)
        if hasattr(libc, "prctl"):
            libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        sys.exit(LOST)


def main(rank: int, size: int, meeting: str, parent: int) -> None:
    """A process of its own, a child of `parent`. Exit code: 0 after the last order, 3 when another rank has ended, 1
    for a failure of this one."""
    _ignore_signals()
    _end_with(parent)
    with suppress(OSError):  # the name in `ps` and `top`, where there is such a file
        Path("/proc/self/comm").write_text(f"tithe-rank-{rank}")
    try:
        follow(Ranks.join(rank, size, Path(meeting)))
    except RanksLost:
        sys.exit(LOST)
    except TitheError as error:
        print(f"tithe: rank {rank}: {error}", file=sys.stderr)
        sys.exit(1)
