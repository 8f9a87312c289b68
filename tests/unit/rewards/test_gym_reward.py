"""reasoning-gym's graders evaluate some answers as Python: those never see one in which anything could be called."""

import inspect
import re

import pytest

from tithe.rewards import RewardSpec, gym
from tithe.rewards.grading import Grader
from tithe.types import PromptItem

reasoning_gym = pytest.importorskip("reasoning_gym")


def question(dataset):
    entry = reasoning_gym.create_dataset(dataset, seed=3, size=1)[0]
    messages = ({"role": "user", "content": entry["question"]},)
    return PromptItem("q", messages=messages, answer=str(entry["answer"]), extra={"metadata": entry["metadata"]}), entry


def test_a_worker_imports_the_package_before_its_first_judgement(monkeypatch):
    """Seconds on a busy machine, which would count as the first answer's own."""
    loaded = []
    assert gym.score.prepare is gym.import_gym
    monkeypatch.setattr(gym.score, "prepare", lambda: loaded.append(gym.import_gym()))
    Grader(RewardSpec("tithe.rewards.gym:score"))
    assert loaded == [reasoning_gym]


@pytest.mark.parametrize("dataset", sorted(gym.EVALUATED))
def test_no_answer_is_run_as_code(dataset, tmp_path):
    item, _ = question(dataset)
    for name, code in {
        "list": "open({file!r}, 'w').close() or ['a']",
        "import": "__import__('pathlib').Path({file!r}).touch()",
        "comprehension": "[open({file!r}, 'w') for x in '1']",
        "formula": "3*x + exec(\"open({file!r}, 'w')\")",
        "attribute": "(1).__class__.__base__.__subclasses__()",
    }.items():
        mark = tmp_path / name
        assert gym.score(item, code.format(file=str(mark))) == 0.0
        assert not mark.exists()


@pytest.mark.parametrize("dataset", sorted(gym.EVALUATED))
def test_the_right_answer_is_paid_all_the_same(dataset):
    item, entry = question(dataset)
    answer = entry["answer"] if entry["answer"] is not None else entry["metadata"]["expression"]
    assert gym.score(item, str(answer)) == 1.0


def test_every_grader_that_evaluates_an_answer_is_known():
    from reasoning_gym.factory import DATASETS

    found = {
        name
        for name, (dataset, _) in DATASETS.items()
        if re.search(r"(?:eval|exec|parse_expr|sympify)\(\s*answer", inspect.getsource(dataset.score_answer))
    }
    assert found
    assert found <= set(gym.EVALUATED)
