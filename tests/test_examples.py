"""The examples do what they show: the loop in one file on a tiny model, the run file on its own data and reward."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from itertools import takewhile
from pathlib import Path

import pytest

from support.checkpoints import build_gguf
from tithe.arch import ArchSpec, account, known_config, make_base
from tithe.cli.main import main
from tithe.config import config_warnings, load_config, schedule_of
from tithe.envs import build_tools, load_task
from tithe.rewards import build_reward
from tithe.rewards.code import find_program
from tithe.rewards.grading import Grader
from tithe.sandbox import Sandbox, SandboxUnavailableError, parse_tests

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "minimal_rl.py"
HIGHEST = "trainer"
"""The room whose floor is the highest that the readable file may use."""


@pytest.mark.integration
def test_the_loop_in_one_file_learns_on_a_packed_model_without_a_gap(tmp_path):
    # a head of its own: under a tied one a random model repeats its last token, and all rewards would be equal
    model = build_gguf(tmp_path / "tiny.gguf", "llama", linear="Q4_1", tie_word_embeddings=False)
    command = [sys.executable, "-W", "error", str(SCRIPT), "--model", str(model)]
    run = subprocess.run(
        [*command, "--steps", "2", "--prompts", "2", "--samples", "4"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONIOENCODING": "utf-8"},
    )
    assert run.returncode == 0, run.stderr
    steps = re.findall(r"step +(\d+)  reward ([-+.\d]+) .* max \|Δlog-prob\| (\S+)  now serving (\S+)", run.stdout)
    assert [int(step) for step, *_ in steps] == [1, 2]
    assert [float(gap) for _, _, gap, _ in steps] == [0.0, 0.0]
    assert all(-0.5 <= float(reward) <= 1.0 for _, reward, _, _ in steps)
    assert [re.fullmatch(r"minimal-0-v(\d)-[0-9a-f]{8}", name)[1] for *_, name in steps] == ["1", "2"]
    assert len({name.rpartition("-")[2] for *_, name in steps}) == 2, "a step that changes nothing repeats the checksum"


def rooms_up_to(room: str) -> set[str]:
    """Rooms on the floor of `room` and below, as the import contract lists them (highest floor first)."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    floors = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    rooms = [set(re.findall(r"\w+", floor)) for floor in floors]
    above = list(takewhile(lambda names: room not in names, rooms))
    return set[str]().union(*rooms[len(above) :])


def test_the_one_file_is_short_and_stands_on_low_floors():
    text = SCRIPT.read_text()
    assert len(text.splitlines()) <= 200
    imported = {
        module
        for node in ast.walk(ast.parse(text))
        for module in ([node.module] if isinstance(node, ast.ImportFrom) else [])
        + ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [])
    }
    used = {module.split(".")[1] for module in imported if module.startswith("tithe.")}
    allowed = rooms_up_to(HIGHEST)
    assert {"trainer", "engines", "models", "types"} <= used
    assert not {"orchestration", "build", "cli"} & allowed
    assert used - allowed == set()
    assert "config" not in used


def test_the_run_file_finds_its_data_and_its_reward(monkeypatch):
    monkeypatch.chdir(ROOT)
    cfg = load_config("examples/own_data.yaml")
    task = load_task(cfg.task, needs_answer=False)
    assert (len(task.train), len(task.eval)) == (8, 4)
    assert task.report.broken == ()
    grader = Grader(build_reward(cfg.reward, cfg.rl.reward_shaping))
    for item in (*task.train, *task.eval):
        right = f"It is {item.answer} {item.extra['unit']}."
        assert grader.grade(item, right, {"finish": "stop", "token_ids": []}).value == pytest.approx(1.2)
        assert grader.grade(item, "It is", {"finish": "length", "token_ids": []}).value == pytest.approx(-0.2)


