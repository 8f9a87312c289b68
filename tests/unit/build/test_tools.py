"""Conversations with tools through the whole run: sampled turn by turn, trained as one sequence."""

from __future__ import annotations

import json

import numpy as np
import pytest

from support.runs import query
from tithe.build import train
from tithe.config import load_config
from tithe.envs import tool_env
from tithe.rewards.tool_calls import ParsedReply, ToolCall
from tithe.types import FinishReason


@pytest.fixture
def every_reply_calls(monkeypatch):
    """A random model calls nothing by itself."""
    called = ParsedReply((ToolCall("f", {}),), (), "")
    monkeypatch.setattr(tool_env, "parse_tool_calls", lambda text, call_format: called)
    take = tool_env._Conversation.take

    def ends_well(self, completion):
        take(self, completion)
        self.finish = FinishReason.STOP

    monkeypatch.setattr(tool_env._Conversation, "take", ends_well)


def test_a_run_with_tools_trains_what_the_model_wrote_and_certifies_it(files, tmp_path, every_reply_calls):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i} + {i}", "answer": 2 * i}) + "\n" for i in range(24)))
    (tmp_path / "tool.py").write_text("def f() -> str:\n    return 'six'\n")
    changes = [
        f"task.source={rows}",
        f"task.tools=[{tmp_path / 'tool.py'}:f]",
        "task.call_format=pythonic",
        "task.max_turns=3",
        "task.turn_reward=0.1",
        "rollout.max_new_tokens=60",
        "rollout.max_prompt_tokens=400",
        "rollout.stop_strings=[a, e, i]",
        "model.max_context=460",
        "rl.micro_batch_tokens=512",
        "engine.kv_memory_mib=64",
        "run.max_steps=1",
        "run.eval_every=null",
    ]
    result = train(load_config(files.yaml, changes), tmp_path / "run")
    assert result["max_abs_dlogp"] == 0.0
    found = query(tmp_path / "run", "SELECT token_ids, loss_mask, logp, reward_parts FROM rollout")
    assert found
    masks = [np.frombuffer(mask, np.uint8) for _, mask, _, _ in found]
    assert any(not mask.all() for mask in masks), "no conversation came to its second turn"
    parts = [json.loads(text) for *_, text in found]
    assert all(row["turn.1"] == 0.1 for row in parts)
    assert any(row["fact.turns"] == 3 for row in parts)
