"""A process that runs or resumes a small run: ``python run_worker.py FOLDER sync|async STEPS``. Prints what it does."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tithe.orchestration import stop_on_signals
from tithe.staleness import Bounds
from unit.orchestration.fakes import World

BOUNDS = {
    "sync": Bounds(batch_rollouts=6, group_size=2, max_lag=0, max_age=0),
    "async": Bounds(batch_rollouts=6, group_size=2, max_lag=2, max_age=2),
}


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def main(folder: str, mode: str, steps: str) -> None:
    world = World(Path(folder), bounds=BOUNDS[mode], steps=int(steps), delay_s=0.002, checkpoint_every=3)
    step = world.trainer.step

    def told():
        done = step()
        say("trained", world.pool.serial + 1, *world.trainer.batches[-1])
        return done

    world.trainer.step = told
    world.trainer.on_micro = lambda: say("micro", world.pool.serial)
    with stop_on_signals(world.control):
        outcome = world.run()
    say("ended", outcome.reason, outcome.serial, world.trainer.weights)


if __name__ == "__main__":
    main(*sys.argv[1:])
