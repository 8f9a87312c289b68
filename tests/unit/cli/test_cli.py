"""The command line: what is called with what, what is printed where, and every exit code."""

import errno
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tithe
from tithe.cli.answer import to_plain
from tithe.cli.commands import HANDLERS
from tithe.cli.main import main
from tithe.config import CONFIG_FILE, demo_config, dump_resolved, load_config
from tithe.errors import AdapterError, ConfigError, NonFiniteError

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(tithe.__file__).parents[1])}
FUNCTIONS = ("train", "check", "resume", "evaluate", "sample", "parity", "report", "capacity", "demo")


class FakeBuild(types.ModuleType):
    """Records calls; `ending` is raised or returned."""

    def __init__(self):
        super().__init__("tithe.build")
        self.calls = []
        self.ending = {"answer": 42}
        for name in FUNCTIONS:
            setattr(self, name, self._recorder(name))

    def _recorder(self, name: Any):
        def call(*arguments: Any):
            self.calls.append((name, *arguments))
            print("a stray print")
            if isinstance(self.ending, BaseException):
                raise self.ending
            return self.ending

        return call


@pytest.fixture
def build(monkeypatch: Any, tmp_path: Any):
    fake = FakeBuild()
    monkeypatch.setitem(sys.modules, "tithe.build", fake)
    monkeypatch.chdir(tmp_path)
    return fake


@pytest.fixture
def run_file(tmp_path: Any):
    path = tmp_path / "sums.yaml"
    path.write_text("optimizer: {lr: 2e-5}\n")
    return path


@pytest.fixture
def run_dir(tmp_path: Any):
    directory = tmp_path / "old"
    directory.mkdir()
    (directory / CONFIG_FILE).write_text(dump_resolved(load_config(None)))
    return directory


def one_line(text: Any):
    (line,) = text.splitlines()
    return json.loads(line)


def test_each_command_calls_its_build_function_with_the_documented_arguments(
    build: Any, run_file: Any, run_dir: Any, tmp_path: Any
):
    change = "run.max_steps=7"
    cfg = load_config(run_file, [change])
    expected = {
        ("train", str(run_file), change): ("train", cfg, tmp_path / "runs" / "sums"),
        ("check", str(run_file), change): ("check", cfg),
        ("resume", str(run_dir), change): ("resume", run_dir, [change]),
        ("eval", str(run_dir), change): ("evaluate", run_dir, [change]),
        ("eval", str(run_file)): ("evaluate", run_file, []),
        ("sample", str(run_dir), "3 + 4 = ?", change): ("sample", run_dir, "3 + 4 = ?", [change]),
        ("parity", str(run_file), change): ("parity", cfg),
        ("parity", str(run_dir)): ("parity", run_dir),
        ("report", str(run_dir)): ("report", run_dir),
        ("capacity", str(run_file), change, "--ranks", "2,8", "--steps", "3"): (
            "capacity",
            cfg,
            tmp_path / "runs" / "sums",
            [2, 8],
            3,
            None,
            None,
        ),
        ("capacity", str(run_file), change, "--full-lr", "1e-6", "--copy", "int4"): (
            "capacity",
            cfg,
            tmp_path / "runs" / "sums",
            [4, 32],
            None,
            1e-6,
            "int4",
        ),
        ("demo", change): ("demo", [change]),
    }
    for arguments, call in expected.items():
        build.calls.clear()
        assert main(arguments) == 0
        assert build.calls == [call]
    without_build = {
        "inspect",
        "simulate",
        "plan",
        "compare",
        "verify",
        "reward-model",
    }  # the last has tests of its own
    assert {arguments[0] for arguments in expected} == set(HANDLERS) - without_build


def test_json_is_one_line_on_standard_output_and_all_else_is_on_error(build: Any, run_file: Any, capfd: Any):
    build.ending = {
        "text": "for people",
        "path": Path("x"),
        "score": np.float32(0.5),
        "nan": float("nan"),
        "n": np.int64(3),
    }
    assert main(["train", str(run_file), "--json", "lora.dropout=0.5"]) == 0
    out, err = capfd.readouterr()
    assert one_line(out) == {"path": "x", "score": 0.5, "nan": None, "n": 3}
    assert "a stray print" in err
    assert "tithe: warning: lora.dropout = 0.5" in err


def test_even_file_descriptor_one_is_kept_clean(build: Any, run_file: Any, capfd: Any):
    build.check = lambda cfg: subprocess.run(["echo", "from a child"], check=True) and {"ok": True}
    assert main(["check", "--json", str(run_file)]) == 0
    out, err = capfd.readouterr()
    assert one_line(out) == {"ok": True}
    assert "from a child" in err
    print("afterwards")
    assert capfd.readouterr().out == "afterwards\n"


