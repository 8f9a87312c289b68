"""The example of a reward model: its pairs tell nothing by words or lengths, its run file loads, its count is right."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tithe.config import load_config
from tithe.envs import load_task
from tithe.envs.pairs import read_pairs
from tithe.pool import Pool, PromptSource
from tithe.types import FinishReason, Rollout, RolloutGroup

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("reward_pairs_example", ROOT / "examples" / "reward_pairs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_word_is_preferred_as_often_as_it_is_rejected(example, tmp_path):
    rows = list(example.pairs())
    assert rows == list(example.pairs())
    assert Counter(row["chosen"] for row in rows) == Counter(row["rejected"] for row in rows)
    words = {f"Name {kind}.": {word.capitalize() for word in listed.split()} for kind, listed in example.KINDS.items()}
    assert sum(map(len, words.values())) == len(set().union(*words.values()))
    assert not words.keys() & {f"Name {kind}." for kind in example.SHOWN}
    for row in rows:
        asked = row["prompt"][-1]["content"]
        assert row["chosen"] in words[asked]
        assert row["rejected"] not in words[asked]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert len(read_pairs(path)) == len(rows)


def test_the_run_file_loads_with_its_task_and_its_replies_are_counted(example, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    cfg = load_config("examples/reward_model.yaml")
    task = load_task(cfg.task, needs_answer=False)
    assert (len(task.train), len(task.eval)) == (len(example.KINDS) - 8, 8)
    words = task.train[0].answer.split()
    texts = [words[0].upper(), f" {words[1]}.", f"{words[0]} or {words[1]}", "Zeppelin"]
    with Pool.create(tmp_path / "pool.sqlite", "liked") as pool:
        pool.bind_prompts(PromptSource([task.train[0].id], 0))
        number = pool.admit(task.train[0].id, 0, 0)
        pool.commit(
            RolloutGroup(number, task.train[0].id, np.zeros(1, np.int32), tuple(map(reply, range(4), texts)), 0, 0)
        )
        lease = pool.lease_batch(4, 0, lambda _: False)
        pool.mark_trained([group.group_id for group in lease.groups], 1)
    monkeypatch.setattr(sys, "argv", ["reward_pairs.py", str(tmp_path)])
    example.main()
    assert "50.0% of the replies" in capsys.readouterr().out
    assert [example.one_word(task.train[0], text) for text in texts] == [1.0, 1.0, 0.0, 1.0]


def reply(sample, text):
    one, zero = np.ones(1, bool), np.zeros(1, np.float32)
    ids = np.zeros(1, np.int32)
    return Rollout(sample, ids, one, zero, zero, ids, 1.0, FinishReason.STOP, text=text, reward=0.0)
