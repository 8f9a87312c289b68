"""What reward models add to a reward: paid as guidance, recorded, and never paid for a failure."""

from __future__ import annotations

import asyncio
import math
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tithe.errors import FailureCause, RolloutFailure
from tithe.rewards import PartSpec, RewardModel, RewardPool, RewardResult, RewardSpec
from tithe.types import PromptItem

JUDGE, OTHER = "model:/judge", "model:/other"
ITEM = PromptItem("p", messages=({"role": "user", "content": "3+4"},), answer="7")
RULE = '''
def whole(item, text, **info):
    """Met by replies that end in a dot; sees nothing of reward models."""
    assert set(info) <= {"finish", "token_ids"}, info
    return 1.0 if text.endswith(".") else 0.0
'''


def asks(score: float | Exception, grader: str = "model@1a2b3c4d") -> RewardModel:
    def ask(item: PromptItem, text: str) -> Future[float]:
        future: Future[float] = Future()
        if isinstance(score, Exception):
            future.set_exception(score)
        else:
            future.set_result(score)
        return future

    return RewardModel(ask, grader)


def judge(spec: RewardSpec, text: str, models: dict[str, RewardModel], **info: Any) -> tuple[RewardResult, Any]:
    with RewardPool(spec) as pool:
        pool.models = models
        return asyncio.run(pool.score(ITEM, text, info)), pool.stats()


def test_the_models_score_is_the_reward() -> None:
    result, stats = judge(RewardSpec(function=JUDGE), "7", {JUDGE: asks(-0.75)})
    assert (result.value, dict(result.parts), result.grader) == (-0.75, {"model": -0.75}, "model@1a2b3c4d")
    assert (stats["reward_scored"], stats["reward_worker_starts"]) == (1.0, 0.0)


@pytest.mark.parametrize(("text", "paid"), [("7", True), ("8", False)])
def test_guidance_is_paid_where_the_answer_is_right(text: str, paid: bool) -> None:
    spec = RewardSpec(parts=(PartSpec("liking", JUDGE, "model", 0.5), PartSpec("tone", OTHER, "shaping", 2.0)))
    result, stats = judge(spec, text, {JUDGE: asks(0.5), OTHER: asks(0.125, "model@feedbeef")})
    assert result.value == (1.0 + 0.25 + 0.25 if paid else 0.25)
    assert ("liking" in result.parts) is paid
    assert result.facts.get("unpaid.liking") == (None if paid else 0.25)
    assert result.grader == "math@4, model@1a2b3c4d, model@feedbeef"
    assert stats["reward_worker_starts"] == 0.0, "plain numbers and a model's score need no worker"


@pytest.mark.parametrize(("text", "value"), [("fine.", 1.3), ("broken", 0.0)])
def test_a_rule_of_the_users_binds_the_model(tmp_path: Path, text: str, value: float) -> None:
    (tmp_path / "rule.py").write_text(RULE)
    spec = RewardSpec(function=JUDGE, parts=(PartSpec("whole", f"{tmp_path / 'rule.py'}:whole", "rule"),))
    result, stats = judge(spec, text, {JUDGE: asks(0.3)}, finish="stop", token_ids=[1])
    assert result.failure is None, result.reason
    assert result.value == pytest.approx(value)
    assert result.grader == "model@1a2b3c4d"
    assert stats["reward_worker_starts"] == 1.0


@pytest.mark.parametrize(
    ("score", "reason"),
    [
        (math.nan, "gave nan"),
        (math.inf, "gave inf"),
        (RolloutFailure(FailureCause.REWARD, "9 tokens are more than the reward model's 8"), "9 tokens are more"),
        (RuntimeError("no such kernel"), "no such kernel"),
    ],
)
def test_no_number_is_an_abstention_with_its_cause(score: float | Exception, reason: str) -> None:
    spec = RewardSpec(parts=(PartSpec("liking", JUDGE, "model"),))
    result, stats = judge(spec, "7", {JUDGE: asks(score)})
    assert result.value is None
    assert result.failure is not None
    assert result.failure.cause is FailureCause.REWARD
    assert reason in result.reason
    assert result.grader == "model@1a2b3c4d"
    assert (stats["reward_abstained"], stats["reward_failed"], stats["reward_scored"]) == (1.0, 1.0, 0.0)
