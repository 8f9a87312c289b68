"""Whose questions `tithe report` may read again."""

from __future__ import annotations

import pytest

from tithe.build.commands import _questions
from tithe.config import build_config


@pytest.mark.parametrize("source", ["sums", "sums:3", "products:12"])
def test_questions_of_data_are_shown(source):
    texts = _questions(build_config({"task": {"source": source, "eval_size": 2}}))
    assert len(texts) > 3
    assert all(any(sign in text for sign in "+×*x") for text in texts.values())


@pytest.mark.parametrize("task", [{"source": "sums:rows"}, {"source": "my.module:rows"}, {"eval_source": "a:b"}])
def test_no_function_is_called_for_a_report(task, capsys):
    assert _questions(build_config({"task": task})) == {}
    assert "questions are shown by their ids" in capsys.readouterr().err


def test_data_that_is_gone_is_a_warning(tmp_path, capsys):
    gone = tmp_path / "gone.jsonl"
    assert _questions(build_config({"task": {"source": str(gone)}})) == {}
    assert str(gone) in capsys.readouterr().err
