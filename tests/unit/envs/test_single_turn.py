"""One rollout: the engine's own tokens, the text before its end, failures as data with one cause."""

import asyncio

import numpy as np
import pytest

from tithe.envs import SingleTurnEnv
from tithe.errors import ConfigError, EngineError, FailureCause
from tithe.rewards import RewardPool, RewardSpec, is_readable, score_of
from tithe.types import Completion, FinishReason, GenerateRequest, PromptItem, SamplingParams

STOP = 2
ITEM = PromptItem("p", messages=({"role": "user", "content": "3+4?"},), answer="7")


class Letters:
    """Ids are characters; 2 ends a reply."""

    def decode_reply(self, ids):
        return "".join(map(chr, ids[:-1] if ids and ids[-1] == STOP else ids))


def completion(text, finish=FinishReason.STOP):
    ids = [*map(ord, text), STOP] if finish is FinishReason.STOP else [*map(ord, text)]
    logp = np.linspace(-1, 0, len(ids), dtype=np.float32)
    return Completion(np.array(ids, np.int32), logp, logp * 2, np.full(len(ids), 5, np.int32), finish)


def play(answer, stop_strings=(), spec=None, item=ITEM):
    async def generate(request):
        await asyncio.sleep(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    params = SamplingParams(temperature=0.7, sample=3, stop_strings=stop_strings)
    request = GenerateRequest(prompt_ids=(1,), params=params, adapter="a")
    with RewardPool(spec or RewardSpec()) as pool:
        return asyncio.run(SingleTurnEnv(Letters(), pool).rollout(item, request, generate))


def test_a_right_answer_is_paid_and_its_tokens_are_the_engines():
    answer = completion("It is 7.")
    rollout = play(answer)
    assert rollout.token_ids is answer.token_ids
    assert rollout.logp is answer.logp
    assert rollout.logp_behaviour is answer.logp_behaviour
    assert rollout.serials is answer.serials
    assert rollout.loss_mask.tolist() == [True] * 9  # the end token is trained too
    assert (rollout.sample, rollout.temperature, rollout.finish) == (3, 0.7, FinishReason.STOP)
    assert (rollout.text, rollout.reward, rollout.failure) == ("It is 7.", 1.0, None)
    assert rollout.reward_parts == {"answer": 1.0, "fact.right": 1.0, "fact.readable": 1.0}


def test_what_a_rollout_counts_is_read_off_its_record(tmp_path):
    (tmp_path / "judges.py").write_text("def half(item, text): return 0.5\ndef none(item, text): return None\n")
    half, none = (RewardSpec(f"{tmp_path / 'judges.py'}:{name}") for name in ("half", "none"))
    cases = [("7", None), ("8", None), ("?", None), ("?", half), ("?", none)]
    rollouts = [play(completion(text), spec=spec) for text, spec in cases]
    assert [score_of(rollout) for rollout in rollouts] == [1.0, 0.0, 0.0, 0.5, 0.0]
    assert [is_readable(rollout) for rollout in rollouts] == [True, True, False, True, False]
    assert (score_of(play(EngineError("x"))), is_readable(play(EngineError("x")))) == (0.0, False)


def test_text_after_a_stop_string_is_not_judged():
    rollout = play(completion("7\nQ: 8"), stop_strings=("Q:", "\n"))
    assert (rollout.text, rollout.reward) == ("7", 1.0)
    assert len(rollout.token_ids) == 7


def test_a_completion_cut_by_length_is_judged_as_it_stands():
    rollout = play(completion("let me see", FinishReason.LENGTH))
    assert (rollout.finish, rollout.reward, rollout.failure) == (FinishReason.LENGTH, -0.5, None)


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (EngineError("no memory"), FailureCause.ENGINE),
        (TimeoutError(), FailureCause.TIMEOUT),
        (completion("7", FinishReason.CANCELLED), FailureCause.CANCELLED),
        (completion("7", FinishReason.FAILED), FailureCause.ENGINE),
    ],
)
def test_engine_failures_are_data_and_pay_nothing(answer, cause):
    rollout = play(answer)
    assert rollout.failure.cause is cause
    assert rollout.reward is None
    assert len(rollout.logp) == len(rollout.token_ids) == len(rollout.loss_mask) == len(rollout.serials)


def test_a_judge_that_fails_is_data_with_the_tokens_kept(tmp_path):
    (tmp_path / "judges.py").write_text("def raises(item, text): 1 / 0\n")
    rollout = play(completion("7"), spec=RewardSpec(f"{tmp_path / 'judges.py'}:raises"))
    assert rollout.failure.cause is FailureCause.REWARD
    assert "ZeroDivisionError" in rollout.failure.message
    assert (rollout.reward, rollout.text, len(rollout.token_ids)) == (None, "7", 2)


def test_a_judge_that_returns_no_number_is_the_users_to_mend(tmp_path):
    (tmp_path / "judges.py").write_text("def lists(item, text): return [1.0]\n")
    with pytest.raises(ConfigError, match=r"judges.py:lists returned \[1.0\]"):
        play(completion("7"), spec=RewardSpec(f"{tmp_path / 'judges.py'}:lists"))


def test_an_abstention_is_no_failure():
    rollout = play(completion("7"), item=PromptItem("p", text="?", answer=None))
    assert (rollout.reward, rollout.failure) == (None, None)


def test_cancellation_passes_through():
    with pytest.raises(asyncio.CancelledError):
        play(asyncio.CancelledError())