@pytest.mark.parametrize("name", ["code", "calculator", "reasoning"])
def test_every_run_file_loads_with_its_task(monkeypatch, name):
    monkeypatch.chdir(ROOT)
    cfg = load_config(f"examples/{name}.yaml")
    task = load_task(cfg.task)
    assert len(task.eval) == cfg.task.eval_size
    assert len(task.train) >= 12
    assert all(item.answer for item in task.train)
    assert [tool.name for tool in build_tools(cfg.task.tools, [])] == list(cfg.task.tools)


def test_no_constant_passes_a_code_task_and_the_file_is_what_its_script_writes(monkeypatch):
    monkeypatch.chdir(ROOT)
    written = subprocess.run([sys.executable, "examples/code_tasks.py"], capture_output=True, text=True, check=True)
    assert written.stdout == (ROOT / "examples" / "code_tasks.jsonl").read_text()
    rows = [json.loads(line) for line in written.stdout.splitlines()]
    assert len({row["prompt"] for row in rows}) == len(rows) > 200
    for row in rows:
        assert len({json.dumps(test["expected"]) for test in row["answer"]["tests"]}) > 1, row["prompt"]


def test_the_code_tasks_pay_their_own_solutions_and_no_broken_ones(monkeypatch):
    monkeypatch.chdir(ROOT)
    try:
        sandbox = Sandbox()
    except SandboxUnavailableError as error:
        pytest.skip(f"no sandbox of full strength here, and there is no weaker one: {error}")
    task = load_task(load_config("examples/code.yaml").task)
    with sandbox:
        for item in (*task.train, *task.eval):
            tests, solution = parse_tests(item.answer), find_program(f"Sure:\n```python\n{item.extra['solution']}\n```")
            assert solution, item
            assert sandbox.run_tests(solution, tests).reward == 1.0
            assert sandbox.run_tests(solution.replace("return ", "return None and "), tests).reward == 0.0


def test_the_data_show_both_forms_of_a_prompt():
    lines = (ROOT / "examples" / "own_data.jsonl").read_text().splitlines()
    assert len(lines) == 12
    assert {type(ast.literal_eval(line)["prompt"]) for line in lines} == {str, list}


def test_the_example_of_a_schedule_has_its_phases_and_nothing_doubtful():
    cfg = load_config(ROOT / "examples" / "schedule.yaml")
    schedule = schedule_of(cfg)
    assert [(v.name, start) for v, start in zip(schedule.values, schedule.starts, strict=True)] == [
        ("explore", 0),
        ("converge", 12),
        ("refine", 24),
    ]
    assert config_warnings(cfg) == []


KIMI = ROOT / "examples" / "kimi-k2-one-node"


def test_the_run_file_of_kimi_resolves_and_is_the_one_that_is_planned(monkeypatch, capsys):
    """The first line of plan.txt is the command that made the others: its numbers are the run file's."""
    monkeypatch.chdir(ROOT)
    cfg = load_config(KIMI / "run.yaml")
    assert config_warnings(cfg) == []
    plan = (KIMI / "plan.txt").read_text()
    command, _, printed = plan.partition("\n")
    assert main(command.removeprefix("$ tithe ").split()) == 0
    assert capsys.readouterr().out == printed, "made anew by the command in its first line"
    asked = dict(re.findall(r"--([a-z-]+) ([^\s-]\S*)", command))
    assert asked["lora-targets"].split(",") == list(cfg.lora.target_modules)
    numbers = {name: int(value) for name, value in asked.items() if value.isdecimal()}
    assert numbers == {
        "lora-r": cfg.lora.r,
        "context": cfg.model.max_context,
        "prompt": cfg.rollout.max_prompt_tokens,
        "new": cfg.rollout.max_new_tokens // 2,  # mean length: planned at half of the longest
        "sequences": cfg.run.ranks * cfg.engine.max_running,
        "batch": cfg.rl.batch_size_per_update,
        "steps": cfg.run.max_steps,
        "live-versions": cfg.engine.max_live_versions,
        "micro-batch-tokens": cfg.rl.micro_batch_tokens,
    }
    config = known_config("kimi-k2-thinking")
    (rank, *_) = account(ArchSpec.from_config(config), make_base("published", config), cfg.run.ranks).ranks
    assert f"{rank.total.n_bytes:,}" in plan
