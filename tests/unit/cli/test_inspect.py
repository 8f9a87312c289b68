"""`tithe inspect`: one line of JSON, a table, exit codes, and neither torch nor half a second."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tithe
from support.checkpoints import build_gguf, build_hf
from support.refusals import answer_or_refusal
from tithe.arch import BASES, base_bytes, find_demo_model, known_config, known_names, read_checkpoint
from tithe.arch.inspection import inspect
from tithe.cli.main import main

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(tithe.__file__).parents[1])}


def answer_of(capfd: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["inspect", *arguments, "--json"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    (line,) = out.splitlines()
    return json.loads(line)


def test_json_is_one_line_with_groups_and_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    answer = answer_of(capfd, "kimi-k2-thinking", "--ranks", "8")
    assert answer["parameters"] == 1_026_408_232_448
    assert answer["bytes"] == 594_205_351_936 == sum(group["bytes"] for group in answer["groups"].values())
    assert answer["groups"]["routed_experts"] == {
        "tensors": 60 * 384 * 3,
        "parameters": 60 * 384 * 3 * 2048 * 7168,
        "bytes": 60 * 384 * 3 * 2048 * 7168 // 2,
    }
    assert answer["groups"]["scales"]["bytes"] == 60 * 384 * 3 * 2048 * 7168 // 32 * 2
    assert [rank["experts"] for rank in answer["by_rank"]] == [[48 * n, 48 * n + 48] for n in range(8)]
    for rank in answer["by_rank"]:
        assert rank["bytes"] == sum(rank["groups"].values()) == 94_789_574_656
    assert answer["kv_bytes_per_token_bf16"] == 70_272
    assert answer["can_run"]


def test_people_get_tables(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "deepseek-v3", "--ranks", "7"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert "671,026,419,200" in out
    assert "7 ranks do not divide 256 experts: the first 4 hold 37 of each layer, the others 36" in out
    assert "1 layer(s) for predicting further tokens are never loaded" in out
    assert "cannot be run" not in out
    assert [line.split()[0] for line in out.splitlines()[2:12]] == [
        "group", "embedding", "head", "attention", "dense", "shared", "routed", "router", "norms", "scales",
    ]  # fmt: skip


def test_what_no_run_loads_is_described_and_said(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = known_config("llama-3.1-8b") | {"hidden_act": "gelu"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["inspect", str(tmp_path / "config.json")]) == 0
    out, _ = capfd.readouterr()
    assert "cannot be run: hidden_act is 'gelu'" in out
    assert not answer_of(capfd, str(tmp_path / "config.json"))["can_run"]


def test_a_base_replaces_the_published_formats(capfd: pytest.CaptureFixture[str]) -> None:
    sizes = {base: answer_of(capfd, "kimi-k2", "--base", base)["bytes"] for base in ("bf16", "fp8", "int4", "mxfp4")}
    assert sizes["bf16"] == 2 * 1_026_408_232_448 + 2 * 60 * 384  # correction biases are float32
    assert sizes["fp8"] == answer_of(capfd, "kimi-k2")["bytes"]
    assert sizes["int4"] == answer_of(capfd, "kimi-k2-thinking")["bytes"]
    assert sizes["mxfp4"] < sizes["int4"] < sizes["fp8"]


def test_a_dense_model_is_whole_on_every_rank(capfd: pytest.CaptureFixture[str]) -> None:
    answer = answer_of(capfd, "llama-3.1-8b", "--ranks", "4")
    assert {rank["bytes"] for rank in answer["by_rank"]} == {answer["bytes"]}
    assert answer["notes"] == ["there are no experts to divide: every rank holds the whole model"]
    assert answer["can_run"]


def test_more_ranks_than_experts_leave_some_without(capfd: pytest.CaptureFixture[str]) -> None:
    answer = answer_of(capfd, "mixtral-8x7b", "--ranks", "10")
    assert [rank["experts"] for rank in answer["by_rank"]][-3:] == [[7, 8], [8, 8], [8, 8]]
    assert "routed_experts" not in answer["by_rank"][9]["groups"]


def test_files_and_directories(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A GGUF file and a directory are accounted as they lie there, a config alone or in its directory as it says."""
    gguf = build_gguf(tmp_path / "m.gguf", "qwen3_moe")
    assert answer_of(capfd, str(gguf), "--ranks", "2")["bytes"] == base_bytes(read_checkpoint(gguf))
    directory = build_hf(tmp_path / "hf", "qwen2", dtype="float32")
    files = answer_of(capfd, str(directory))
    assert files["bytes"] == base_bytes(read_checkpoint(directory))
    assert answer_of(capfd, str(directory), "--base", "bf16")["bytes"] == files["bytes"] // 2
    (directory / "model.safetensors").unlink()
    assert answer_of(capfd, str(directory))["bytes"] == files["bytes"]
    assert answer_of(capfd, str(directory / "config.json"))["groups"] == files["groups"]


