"""Run inside the sandbox when it starts: tries what must not work, and prints `confined` when nothing did. It is
told the path of one of the host's files."""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

secret = input()


def must_fail(what: str, call: Callable[[], Any]) -> None:
    """Stop when a call succeeds."""
    try:
        call()
    except OSError:
        return
    raise SystemExit(f"{what} is possible")


def must(what: str, holds: bool) -> None:
    """Stop when something does not hold."""
    if not holds:
        raise SystemExit(what)


def fork_many() -> None:
    """More children than the limit of eight processes."""
    children: list[int] = []
    for _ in range(12):
        child = os.fork()
        if child == 0:
            signal.pause()
        children.append(child)


libc = ctypes.CDLL(None, use_errno=True)
must("it is not the first process of its namespace", os.getpid() == 1)
must("it is root", os.getuid() == os.geteuid() != 0)
must("its system calls are not filtered", libc.prctl(21, 0, 0, 0, 0) == 2)
must_fail("reading a file of the host", lambda: open(secret).close())
must_fail("listing /proc", lambda: os.stat("/proc/1"))
must_fail("listing the host's root", lambda: os.stat("/etc/passwd"))
must_fail("writing outside the scratch folder", lambda: open("/written", "w").close())
must_fail("a network socket", lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM).close())
must_fail("more processes than the limit", fork_many)
must("it may leave its namespaces", libc.unshare(0x10000000) == -1)
must("it may mount", libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == -1)
for number in range(3, 64):
    must_fail(f"using descriptor {number} of the harness", lambda number=number: os.fstat(number))
importlib.import_module("wave")  # the standard library can be read all the same
print("confined")
