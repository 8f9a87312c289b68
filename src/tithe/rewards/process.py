"""One reward worker as the main process sees it: started clean, asked one thing at a time, killed from outside."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any, Final

from tithe.errors import ConfigError
from tithe.rewards.spec import KEY, RewardSpec
from tithe.rewards.wire import pack, receive, send

START_LIMIT_S: Final = 120.0
"""Longest a worker may take to import the user's module."""

GRACE_S: Final = 1.0
"""How long a worker that closed its connection gets to end by itself."""

_BOOT: Final = (
    "import sys; sys.path.append(sys.argv[1]); from tithe.rewards.worker import main; "
    "main(int(sys.argv[2]), int(sys.argv[3]))"
)
_ONE_THREAD: Final = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class WorkerProcess:
    """A worker that has loaded its function. Its own session, so that a kill reaches whatever it started.

    A new interpreter, never a fork: the parent has threads, and its memory stays its own. It dies with the *thread*
    that constructed it; if the whole run is killed by SIGKILL, what a user's function started may outlive it.
    Construction blocks until the function is loaded and raises `ConfigError` when that fails,
    `OSError` when no process can be started.
    """

    def __init__(self, spec: RewardSpec, memory_mib: int, log_path: Path | None) -> None:
        self._lock = threading.Lock()
        self._connection, theirs = socket.socketpair()
        with theirs:
            output: IO[bytes] | int = subprocess.DEVNULL if log_path is None else log_path.open("ab")
            try:
                self._process = _spawn(theirs.fileno(), output)
            except OSError:
                self._connection.close()
                raise
            finally:
                if not isinstance(output, int):
                    output.close()
        try:
            self._load(spec, memory_mib)
        except BaseException:
            self.kill()
            raise

    def _load(self, spec: RewardSpec, memory_mib: int) -> None:
        deadline_s = time.monotonic() + START_LIMIT_S
        start = {"spec": spec.to_json(), "memory_bytes": memory_mib * 2**20, "path": [*sys.path, str(Path.cwd())]}
        try:
            send(self._connection, pack(start), deadline_s)
            reply = receive(self._connection, deadline_s)
        except TimeoutError as error:
            raise ConfigError(f"{spec.function} took more than {START_LIMIT_S:.0f} s to import", KEY) from error
        except (EOFError, OSError) as error:
            raise ConfigError(
                f"the reward worker ended while it loaded {spec.function} ({self.kill(GRACE_S)}); "
                f"it may need more than reward.memory_mib = {memory_mib}",
                KEY,
            ) from error
        if not reply["ready"]:
            hint = f"; raise reward.memory_mib = {memory_mib}" if "MemoryError" in reply["error"] else ""
            raise ConfigError(f"{reply['error']}{hint}", KEY)

    def ask(self, job: bytes, timeout_s: float) -> dict[str, Any]:
        """Send one packed job and wait for its reply; the clock starts now. Raises `TimeoutError`, or `EOFError` or
        `OSError` when the worker died; it must be killed after any of them."""
        deadline_s = time.monotonic() + timeout_s
        send(self._connection, job, deadline_s)
        return receive(self._connection, deadline_s)

    def is_alive(self) -> bool:
        """Whether the process still runs (it may have been killed for memory while it was idle)."""
        return not self._ends_within(0.0)

    def interrupt(self) -> None:
        """Kill without waiting; safe from any thread. Whoever waits in `ask` gets `EOFError`."""
        with self._lock:
            if self._process.returncode is None:
                try:
                    os.killpg(self._process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    return

    def kill(self, grace_s: float = 0.0) -> str:
        """Kill with everything it started, reap it, close the connection; returns how it ended. A worker that is about
        to end by itself gets `grace_s` to do so, so that its own exit code is told."""
        ended = self._ends_within(grace_s)
        self.interrupt()
        with self._lock:
            code = self._process.wait()
        self._connection.close()
        if not ended:
            return "killed"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def _ends_within(self, grace_s: float) -> bool:
        """Whether the process ends by itself; what it started is killed all the same."""
        deadline_s = time.monotonic() + grace_s
        while self._process.returncode is None:
            status = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is not None:
                return True
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(0.005)
        return True


def _spawn(descriptor: int, output: IO[bytes] | int) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).resolve().parents[2])
    return subprocess.Popen(  # noqa: S603  this interpreter, fixed arguments
        [sys.executable, "-P", "-c", _BOOT, root, str(descriptor), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env={**os.environ, **_ONE_THREAD},
        pass_fds=(descriptor,),
        start_new_session=True,
    )