def test_people_get_the_text_or_the_keys(build: Any, run_file: Any, capsys: Any):
    build.ending = {"text": "before 0.1 → after 0.9", "after": 0.9}
    main(["train", str(run_file)])
    assert capsys.readouterr().out.splitlines()[-1] == "before 0.1 → after 0.9"
    build.ending = {"after": 0.9, "minutes": 3}
    main(["check", str(run_file)])
    assert capsys.readouterr().out.splitlines()[-2:] == ["after    0.9", "minutes  3"]


@pytest.mark.parametrize(
    ("ending", "code", "message"),
    [
        (AdapterError("no such module"), 2, "tithe: no such module"),
        (ConfigError("rl.x = 1 is wrong", key="rl.x"), 2, "tithe: rl.x = 1 is wrong"),
        (NonFiniteError("three in a row"), 1, "tithe: three in a row"),
        (KeyboardInterrupt(), 130, "tithe: interrupted"),
        (OSError(errno.ENOSPC, "No space left on device", "pool.sqlite"), 2, "tithe: pool.sqlite: no space left"),
        (ModuleNotFoundError("No module named 'torch'", name="torch.nn"), 2, "pip install -e '.[train]'"),
    ],
)
def test_every_ending_has_one_exit_code_one_message_and_no_traceback(
    build: Any, run_file: Any, capfd: Any, ending: Any, code: Any, message: Any
):
    build.ending = ending
    assert main(["check", str(run_file)]) == code
    out, err = capfd.readouterr()
    assert out == "a stray print\n"
    assert message in err
    assert "Traceback" not in err

    assert main(["check", str(run_file), "--json"]) == code
    out, _ = capfd.readouterr()
    answer = one_line(out)
    assert answer["kind"] == type(ending).__name__
    assert answer.get("key") == getattr(ending, "key", None)


@pytest.mark.parametrize(
    "ending",
    [ZeroDivisionError("a fault"), OSError(errno.EBADF, "bad"), ModuleNotFoundError("No module named 'x'", name="x")],
)
def test_a_fault_of_tithe_keeps_its_traceback_and_still_answers_in_one_line(
    build: Any, run_file: Any, capfd: Any, ending: Any
):
    build.ending = ending
    with pytest.raises(type(ending)):
        main(["check", str(run_file), "--json"])
    answer = one_line(capfd.readouterr().out)
    assert answer == {"error": str(ending), "kind": type(ending).__name__}


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["trian"],
        ["train"],
        ["train", "a.yaml", "--jsno"],
        ["train", "a.yaml", "--dry"],
        ["train", "a.yaml", "--dry-run", "stray"],
        ["report", "dir", "a=b"],
        ["report", "dir", "--dry-run"],
        ["sample", "dir"],
    ],
)
def test_usage_errors_exit_with_two_and_import_nothing(build: Any, capfd: Any, arguments: Any):
    assert main(arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("tithe: ")
    assert build.calls == []
    assert main([*arguments, "--json"]) == 2
    assert one_line(capfd.readouterr().out)["kind"] == "UsageError"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "missing.yaml"], "missing.yaml cannot be read: No such file"),
        (["train", "RUN", "rl.clip_rnage=1"], "did you mean the key rl.clip_range?"),
        (["train", "RUN", "optimizer.lr=-1"], "optimizer.lr = -1 is not allowed"),
        (["train", "RUN", "optimizer.lr"], "must look like section.key=value"),
        (["check", "RUN", "rl.batch_size_per_update=12"], "rl.samples_per_prompt = 8"),
        (["resume", "missing"], "does not exist"),
        (["resume", "DIR", "optimizer.lr=1e-3"], "optimizer.lr: a resume cannot change it"),
        (["eval", "missing"], "cannot be read"),
        (["sample", "RUN", "hello"], "is no run directory"),
        (["report", "."], "has no config.yaml"),
        (["parity", "DIR", "run.seed=1"], "give a run file"),
        (["demo", "run.max_steps=0"], "run.max_steps = 0"),
    ],
)
def test_bad_input_is_one_clear_message_before_anything_is_built(
    build: Any, run_file: Any, run_dir: Any, capsys: Any, arguments: list[str], message: str
):
    named = {"RUN": str(run_file), "DIR": str(run_dir)}
    before = sorted(Path.cwd().rglob("*"))
    assert main([named.get(text, text) for text in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert build.calls == []
    assert sorted(Path.cwd().rglob("*")) == before


def test_overrides_may_stand_on_both_sides_of_options(build: Any, run_file: Any):
    main(["train", str(run_file), "run.seed=1", "--json", "run.seed=2", "lora.r=4"])
    ((_, cfg, _),) = build.calls
    assert (cfg.run.seed, cfg.lora.r) == (2, 4)


def test_dry_run_prints_a_run_file_and_builds_nothing(
    build: Any, run_file: Any, run_dir: Any, tmp_path: Any, capsys: Any
):
    before = sorted(tmp_path.rglob("*"))
    assert main(["train", str(run_file), "--dry-run", "lora.dropout=0.5"]) == 0
    out, err = capsys.readouterr()
    assert "lora.dropout = 0.5" in err
    again = tmp_path / "again.yaml"
    again.write_text(out)
    assert load_config(again) == load_config(run_file, ["lora.dropout=0.5"])
    again.unlink()
    for arguments in (
        ["resume", run_dir],
        ["eval", run_dir],
        ["sample", run_dir, "x"],
        ["parity", run_file],
        ["check", run_file],
    ):
        assert main([*map(str, arguments), "--dry-run"]) == 0
    assert build.calls == []
    assert sorted(tmp_path.rglob("*")) == before


def test_dry_run_as_json_holds_configuration_and_warnings(build: Any, capfd: Any):
    assert main(["demo", "--dry-run", "--json", "rollout.top_p=0.5"]) == 0
    answer = one_line(capfd.readouterr().out)
    assert answer["config"] == demo_config(["rollout.top_p=0.5"]).model_dump(mode="json")
    assert len(answer["warnings"]) == 1


def test_a_taken_run_directory_gets_a_number_unless_it_was_given(build: Any, run_file: Any, tmp_path: Any, capsys: Any):
    used = tmp_path / "runs" / "sums"
    used.mkdir(parents=True)
    main(["train", str(run_file)])
    assert build.calls[-1][2] == used  # empty: free
    (used / "pool.sqlite").touch()
    main(["train", str(run_file)])
    assert build.calls[-1][2] == used.with_name("sums-2")
    assert build.calls[-1][1].run.dir == str(used.with_name("sums-2"))
    used.with_name("sums-2").touch()
    main(["train", str(run_file)])
    assert build.calls[-1][2] == used.with_name("sums-3")
    assert main(["train", str(run_file), f"run.dir={used}"]) == 2
    assert f"tithe resume {used}" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"]])
def test_help_and_version_succeed(arguments: Any, capsys: Any):
    if arguments == ["--version"]:
        assert main(arguments) == 0
    else:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
    assert "tithe" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train"], "the following arguments are required: RUN.yaml\n"),
        (["train", "--version", "x.yaml"], "unknown argument '--version'"),
        (["--version", "train", "x.yaml"], "--version stands alone"),
        (["report", "a" * 300], "the name is longer than the system allows"),
        (["resume", "~nobody-here/run"], "begins with a home folder that is not known"),
    ],
)
def test_a_slip_is_told_in_one_place_and_does_nothing(build: Any, capsys: Any, arguments: Any, says: str):
    assert main(arguments) == 2
    assert says in capsys.readouterr().err
    assert build.calls == []


