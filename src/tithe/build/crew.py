"""The processes of a run over ranks. Rank 0 starts the others on this machine, or meets those that a launcher started.

    rank 0    `meet`, `begin`: the command's own process; it alone has pool, task, rewards and output
    others    processes of `tithe.build.launch`, or the same command under RANK and WORLD_SIZE; they follow orders

A rank that ends closes its connections, whereupon the others' next exchange fails and they end too: nobody is left.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tithe.config import RunConfig
from tithe.engines import ENGINE_ORDERS
from tithe.errors import RanksLost, TitheError
from tithe.models import ALONE, Orders, Ranks, Stop
from tithe.trainer import MODEL_ORDERS, TRAINER_CARRIERS, TRAINER_ORDERS
from tithe.utils.wire import Wire

LOST = 3
"""Exit code of a rank that ended because another did."""

MEETING = "meeting"
"""The file through which ranks of one machine find each other."""

_GRACE_S = 10.0
_POLL_S = 0.02


@dataclass(frozen=True)
class Setup:
    """What the others begin with: the settled configuration, and the adapter (if any) that the policy starts from."""

    config: Mapping[str, Any]
    adapter: str | None


WIRE = Wire(*dict.fromkeys((Setup, Stop, *ENGINE_ORDERS, *TRAINER_ORDERS, *MODEL_ORDERS, *TRAINER_CARRIERS)))
"""Everything that travels between the ranks of a run."""


def launched_rank() -> int | None:
    """This process's rank under a launcher such as torchrun; None without one."""
    return int(os.environ["RANK"]) if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys() else None


def join_launched() -> Ranks:
    """Meet the ranks that a launcher has started."""
    env = os.environ
    rank, size, port = int(env["RANK"]), int(env["WORLD_SIZE"]), int(env["MASTER_PORT"])
    is_host = rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return Ranks.join(rank, size, (env["MASTER_ADDR"], port, is_host))


def threads_of(cfg: RunConfig) -> int:
    """Threads of one rank: what the configuration says, or the cores shared out to the ranks of this machine."""
    here = int(os.environ["LOCAL_WORLD_SIZE"]) if "LOCAL_WORLD_SIZE" in os.environ else cfg.run.ranks
    return cfg.run.threads or max(1, len(os.sched_getaffinity(0)) // here)


@dataclass(eq=False)
class Crew:
    """The ranks of a run as one of them sees them, and on rank 0 the processes it has started, which meet in
    `folder`."""

    ranks: Ranks = ALONE
    orders: Orders = field(default_factory=lambda: Orders(ALONE, WIRE))
    size: int = 1
    processes: dict[int, BaseProcess] = field(default_factory=dict[int, BaseProcess])
    folder: Path | None = None

    def meet(self) -> None:
        """Connect to the others, once; raises `RanksLost` when one ends before."""
        if self.size == self.ranks.size:
            return
        if self.folder is None:
            self._connect(join_launched())
            return
        meeting = self.folder / MEETING
        found: list[Ranks | TitheError] = []

        def join() -> None:
            try:
                found.append(Ranks.join(0, self.size, meeting))
            except TitheError as error:
                found.append(error)  # raised below, in the thread that waits

        thread = threading.Thread(target=join, name="meet-ranks", daemon=True)
        thread.start()
        while thread.is_alive():
            if not all(process.is_alive() for process in self.processes.values()):
                raise RanksLost(f"the ranks did not meet: {self._why()}")
            thread.join(_POLL_S)
        (outcome,) = found
        if isinstance(outcome, TitheError):
            raise outcome
        self._connect(outcome)

    def _connect(self, ranks: Ranks) -> None:
        ranks.why = self._why
        self.ranks, self.orders = ranks, Orders(ranks, WIRE)

    def begin(self, cfg: RunConfig, adapter: Path | None) -> None:
        """On rank 0's lane: let the others load what this rank is about to load."""
        if self.ranks.size > 1 and self.ranks.rank == 0:
            self.orders.handle(Setup, lambda _: None)
            without = {"lora"} if cfg.model.train == "full" else None  # its keys would be refused as given
            settled = cfg.model_dump(mode="json", exclude=without)
            self.orders.give(Setup(settled, None if adapter is None else str(adapter)))

    def stop(self) -> None:
        """On rank 0's lane: the last order, unless ranks are lost."""
        if self.ranks.size > 1 and not self.orders.is_broken:
            with suppress(RanksLost):
                self.orders.give(Stop())

    def end(self) -> None:
        """Leave the others and see that no process is left; a second call does nothing."""
        is_clean = self.ranks.size > 1 and not self.orders.is_broken
        self.ranks.close()
        deadline = time.monotonic() + (_GRACE_S if is_clean else 0.0)
        for process in self.processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
            process.join()
        self.processes.clear()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _why(self) -> str | None:
        """Which rank ended first, and how; None when all that were started still live after a moment."""
        deadline = time.monotonic() + _GRACE_S / 2
        while self.processes and time.monotonic() < deadline:
            codes = {rank: process.exitcode for rank, process in self.processes.items()}
            ended = {rank: code for rank, code in codes.items() if code not in (None, LOST)}
            for rank, code in ended.items():
                assert code is not None
                if code < 0:
                    return f"rank {rank} was killed by {signal.Signals(-code).name}"
                return f"rank {rank} ended with exit code {code}; what it said is above"
            time.sleep(_POLL_S)
        return None
