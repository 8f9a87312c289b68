"""Starts the process that programs are forked from, and talks to it."""

from __future__ import annotations

import array
import json
import os
import socket
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tithe.sandbox.boxes import HarnessError
from tithe.sandbox.rooms import REMEDY, Room, SandboxUnavailableError, bubblewrap, interpreter, require_ready

START_S: Final = 60.0
_SOURCE: Final = Path(__file__).resolve().parents[2]
_BOOT: Final = """
import sys, types
source, descriptor = sys.argv[1:3]
for name in ("tithe", "tithe.sandbox"):
    sys.modules[name] = package = types.ModuleType(name)
    package.__path__ = [source + "/" + name.replace(".", "/")]
from tithe.sandbox.inside.zygote import main
main(int(descriptor))
"""
"""Imports `tithe.sandbox.inside` alone: the packages above it would bring what a program has no use for."""


class Zygote:
    """A room with a process in it that forks programs. Thread-safe.

    A new interpreter, never a fork: this process has threads. Its room ends with it, and it ends when this object is
    closed or this process dies. Construction blocks until the room is open; raises `SandboxUnavailableError`.
    """

    def __init__(self, room: Room, mode: str) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._start(room, mode, theirs)
        except BaseException:
            self.close()
            raise

    def _start(self, room: Room, mode: str, theirs: socket.socket) -> None:
        with theirs, tempfile.TemporaryDirectory(prefix="tithe-room-", ignore_cleanup_errors=True) as root:
            descriptor = theirs.fileno()
            shown = bubblewrap(room, _SOURCE) if mode == "bubblewrap" else []
            command = [*shown, interpreter(), "-s", "-S", "-P", "-B", "-c", _BOOT, str(_SOURCE), str(descriptor)]
            self._process = _started(command, descriptor, mode)
            theirs.close()
            require_ready(self._greet(room.plan(mode, root)), mode, self._complaint)

    def _greet(self, plan: Mapping[str, Any]) -> bytes:
        """Its answer to the plan; empty when it has none."""
        try:
            self._connection.settimeout(START_S)
            self._connection.send(json.dumps(plan).encode())
            reply = self._connection.recv(1 << 16)
            self._connection.settimeout(None)
        except OSError:
            return b""
        return reply

    def _complaint(self) -> str:
        """What it wrote before it ended."""
        assert self._process is not None
        assert self._process.stderr is not None
        self._process.kill()
        return self._process.stderr.read().decode(errors="replace").strip()[-300:]

    def order(self, message: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        """Have a program forked that gets these descriptors. Raises `HarnessError` when the zygote is gone."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        try:
            with self._lock:
                self._connection.sendmsg([json.dumps(message).encode()], rights)
        except OSError as error:
            raise HarnessError(f"the sandbox's own process is gone: {error}") from error

    def close(self) -> None:
        """End it and everything in its room; blocks until it is reaped."""
        self._connection.close()
        if self._process is None:
            return
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()


def _started(command: Sequence[str], descriptor: int, mode: str) -> subprocess.Popen[bytes]:
    environment = {
        "PYTHONHASHSEED": "0",
        "MALLOC_ARENA_MAX": "2",
        "LANG": "C.UTF-8",
        "PATH": os.environ.get("PATH", ""),
    }
    try:
        return subprocess.Popen(  # noqa: S603
            command,
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise SandboxUnavailableError(f"no sandbox by {mode} here ({error}): {REMEDY}") from error
