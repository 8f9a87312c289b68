"""The body of a reward worker: a small process that judges one text at a time and may be killed at any moment.

Consumes: one message with the spec, then jobs. Produces: `ready` or why not, then one reply per job. Waits for: the
next job. Ends when the connection closes, when its parent dies, or by SIGKILL. Imports neither torch nor transformers,
unless the user's function does.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
from typing import Any

from tithe.errors import FailureCause, UserError, boundary
from tithe.rewards.grading import Grader
from tithe.rewards.spec import RewardSpec
from tithe.rewards.wire import pack, receive, send
from tithe.types import PromptItem

_PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int) -> None:
    """Serve the connection that was inherited as `descriptor` until it closes."""
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the main process's affair
    with socket.socket(fileno=descriptor) as connection:
        start = receive(connection)
        grader = _prepare(connection, start)
        if grader is None:
            return
        try:
            while True:
                send(connection, pack(_reply(grader, receive(connection))))
        except (EOFError, OSError):
            return


def _die_with(parent: int) -> None:
    """End when the thread that started this process ends, even in an endless loop."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        sys.exit(1)


def _prepare(connection: socket.socket, start: dict[str, Any]) -> Grader | None:
    """Set the limits, load the function and say so."""
    sys.path += [path for path in start["path"] if path not in sys.path]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (start["memory_bytes"], start["memory_bytes"]))
    grader: Grader | None = None
    error = ""
    with boundary(FailureCause.REWARD) as slot:
        try:
            grader = Grader(RewardSpec.from_json(start["spec"]))
        except UserError as wrong:
            error = str(wrong)
    if slot.failure is not None:
        error = slot.failure.message
    send(connection, pack({"ready": grader is not None, "error": error}))
    return grader


def _reply(grader: Grader, job: dict[str, Any]) -> dict[str, Any]:
    """Judge one job; an exception becomes a reply, a breach of the contract one of its own."""
    with boundary(FailureCause.REWARD) as slot:
        item = PromptItem(**job["item"])
        try:
            result = grader.grade(item, job["text"], job["info"])
        except UserError as wrong:
            return {"breach": str(wrong)}
        return {
            "value": result.value,
            "parts": result.parts,
            "facts": result.facts,
            "reason": result.reason,
            "grader": result.grader,
        }
    assert slot.failure is not None
    return {"failed": slot.failure.message}
