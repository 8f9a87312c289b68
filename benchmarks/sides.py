"""One measured side: a process that waits until it is asked, see `benchmarks.peers.protocol`."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.memory import PssSampler
from benchmarks.peer_env import CACHE, say

FAST_SAMPLING_S = 0.05
SLOW_SAMPLING_S = 1.0


class SideFailedError(RuntimeError):
    """A side ended without an answer; the message carries the end of its log."""


class Side:
    """A running side. `facts` is what it said when it was ready. Use as a context manager.

    Sides are started and measured one after the other; between two requests a side does nothing.
    """

    def __init__(self, name: str, command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._log_path = CACHE / "logs" / f"{name}.log"
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        # Tithe's own setting, which its side makes again; peers run as they come
        inherited = {key: value for key, value in os.environ.items() if key != "GOMP_SPINCOUNT"}
        say(f"starting {name} (log: {self._log_path.relative_to(CACHE.parent)})")
        with self._log_path.open("w") as log:
            self._process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=CACHE.parent,
                env={**inherited, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **(env or {})},
            )
        self._sampler = PssSampler(self._process.pid, FAST_SAMPLING_S)
        self.facts = self._read()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def measure(self, *, timed: bool = True, **request: Any) -> dict[str, Any]:
        """Ask for one measurement and wait for it. Memory is watched closely only when `timed` is false."""
        self._sampler.interval_s = SLOW_SAMPLING_S if timed else FAST_SAMPLING_S
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        say(f"{self.name}: " + ", ".join(f"{key} {_short(value)}" for key, value in answer.items()))
        return answer

    @property
    def peak_pss_bytes(self) -> int:
        """The largest PSS of the process tree so far."""
        return self._sampler.peak_bytes

    def close(self) -> None:
        """End the process and wait for it."""
        self._sampler.stop()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            tail = "".join(self._log_path.read_text().splitlines(keepends=True)[-30:])
            raise SideFailedError(f"{self.name} ended with code {code}:\n{tail}")
        return json.loads(line)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
