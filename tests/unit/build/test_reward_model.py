"""`tithe reward-model`, and a run that is paid by what it wrote; all on a tiny base, in this process."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.classifiers import build_classifier
from support.runs import RunFiles, query, write_run_files
from support.threads import one_thread
from tithe.build import resume, train
from tithe.cli.main import main
from tithe.config import load_config
from tithe.errors import ConfigError, ResumeError
from tithe.scorers import read_manifest


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> RunFiles:
    return write_run_files(tmp_path_factory.mktemp("run"))


def rows() -> list[dict[str, Any]]:
    """Preferred are replies of digits over replies of letters; some prompts are chats, some come twice."""
    made: list[dict[str, Any]] = []
    for i in range(60):
        text = f"the answer {i % 45} ="
        prompt: Any = [{"role": "user", "content": text}] if i % 2 else text
        made.append({"prompt": prompt, "chosen": f"{i * 37}0{i}", "rejected": "an other"[: 3 + i % 6], "id": i})
    return made


def write(path: Path, made: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row) if not isinstance(row, str) else row}\n" for row in made))
    return path


def settings(files: RunFiles) -> list[str]:
    sizes = ["model.max_context=64", "rollout.max_prompt_tokens=48", "rollout.max_new_tokens=8"]
    model = [f"model.path={files.model}", "model.compute=packed", "model.compute_dtype=fp32", "model.quantize=int4"]
    return [*model, *sizes, "lora.r=4", "lora.alpha=8", "optimizer.lr=1e-2", "run.threads=1"]


def command(capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, dict[str, Any], str]:
    code = main(["reward-model", *map(str, arguments), "--json"])
    told = capfd.readouterr()
    return code, json.loads(told.out.splitlines()[-1]) if told.out else {}, told.err


@pytest.fixture(scope="module")
def judge(files: RunFiles) -> tuple[Path, dict[str, Any]]:
    """A reward model on the tiny run's base, and the command's answer."""
    out = files.folder / "judge"
    pairs = write(files.folder / "pairs.jsonl", rows())
    from tithe.build import PairOptions, train_reward_model
    from tithe.envs.pairs import read_pairs

    cfg = load_config(None, settings(files))
    options = PairOptions(epochs=2, batch=8, held_out=0.25)
    return out, train_reward_model(read_pairs(pairs), pairs, cfg, out, options)


def test_it_ranks_what_was_held_out_and_says_how_well(judge: tuple[Path, dict[str, Any]]) -> None:
    out, answer = judge
    assert answer["accuracy"] > 0.9
    assert answer["ci95"][0] <= answer["accuracy"] <= answer["ci95"][1]
    assert answer["loss"] < 0.5
    assert answer["pairs"] + answer["held_out_pairs"] == 60
    assert answer["steps"] == 2 * -(-answer["pairs"] // 8)
    manifest = read_manifest(out)
    assert manifest.version == answer["version"]
    assert (manifest.accuracy, manifest.held_out_pairs) == (answer["accuracy"], answer["held_out_pairs"])
    assert {path.name for path in out.iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "score_head.safetensors", "reward_model.json",
    }  # fmt: skip


def test_a_run_is_paid_by_it_and_the_pool_says_by_whom(
    files: RunFiles, judge: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    out, answer = judge
    classifier = build_classifier(tmp_path / "classifier", "llama")
    parts = [
        {"name": "first", "function": f"model:{classifier}", "kind": "shaping", "weight": 0.5},
        {"name": "digits", "function": f"{files.reward}:pay", "kind": "rule", "weight": 1.0},
    ]
    path = files.write(
        "paid",
        reward={"function": f"model:{out}", "parts": parts, "model_quantize": "int4"},
        run={"max_steps": 2, "eval_every": None},
    )
    run_dir = tmp_path / "run"
    train(load_config(path, [f"run.dir={run_dir}"]), run_dir)
    found = query(run_dir, "SELECT reward, reward_parts, grader, cause FROM rollouts WHERE state = 'trained'")
    assert len(found) == 16
    for reward, told, grader, cause in found:
        assert cause is None
        paid = {name: value for name, value in json.loads(told).items() if not name.startswith("fact.")}
        assert reward == pytest.approx(sum(paid.values()))
        assert {"first", "digits"} <= paid.keys()
        names = grader.split(", ")
        assert names[0] == f"model@{answer['version']}"
        assert names[1].endswith("-int4")
    scores = {json.loads(told).get("model", json.loads(told).get("fact.unpaid.model")) for _, told, _, _ in found}
    assert len(scores) > 4
    memory = json.loads((run_dir / "run.json").read_text())["memory"]
    assert memory["reward_model_bytes"] > 4 * 64


def test_a_resume_with_other_bytes_than_paid_the_run_is_refused(
    files: RunFiles, judge: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    copy = shutil.copytree(judge[0], tmp_path / "judge")
    path = files.write("resumed", reward={"function": f"model:{copy}"}, run={"max_steps": 1, "eval_every": None})
    run_dir = tmp_path / "run"
    train(load_config(path, [f"run.dir={run_dir}"]), run_dir)
    kept = {file.name: file.read_bytes() for file in copy.iterdir()}
    spaced = kept["adapter_config.json"] + b"\n"
    manifest = json.loads(kept["reward_model.json"])
    manifest["files"]["adapter_config.json"] = hashlib.sha256(spaced).hexdigest()
    (copy / "adapter_config.json").write_bytes(spaced)
    (copy / "reward_model.json").write_text(json.dumps(manifest))
    other = read_manifest(copy).version
    assert other != judge[1]["version"]
    with pytest.raises(ResumeError, match=f"paid by model@{judge[1]['version']}.*now holds model@{other}"):
        resume(run_dir, ["run.max_steps=2"])
    for name, data in kept.items():
        (copy / name).write_bytes(data)
    assert resume(run_dir, ["run.max_steps=2"])["steps"] == 2


def test_another_base_is_refused_before_anything_is_written(
    files: RunFiles, judge: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    path = files.write("other", reward={"function": f"model:{judge[0]}"}, model={"quantize": "none"})
    cfg = load_config(path, [f"run.dir={tmp_path / 'run'}"])
    from support.checkpoints import build_hf

    other = build_hf(tmp_path / "base", "llama", tie_word_embeddings=False, seed=1)
    cfg = cfg.model_copy(update={"model": cfg.model.model_copy(update={"path": str(other)})})
    with pytest.raises(ConfigError, match="another base") as error:
        train(cfg, tmp_path / "run")
    assert error.value.key == "reward.function"
    assert not (tmp_path / "run").exists()


def test_no_reward_model_there_names_the_key(files: RunFiles, tmp_path: Path) -> None:
    path = files.write("nothing", reward={"function": f"model:{tmp_path / 'nowhere'}"})
    with pytest.raises(ConfigError, match="holds no reward model") as error:
        train(load_config(path, [f"run.dir={tmp_path / 'run'}"]), tmp_path / "run")
    assert error.value.key == "reward.function"


GOOD = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "pairs.jsonl:2: is not JSON"),
        ("[1]", "pairs.jsonl:2: is no JSON object"),
        ({"prompt": "a", "chosen": "b"}, "pairs.jsonl:2: has no 'rejected'"),
        ({"chosen": "a", "rejected": "b"}, "pairs.jsonl:2: has no column 'prompt'"),
        ({**GOOD, "chosen": 3}, "pairs.jsonl:2: 'chosen' is 3"),
        ({**GOOD, "rejected": "b"}, "pairs.jsonl:2: 'chosen' and 'rejected' are equal"),
        ({**GOOD, "prompt": " "}, "pairs.jsonl:2: 'prompt' is empty"),
        ({**GOOD, "prompt": [{"role": "nobody", "content": "a"}]}, "pairs.jsonl:2: holds the chat message"),
        ({**GOOD, "chosen": "\ud800"}, "pairs.jsonl:2: 'chosen' holds half"),
    ],
)
def test_a_bad_row_is_named_by_line_and_key(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, row: Any, message: str
) -> None:
    pairs = write(tmp_path / "pairs.jsonl", [GOOD, row, GOOD])
    code, answer, err = command(capfd, pairs, "--out", tmp_path / "out")
    assert code == 2
    assert message in answer["error"]
    assert message in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs", "0"], "--epochs = 0"),
        (["--held-out", "1"], "--held-out = 1"),
        (["--centre", "-1"], "--centre = -1"),
        (["--centre", "nan"], "--centre = nan"),
        (["run.ranks=2"], "run.ranks = 2"),
        (["lora.dropout=0.1"], "lora.dropout = 0.1"),
        (["rl.nonsense=1"], "rl.nonsense"),
    ],
)
def test_a_bad_setting_is_named(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], message: str
) -> None:
    pairs = write(tmp_path / "pairs.jsonl", [GOOD])
    code, answer, _ = command(capfd, pairs, "--out", tmp_path / "out", *arguments)
    assert code == 2
    assert message in answer["error"]


def test_a_taken_directory_and_too_few_prompts_are_refused(
    files: RunFiles, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pairs = write(tmp_path / "pairs.jsonl", [GOOD, {**GOOD, "chosen": "d"}])
    code, answer, _ = command(capfd, pairs, "--out", tmp_path, *settings(files))
    assert (code, "is not empty" in answer["error"]) == (2, True)
    code, answer, _ = command(capfd, pairs, "--out", tmp_path / "out", *settings(files))
    assert (code, "1 different prompts" in answer["error"]) == (2, True)
    code, answer, _ = command(capfd, tmp_path / "none.jsonl", "--out", tmp_path / "out")
    assert (code, "cannot read" in answer["error"]) == (2, True)
