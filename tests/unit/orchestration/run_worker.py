"""A process that runs or resumes a small run: ``python run_worker.py FOLDER MODE STEPS``. Prints what it does.

MODE is sync, async, or scheduled: synchronous, with phases, adaptive numbers of samples and a curriculum.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tithe.config import PhaseValues, Schedule
from tithe.orchestration import GroupSizes, stop_on_signals
from tithe.pool import Curriculum
from tithe.staleness import Bounds
from unit.orchestration.fakes import World

BOUNDS = {
    "sync": Bounds(batch_rollouts=6, group_size=2, max_lag=0, max_age=0),
    "scheduled": Bounds(batch_rollouts=12, group_size=4, max_lag=0, max_age=0),
    "async": Bounds(batch_rollouts=6, group_size=2, max_lag=2, max_age=2),
}

SCHEDULED = {
    "prompts": 9,
    "schedule": Schedule(
        (0, 3),
        (PhaseValues("explore", 0, 1.0, 0.95, 4, 0.0, 1e-3), PhaseValues("refine", 1, 0.6, 0.9, 2, 0.0, 1e-4)),
        is_linear=True,
    ),
    "sizes": GroupSizes((2, 6)),
    "curriculum": Curriculum(rest_batches=2, is_weighted=True),
}


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def main(folder: str, mode: str, steps: str) -> None:
    more = SCHEDULED if mode == "scheduled" else {}
    world = World(Path(folder), bounds=BOUNDS[mode], steps=int(steps), delay_s=0.002, checkpoint_every=3, **more)
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
