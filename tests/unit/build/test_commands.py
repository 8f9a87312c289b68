"""The commands beside `train`: what a check leaves out of a run's settings, and how a prompt is asked."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from support.runs import RunFiles
from tithe.build import commands, sample, train
from tithe.build.loops import _Observed
from tithe.build.scoring import RewardModels, check_same_models
from tithe.config import load_config
from tithe.errors import ConfigError
from tithe.types import GenerateRequest


def test_a_check_leaves_out_what_only_the_runs_own_base_can_take(files: RunFiles) -> None:
    sizes = ("model.max_context=16384", "rollout.max_prompt_tokens=2048", "rollout.max_new_tokens=14336")
    cfg = load_config(
        files.yaml, ["lora.target_modules=[q_a_proj]", "rl.kl_coef=0.1", "rl.kl_reference=/a/model", *sizes]
    )
    cfg = cfg.model_copy(update={"lora": cfg.lora.model_copy(update={"init_from": "an/adapter"})})
    small, left_out = commands._one_small_step(cfg)
    assert (small.lora.target_modules, small.lora.init_from, small.rl.kl_reference) == ("all-linear", None, "base")
    assert small.model.path is None
    assert small.rollout.max_prompt_tokens + small.rollout.max_new_tokens == small.model.max_context == 8192
    assert left_out == [
        "lora.target_modules = [q_a_proj]",
        "lora.init_from = an/adapter",
        "rl.kl_reference = /a/model",
        "rollout.max_new_tokens = 14336 (6144 fit)",
    ]


def test_a_check_keeps_what_every_base_can_take(files: RunFiles) -> None:
    cfg = load_config(files.yaml, ["rl.kl_coef=0.1", "rl.kl_reference=moving:8"])
    small, left_out = commands._one_small_step(cfg)
    assert left_out == []
    assert (small.rl.kl_reference, small.rollout) == ("moving:8", cfg.rollout)


def test_a_sampled_prompt_is_asked_as_the_runs_own_questions(files, tmp_path, monkeypatch) -> None:
    run_dir = tmp_path / "run"
    train(load_config(files.yaml, ["task.instruction=Say it.", "run.max_steps=1", "run.eval_every=null"]), run_dir)
    asked: list[tuple[int, ...]] = []
    own: set[tuple[int, ...]] = set()
    opened = commands.open_session

    def watched(*args: object, **options: object) -> object:
        session = opened(*args, **options)
        own.update(session.prompts.prompt_ids(item.id) for item in session.prompts.items)
        submit = session.engine.submit

        def note(request: GenerateRequest) -> object:
            asked.append(request.prompt_ids)
            return submit(request)

        session.engine.submit = note
        return session

    monkeypatch.setattr(commands, "open_session", watched)
    question = json.loads(files.rows.read_text().splitlines()[3])["prompt"]
    answer = sample(run_dir, question, [])
    assert asked[-1] in own, "the ids are those of the row with this question"
    assert answer["prompt"] == question
    tools = ["task.tools=[calculator]", "task.call_format=pythonic", "task.max_turns=2"]
    with pytest.raises(ConfigError, match=r"conversations with tools .*`tithe eval .*/run`") as caught:
        sample(run_dir, question, tools)
    assert caught.value.key == "task.tools"


def test_a_batch_without_a_speed_has_its_engines_work_all_the_same() -> None:
    """The rollout side's row is known by its sampling time; what an evaluation draws belongs to no batch."""
    drawn = iter([0.0, 70.0, 100.0, 130.0])
    rows: list[dict[str, float]] = []
    sink = SimpleNamespace(write=lambda step, values: rows.append(dict(values)))
    observed = _Observed(sink, SimpleNamespace(observe=lambda: None), lambda: {"generated_tok": next(drawn)})
    observed.write(1, {"tok_per_s": 35.0, "sample_s": 2.0})
    observed.write(1, {"eval_greedy": 0.5})
    observed.write(2, {"sample_s": 0.1, "version_gap": 0.0})
    observed.write(2, {"loss": 0.0})
    assert [row.get("generated_tok") for row in rows] == [70.0, None, 30.0, None]


def test_without_a_reward_model_a_resume_reads_no_graders(tmp_path) -> None:
    absent = tmp_path / "pool.sqlite"
    check_same_models(RewardModels({}, 0), absent)
    with pytest.raises(Exception, match="pool"):
        check_same_models(RewardModels({"model:a": SimpleNamespace(grader="model@1")}, 0), absent)
