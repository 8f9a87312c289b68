"""Where the machine allows no sandbox there is none: never a weaker one."""

from __future__ import annotations

import pytest

from tithe.sandbox import Limits, Outcome, Sandbox, SandboxUnavailableError, StdioTest, host, rooms

TEST = [StdioTest("", "5")]


def test_a_machine_without_namespaces_refuses_and_says_how_to_allow_them(sandbox, monkeypatch):
    plan = rooms.Room.plan
    monkeypatch.setattr(rooms.Room, "plan", lambda *args: {**plan(*args), "root": "/nowhere"})
    with pytest.raises(SandboxUnavailableError, match="apt install bubblewrap"):
        Sandbox(mode="namespaces")


@pytest.mark.parametrize(
    "hole",
    ["must('x', False)", "import os\nmust_fail('listing /tmp', lambda: os.listdir('/tmp'))", "print('else')"],
)
def test_a_room_that_does_not_hold_what_it_promises_is_not_used(sandbox, monkeypatch, tmp_path, hole):
    proof = tmp_path / "proof.py"
    text = host._PROOF.read_text()
    proof.write_text(text.replace('print("confined")', f'{hole}\nprint("confined")'))
    monkeypatch.setattr(host, "_PROOF", proof)
    with pytest.raises(SandboxUnavailableError, match="does not hold here"):
        Sandbox(mode=sandbox.mode)


def test_bubblewrap_that_is_asked_for_and_missing_is_an_error(sandbox, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailableError, match="bubblewrap"):
        Sandbox(mode="bubblewrap")


@pytest.mark.parametrize("mode", ["bubblewrap", "namespaces"])
def test_each_mode_holds(sandbox, mode):
    try:
        opened = Sandbox(1, mode)
    except SandboxUnavailableError as error:
        pytest.skip(f"not on this machine: {error}")
    with opened:
        assert opened.run_tests("print(5)", TEST).reward == 1.0
        assert opened.run_tests("import os\nos.listdir('/proc/self')\nprint(5)", TEST).reward == 0.0


def test_a_harness_that_dies_abstains_and_the_next_program_gets_a_new_one(sandbox):
    with Sandbox(1, sandbox.mode) as own:
        own._zygote._process.kill()
        own._zygote._connection.close()
        assert own.run_tests("print(5)", TEST).outcome is Outcome.HARNESS
        assert own.run_tests("print(5)", TEST).reward == 1.0


def test_a_closed_sandbox_abstains(sandbox):
    own = Sandbox(1, sandbox.mode)
    own.close()
    own.close()
    assert own.run_tests("print(5)", TEST, Limits()).outcome is Outcome.HARNESS
