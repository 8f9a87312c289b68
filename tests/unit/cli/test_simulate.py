"""`tithe simulate`: one line of JSON, a table, a page, exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import tithe
from tithe.cli.main import main

COSTS = "tick_fixed_s=0.02,decode_s_per_sequence=0.001,train_s_per_token=0.001,publish_s=0.2"
SPEED = ["--costs", COSTS, "--new-tokens", "lognormal:30,0.7", "--reward-s", "exp:0.5", "--steps", "12"]


@pytest.fixture
def run_file(tmp_path) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "rl: {samples_per_prompt: 4, batch_size_per_update: 8, max_policy_update_lag: 2}\n"
        "reward: {function: 'judges:score', workers: 6}\n"
    )
    return str(path)


def answer_of(capfd, *arguments):
    assert main(["simulate", *arguments, "--json"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    (line,) = out.splitlines()
    return json.loads(line)


def test_json_is_one_line_with_setting_twin_and_units(capfd, run_file):
    found = answer_of(capfd, run_file, *SPEED)
    setting, twin = found["setting"], found["synchronous"]
    assert (setting["mode"], twin["mode"]) == ("async", "sync")
    assert found["speed_over_sync_ratio"] == pytest.approx(twin["step_s"] / setting["step_s"])
    assert found["speed_over_sync_ratio"] > 1.2
    assert sum(setting["age_histogram_frac"].values()) == pytest.approx(1)
    assert set(setting["utilisation"]) == {"shared"}
    assert 0 < setting["reward_worker_busy_frac"] <= 1
    assert any("--prompt-tokens is not given" in text for text in found["assumptions"])
    assert "sweep" not in found


def test_every_figure_of_the_json_is_in_the_documented_schema(capfd, run_file):
    page = (Path(tithe.__file__).parents[2] / "docs" / "simulator.md").read_text()
    found = answer_of(capfd, run_file, *SPEED, "--sweep", "lag=0,2")
    names = {*found, *found["setting"], *found["sweep"][0], *found["best"], *found["setting"]["utilisation"]["shared"]}
    assert {name for name in names if f"`{name}`" not in page} == set()


def test_overrides_and_seed_change_what_is_simulated(capfd, run_file):
    def step_s(*more):
        return answer_of(capfd, run_file, *SPEED, *more)["setting"]["step_s"]

    assert step_s("rl.max_policy_update_lag=0") > 1.2 * step_s()
    assert step_s("--seed", "0") == step_s() != step_s("--seed", "1")
    assert step_s("reward.workers=1") > 1.2 * step_s()


def test_people_get_a_table_and_the_best_setting(capfd, run_file):
    assert main(["simulate", run_file, *SPEED, "--sweep", "lag=0,1,2,4", "--sweep", "sync_every=1,2"]) == 0
    out, _ = capfd.readouterr()
    assert re.search(r"^best: rl\.max_policy_update_lag=\d rl\.sync_every=\d engine\.max_running=64", out, re.MULTILINE)
    assert len(re.findall(r"^(?:sync|one-step-off|async) +shared base", out, re.MULTILINE)) == 6
    assert "2 combinations left out" in out


def test_separate_sides_and_failures(capfd, run_file):
    more = ["--split", "2:1", "--failure-rate", "0.2", "--crash-hours", "0.002", "--restart-s", "5"]
    setting = answer_of(capfd, run_file, *SPEED, *more, "--steps", "40")["setting"]
    assert set(setting["utilisation"]) == {"rollout-0", "rollout-1", "train"}
    assert setting["failed_rollouts"] > 0 < setting["crashes"]


def test_the_page_is_well_formed_and_loads_nothing(capfd, run_file, tmp_path):
    page = tmp_path / "page.html"
    assert main(["simulate", run_file, *SPEED, "--sweep", "lag=0,1", "--html", str(page)]) == 0
    assert f"page: {page}" in capfd.readouterr().out
    text = page.read_text()
    assert "<script" not in text
    assert not re.search(r"(?:src|href)=.https?:", text)
    body = text[text.index("<body>") : text.index("</body>") + len("</body>")]
    tree = ElementTree.fromstring(body)
    names = {"".join(h.itertext()) for h in tree.iter("h2")}
    assert names == {"Where the time goes", "How old samples are", "Settings compared", "Assumed"}
    assert len(list(tree.iter("svg"))) > 5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--costs"),
        (["--costs", "tick_fixed_s=1"], "--new-tokens"),
        (["--costs", "speed=1", "--new-tokens", "3"], "--costs 'speed=1'"),
        (["--costs", "tick_fixed_s=-1", "--new-tokens", "3"], "--costs 'tick_fixed_s=-1'"),
        ([*SPEED, "--reward-s", "slow"], "--reward-s = 'slow'"),
        ([*SPEED, "--sweep", "gpus=1"], "--sweep 'gpus=1'"),
        ([*SPEED, "--split", "4"], "--split = '4'"),
        ([*SPEED, "--steps", "0"], "--steps = 0"),
        ([*SPEED, "--failure-rate", "2"], "--failure-rate = 2"),
        ([*SPEED, "--crash-hours", "0"], "--crash-hours = 0"),
        ([*SPEED, "rl.max_policy_lag=1"], "rl.max_policy_update_lag"),
    ],
)
def test_bad_input_ends_with_the_option_that_is_wrong(capfd, run_file, arguments, said):
    assert main(["simulate", run_file, *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert said in err
    assert "Traceback" not in err


def test_a_directory_that_is_no_run_is_refused(capfd, tmp_path):
    assert main(["simulate", str(tmp_path)]) == 2
    assert "no config.yaml" in capfd.readouterr().err


def test_no_torch_is_loaded(run_file):
    arguments = ["simulate", run_file, *SPEED, "--json"]
    code = f"import sys\nfrom tithe.cli.main import main\nassert main({arguments!r}) == 0\n"
    code += "assert 'torch' not in sys.modules"
    source = str(Path(tithe.__file__).parents[1])
    ended = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": source}, capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr
