"""Adapters of two ranks and every parameter, compared by the command itself on a tiny model.

`tithe capacity` starts `python -m tithe.cli train …` for each run; here the launcher does, which has imported
everything already.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.launcher import Launcher
from support.runs import RunFiles
from tithe.build import capacity
from tithe.config import load_config
from tithe.errors import UserError

pytestmark = pytest.mark.integration


class ByLauncher:
    """`subprocess.Popen` of one `tithe` command."""

    def __init__(self, launcher: Launcher, cwd: Path, command: Sequence[str], stdout: Any, stderr: Any) -> None:
        assert list(command[:3]) == [sys.executable, "-m", "tithe.cli"]
        self._run, self._streams = launcher.start(*command[3:], cwd=cwd), (stdout, stderr)
        self.pid = self._run.pid

    def poll(self) -> int | None:
        if self._run.code is None and self._run.launcher.has_ended():
            self._run.wait()
            for stream, text in zip(self._streams, (self._run.out, self._run.err), strict=True):
                stream.write(text)
        return self._run.code

    @property
    def returncode(self) -> int | None:
        return self._run.code


@pytest.fixture
def forked(launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("tithe.build.capacity")

    def begin(command: Sequence[str], stdout: Any, stderr: Any) -> ByLauncher:
        return ByLauncher(launcher, tmp_path, command, stdout, stderr)

    monkeypatch.setattr(module, "subprocess", SimpleNamespace(Popen=begin))


@pytest.mark.usefixtures("forked")
def test_both_curves_memory_and_time_of_each_run(files: RunFiles, tmp_path: Path) -> None:
    cfg = load_config(files.yaml, ["model.quantize=none", "run.eval_every=null"])
    result = capacity(cfg, tmp_path / "c", [2], 2, None)
    assert result == {**json.loads((tmp_path / "c" / "capacity.json").read_text()), **result}
    adapter, full = json.loads((tmp_path / "c" / "capacity.json").read_text())["runs"]
    assert (adapter["name"], full["name"]) == ("lora-r2", "full")
    for run in (adapter, full):
        assert [step for step, _ in run["held_out"]] == [0, 1, 2]
        assert [step for step, _ in run["reward"]] == [1, 2]
        assert run["peak_bytes"] > 50 << 20
        assert run["step_s"] > 0
    for curve in ("held_out", "reward"):  # one start: the first answers are the same ones
        assert adapter[curve][0] == full[curve][0]
    assert adapter["max_abs_dlogp"] == 0 < full["mean_abs_dlogp"] <= full["max_abs_dlogp"] < 0.5
    assert full["lr"] == pytest.approx(adapter["lr"] / 10)
    assert full["trained_state_bytes"] > 4 * adapter["trained_state_bytes"]
    gap = full["held_out"][-1][1] - adapter["held_out"][-1][1]
    assert result["gap_to_full"] == {"lora-r2": pytest.approx(gap)}
    assert str(result["text"]).splitlines()[0].startswith("run ")
    assert len(str(result["text"]).splitlines()) == 3


@pytest.mark.usefixtures("forked")
def test_a_run_that_fails_says_which_and_why(files: RunFiles, tmp_path: Path) -> None:
    cfg = load_config(files.yaml, ["lora.target_modules=[no_such_proj]", "model.quantize=none"])
    with pytest.raises(UserError, match=r"the run lora-r2 failed: .*no_such_proj"):
        capacity(cfg, tmp_path / "c", [2], 1, None)
