"""The process that programs are forked from: a bare interpreter in the room, with the usual modules imported.

Consumes: one message with the room's plan, then one message a program: its limits and its descriptors, never its code.
Produces: a supervisor process for each, which reports over its own connection. Waits for: the next message. Ends when
the connection closes, and everything in the room ends with it, because this is the room's first process.
"""

from __future__ import annotations

import array
import builtins
import gc
import importlib
import json
import os
import signal
import socket
import sys
from typing import Any, Final

from tithe.sandbox.inside import room, supervise, syscalls

MESSAGE_BYTES: Final = 1 << 20
MAX_DESCRIPTORS: Final = 8
_USUAL: Final = (
    *("ast", "atexit", "bisect", "collections", "contextlib", "copy", "encodings.ascii", "functools", "heapq", "io"),
    *("itertools", "json", "math", "operator", "random", "re", "string", "threading", "time", "traceback", "typing"),
    *("tithe.sandbox.inside.program", "tithe.sandbox.inside.checker"),
)
"""What nearly every program imports. Not more: a fork takes the longer the larger this process is."""


def main(descriptor: int) -> None:
    """Serve the connection inherited as `descriptor`."""
    connection = socket.socket(fileno=descriptor)
    plan, _ = receive(connection)
    if plan is None:
        return
    for name in _USUAL:
        importlib.import_module(name)
    try:
        proc = room.build(plan) if plan["mode"] == "namespaces" else os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        connection.send(json.dumps({"ready": False, "error": str(error)}).encode())
        return
    if plan["mode"] == "namespaces":
        first = os.fork()
        if first:
            connection.close()
            os.waitpid(first, 0)
            return
    _serve(connection, proc, plan, syscalls.build())


def _serve(connection: socket.socket, proc: int, plan: dict[str, Any], filtering: bytes) -> None:
    sys.path[:] = [path for path in sys.path if path in plan["folders"] or os.path.dirname(path) in plan["folders"]]
    os.environ.clear()
    os.environ.update(HOME=room.SCRATCH, TMPDIR=room.SCRATCH, LANG="C.UTF-8", PATH="/bin")
    builtins.__dict__.update(exit=sys.exit, quit=sys.exit)  # what the site module gives to scripts
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors are reaped by the kernel
    gc.collect()
    gc.freeze()
    connection.send(json.dumps({"ready": True}).encode())
    while True:
        order, descriptors = receive(connection)
        if order is None:
            os._exit(0)
        try:
            child = os.fork()
        except OSError:
            child = -1  # the connections close without a word, which the caller takes for a failure of the harness
        if child == 0:
            connection.close()
            supervise.run(order, descriptors, supervise.Zygote(proc, plan, filtering))
        for number in descriptors:
            os.close(number)


def receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """One message and the descriptors that came with it; None when the other side is gone."""
    numbers = array.array("i")
    data, extra, _, _ = connection.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(MAX_DESCRIPTORS * numbers.itemsize))
    for level, kind, body in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(body[: len(body) - len(body) % numbers.itemsize])
    return (json.loads(data) if data else None), list(numbers)
