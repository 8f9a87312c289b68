"""SIGINT and SIGTERM: the first asks for a clean end, the second ends the process at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tithe.orchestration.control import RunControl, StopReason

HANDLED = (signal.SIGINT, signal.SIGTERM)

_NOTE = b"\nStopping: a checkpoint is written first. A second signal stops at once.\n"


@contextmanager
def stop_on_signals(control: RunControl) -> Iterator[None]:
    """While the block runs, the first signal requests a stop: the train loop finishes its micro-batch and writes a
    checkpoint, and the caller exits with 0 and the resume command. The second kills the process by that same signal, so
    that the shell sees what happened; a resume then goes on from the last checkpoint. Only for the main thread.
    """

    def first(_number: int, _frame: FrameType | None) -> None:
        for handled in HANDLED:
            signal.signal(handled, second)
        os.write(2, _NOTE)  # nothing else is safe here: the interrupted code may hold the lock of any stream
        control.request_stop(StopReason.SIGNAL)

    def second(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    before = {handled: signal.signal(handled, first) for handled in HANDLED}
    try:
        yield
    finally:
        for handled, handler in before.items():
            signal.signal(handled, handler or signal.SIG_DFL)