def test_the_demos_model_weighs_what_a_run_holds(capfd: pytest.CaptureFixture[str]) -> None:
    answer = answer_of(capfd, str(find_demo_model()))
    assert answer["bytes"] == base_bytes(read_checkpoint(find_demo_model()))
    assert answer["parameters"] == 134_515_008


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kimi-k2-thinkin"], "no known model. Did you mean kimi-k2-thinking? Known: deepseek-r1"),
        (["nowhere/config.json"], "'nowhere/config.json' is no file or directory here"),
        (["EMPTY"], "has no config.json"),
        (["BROKEN"], "is not valid JSON"),
        (["SMALL"], "hidden_size is missing"),
        (["kimi-k2", "--base", "fp9"], "--base fp9: there is no such format. Did you mean fp8? Known: published, bf16"),
        (["kimi-k2", "--base", "zzz"], "--base zzz: there is no such format. Known: published"),
        (["kimi-k2", "--ranks", "0"], "--ranks 0: a whole number from 1 to 4096"),
        (["kimi-k2", "--ranks", "two"], "--ranks: invalid int value: 'two'"),
        (["kimi-k2", "a=b"], "unknown argument 'a=b'"),
        ([], "the following arguments are required: MODEL"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_two(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "small.json").write_text('{"model_type": "llama", "num_attention_heads": 1}')
    named = {"EMPTY": "empty", "BROKEN": "broken.json", "SMALL": "small.json"}
    arguments = [str(tmp_path / named[text]) if text in named else text for text in arguments]
    assert main(["inspect", *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert message in err
    assert main(["inspect", *arguments, "--json"]) == 2
    (line,) = capfd.readouterr().out.splitlines()
    assert message in json.loads(line)["error"]


def test_help_names_every_base(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["inspect", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert all(base in shown for base in BASES)


def test_every_known_model_is_inspected_by_any_spelling() -> None:
    for name in known_names():
        assert inspect(name.upper())["bytes"] == inspect(f"owner/{name}", "published", 8)["bytes"] > 10**8


_ODD = st.sampled_from([None, "x", -1, 0, True, [], [[]], {}, {"a": []}, 1e300, 2**70, float("nan"), 3])


@given(data=st.data())
def test_no_config_value_escapes_as_another_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    config = known_config(data.draw(st.sampled_from(["kimi-k2-thinking", "gpt-oss-20b", "minimax-m2", "glm-4.5"])))
    for key in data.draw(st.lists(st.sampled_from([*config, "layer_types", "quantization_config"]), max_size=2)):
        config[key] = data.draw(_ODD)
    path = tmp_path_factory.getbasetemp() / "odd.json"
    path.write_text(json.dumps(config))
    found, said = answer_or_refusal(inspect, str(path), data.draw(st.sampled_from(["published", "int4", "fp8"])), 3)
    assert said or found["bytes"] > 0


COMMAND = """
import sys
from tithe.cli.main import main
assert main(["inspect", "kimi-k2-thinking", "--ranks", "8", "--json"]) == 0
heavy = ("torch", "transformers", "numpy", "pydantic", "safetensors", "tithe.build", "tithe.config")
assert not [name for name in heavy if name in sys.modules]
"""


def test_it_needs_neither_torch_nor_numpy() -> None:
    run = subprocess.run([sys.executable, "-c", COMMAND], check=True, capture_output=True, text=True, env=ENVIRONMENT)
    assert json.loads(run.stdout)["bytes"] == 594_205_351_936


@pytest.mark.liveness
def test_a_trillion_parameters_take_less_than_a_second() -> None:
    """Of processor time, start included; about 0.12 s."""

    def seconds() -> float:
        before = os.times()
        subprocess.run([sys.executable, "-c", COMMAND], check=True, capture_output=True, env=ENVIRONMENT)
        after = os.times()
        return after.children_user - before.children_user + after.children_system - before.children_system

    assert min(seconds() for _ in range(3)) < 1
