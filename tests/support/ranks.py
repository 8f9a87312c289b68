"""Several ranks of one test: forks of this process, which has compiled everything, connected through a file.

answers = on_ranks_of(4, tmp_path, work)      # [work(rank 0's Ranks), …]; raises what a rank raised
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from tithe.models.ranks import Ranks
from tithe.quant import set_threads

T = TypeVar("T")
TIMEOUT_S = 100.0


def on_ranks_of(size: int, folder: Path, work: Callable[[Ranks], T], timeout_s: float = TIMEOUT_S) -> list[T]:
    """What `work` gave on each rank; `AssertionError` with a rank's traceback when one failed."""
    found = outcomes(size, folder, work, timeout_s)
    wrong = [f"rank {rank}: {value}" for rank, (ok, value) in enumerate(found) if not ok]
    assert not wrong, "\n".join(wrong)
    return [value for _, value in found]


def outcomes(
    size: int, folder: Path, work: Callable[[Ranks], Any], timeout_s: float = TIMEOUT_S
) -> list[tuple[bool, Any]]:
    """(True, answer), (False, traceback), or (False, exit code) of a rank that left without a word."""
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("fork")

    def one(rank: int) -> None:
        set_threads(1)
        torch.set_num_threads(1)
        answer: tuple[bool, Any] = False, "unknown"
        try:
            ranks = Ranks.join(rank, size, folder / "meeting", timeout_s)
            answer = True, work(ranks)
            ranks.barrier()  # nobody leaves while others need it
            ranks.close()
        except Exception:
            answer = False, traceback.format_exc()
            raise
        finally:
            (folder / f"{rank}.part").write_bytes(pickle.dumps(answer))
            (folder / f"{rank}.part").rename(folder / f"{rank}.answer")
            os._exit(0)  # without what this process does at its end

    processes = [context.Process(target=one, args=(rank,), daemon=True) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT_S)
        if process.is_alive():
            process.kill()
            process.join()
    answers = [folder / f"{rank}.answer" for rank in range(size)]
    return [
        pickle.loads(path.read_bytes()) if path.exists() else (False, process.exitcode)
        for path, process in zip(answers, processes, strict=True)
    ]
