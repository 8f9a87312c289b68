"""Starts `tithe` commands in fresh processes that have the heavy packages imported already.

A process is a fork of this one, which has imported everything and started no thread: it is killed, limited and
signalled like any other, a few seconds cheaper. `Launcher` is the tests' side; run as a script, this file is the other.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

TESTS = Path(__file__).resolve().parents[1]
WAIT_S = 120.0


def environment() -> dict[str, str]:
    """What a user's shell would give, with this checkout first."""
    path = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TERM": "dumb"}


def command_line(arguments: Sequence[str | Path], cwd: Path) -> subprocess.CompletedProcess[str]:
    """The real thing: a new interpreter, `python -m tithe.cli`."""
    command = [sys.executable, "-m", "tithe.cli", *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=WAIT_S, check=False
    )


@dataclass(eq=False)
class Run:
    """One command in a process of its own."""

    launcher: Launcher
    pid: int
    out_path: Path
    err_path: Path
    code: int | None = None

    @property
    def out(self) -> str:
        return self.out_path.read_text()

    @property
    def err(self) -> str:
        return self.err_path.read_text()

    @property
    def lines(self) -> list[str]:
        """Standard output."""
        return self.out.splitlines()

    def answer(self) -> dict[str, Any]:
        """The one line of `--json`."""
        (line,) = self.lines
        return json.loads(line)

    def wait(self) -> Self:
        """Until it ends; `code` is negative for a signal."""
        if self.code is None:
            self.code = self.launcher.ended()
        return self

    def signal(self, number: int) -> Self:
        os.kill(self.pid, number)
        return self

    def says(self, text: str) -> Self:
        """Until a text appears on standard error or the process has ended."""
        return self.when(lambda: text in self.err)

    def when(self, condition: Callable[[], bool]) -> Self:
        """Until a condition holds or the process has ended."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            if self.launcher.has_ended():
                return self.wait()
            if time.monotonic() > deadline:
                raise AssertionError(f"nothing happened in {WAIT_S:g} s; standard error:\n{self.err}")
            time.sleep(0.002)
        return self


class Launcher:
    """One command at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
        )

    def start(self, *arguments: str | Path, cwd: Path, file_bytes: int | None = None) -> Run:
        """Begin `tithe ARGUMENTS`. No file it writes may grow beyond `file_bytes`."""
        self._count += 1
        out, err = (self._folder / f"{self._count}.{name}" for name in ("out", "err"))
        out.touch()
        err.touch()
        order = {
            "arguments": [str(a) for a in arguments],
            "cwd": str(cwd),
            "out": str(out),
            "err": str(err),
            "file_bytes": file_bytes,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        return Run(self, self._read(), out, err)

    def run(self, *arguments: str | Path, cwd: Path, file_bytes: int | None = None) -> Run:
        """`start` and `wait`."""
        return self.start(*arguments, cwd=cwd, file_bytes=file_bytes).wait()

    def ended(self) -> int:
        return self._read()

    def has_ended(self) -> bool:
        return bool(select.select([self._process.stdout], [], [], 0)[0])

    def _read(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=WAIT_S)


# ------------------------------------------------------------------ the other side


def _child(order: Mapping[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(order["cwd"])
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if order["file_bytes"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["file_bytes"],) * 2)
    from tithe.cli.main import main

    code = 1
    try:
        code = main(order["arguments"])
    except BaseException:
        traceback.print_exc()
        raise
    finally:  # this copy of the launcher ends here, whatever happened
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve() -> None:
    import tithe.build  # noqa: F401  everything heavy, once

    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            answers.close()
            _child(json.loads(line))
        print(pid, file=answers, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