def test_help_needs_the_standard_library_alone_and_a_dry_run_no_torch(run_file: Any):
    code = f"""
import sys
from tithe.cli.main import main
try:
    main(["--help"])
except SystemExit:
    pass
heavy = ("asyncio", "pydantic", "yaml", "numpy", "torch", "transformers", "tithe.build", "tithe.config")
assert not [name for name in heavy if name in sys.modules]
assert main(["train", {str(run_file)!r}, "--dry-run"]) == 0
assert not [name for name in ("numpy", "torch", "transformers", "numba", "tithe.build") if name in sys.modules]
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=run_file.parent, env=ENVIRONMENT)


def test_a_reader_that_goes_away_is_no_traceback(run_file: Any):
    run = f"{sys.executable} -m tithe.cli train {run_file} --dry-run"
    command = f"(sleep 0.1; {run}) | true; echo ${{PIPESTATUS[0]}}"
    # The writer starts late, so that its reader has gone before the first byte.
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert (done.stdout.strip(), done.stderr) == ("1", "")


def test_plain_values_are_json_types_and_others_a_fault():
    value = {1: (np.bool_(True), np.float64("inf")), "array": [np.int32(2)], "path": Path("/a"), "none": None}
    assert to_plain(value) == {"1": [True, None], "array": [2], "path": "/a", "none": None}
    with pytest.raises(TypeError, match="cannot hold object"):
        to_plain({"a": object()})


@pytest.mark.parametrize(
    "options", [("--ranks", "4,x"), ("--ranks", "0"), ("--ranks", "4,4"), ("--steps", "0"), ("--full-lr", "-1")]
)
def test_capacity_refuses_numbers_that_mean_nothing(build: Any, run_file: Any, capsys: Any, options: Any):
    assert main(["capacity", str(run_file), *options]) == 2
    assert options[0] in capsys.readouterr().err
    assert build.calls == []
