"""A tiny run's files, a launcher of commands, and one unbroken synchronous run that many tests look at."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.launcher import Launcher, command_line
from support.runs import RunFiles, write_run_files
from support.threads import one_thread


@dataclass(frozen=True)
class Unbroken:
    """The run, and what the command printed."""

    run_dir: Path
    process: subprocess.CompletedProcess[str]

    @property
    def answer(self) -> dict[str, Any]:
        return json.loads(self.process.stdout)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> RunFiles:
    return write_run_files(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path_factory.mktemp("output"))
    yield launcher
    launcher.close()


@pytest.fixture(scope="session")
def unbroken(files: RunFiles) -> Unbroken:
    """Read only: `tithe train tiny.yaml --json` in a new interpreter, from another directory than the run file's."""
    run_dir = files.folder / "unbroken"
    process = command_line(["train", files.yaml, f"run.dir={run_dir}", "--json"], cwd=files.folder.parent)
    assert process.returncode == 0, process.stderr
    return Unbroken(run_dir, process)
