"""What a program may use, and what became of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds of one run of a program: one per test on standard input, one for all tests of functions or asserts.

    `total_s` bounds all tests on standard input together: those that are left then are not run. `wall_s` counts from
    the moment the program's process is ready, never from the queue. `cpu_s` and `memory_mib` (address space) bind
    each process; `memory_mib` binds the private memory of all of them together too, looked at ten times a second.
    `processes` counts threads. `output_kib` bounds standard output and standard error, each; `file_mib` one file,
    `disk_mib` all of them (they lie in memory).
    """

    wall_s: float = 5.0
    cpu_s: float = 5.0
    total_s: float = 60.0
    memory_mib: int = 256
    processes: int = 16
    output_kib: int = 64
    file_mib: int = 16
    disk_mib: int = 64
    open_files: int = 64


class Outcome(enum.StrEnum):
    """What became of a program. HARNESS is an abstention: nothing is known about the program."""

    PASSED = "passed"
    WRONG = "wrong answer"
    ERROR = "error"
    TIMEOUT = "timeout"
    MEMORY = "memory limit"
    OUTPUT = "output limit"
    HARNESS = "harness failure"


@dataclass(frozen=True)
class Verdict:
    """The judgement of one program over its tests; `passed` of `total` held. Testing stops at the first limit that is
    hit, because that is slow, and not at the first wrong answer.

    >>> Verdict(Outcome.WRONG, 3, 4, "test 2: 5 is not 6").reward
    0.0
    """

    outcome: Outcome
    passed: int
    total: int
    detail: str = ""
    seconds: float = 0.0

    @property
    def reward(self) -> float | None:
        """1 when every test held, 0 when one did not, None for an abstention."""
        return None if self.outcome is Outcome.HARNESS else float(self.outcome is Outcome.PASSED)
