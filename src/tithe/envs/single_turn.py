"""The simplest environment: one prompt, one completion, one reward."""

from __future__ import annotations

import numpy as np

from tithe.errors import Failure, FailureCause, boundary
from tithe.renderers import ChatRenderer
from tithe.rewards import RewardPool, RewardResult
from tithe.types import Completion, FinishReason, GenerateFn, GenerateRequest, PromptItem, Rollout

ENDED = {
    FinishReason.CANCELLED: Failure(FailureCause.CANCELLED, "the engine cancelled the request"),
    FinishReason.FAILED: Failure(FailureCause.ENGINE, "the engine could not finish the request"),
}
"""What a completion that ended so means for its rollout."""


class SingleTurnEnv:
    """Implements `types.Env`. Safe for any number of rollouts at once.

    Consumes: a prompt and a request that carries its ids. Produces: a `Rollout` whose tokens are the engine's own
    (never encoded again), all of them trained. Waits for: the engine, then the reward. Unblocked by: their answers. A
    failure of either is data with one cause; a cancellation passes through.
    """

    def __init__(self, renderer: ChatRenderer, rewards: RewardPool) -> None:
        self._renderer = renderer
        self._rewards = rewards

    async def rollout(self, item: PromptItem, request: GenerateRequest, generate: GenerateFn) -> Rollout:
        """Draw one completion and judge its text: what precedes the end token or the first stop string."""
        with boundary(FailureCause.ENGINE) as engine:
            completion = await generate(request)
        if engine.failure is not None:
            return _rollout(request, _nothing(), "", RewardResult(None), engine.failure)
        if completion.finish in ENDED:
            return _rollout(request, completion, "", RewardResult(None), ENDED[completion.finish])
        text = ""
        result = RewardResult(None)
        with boundary(FailureCause.REWARD) as reward:
            text = self._text(completion, request.params.stop_strings)
            info = {"finish": completion.finish.value, "token_ids": completion.token_ids.tolist()}
            result = await self._rewards.score(item, text, info)
        return _rollout(request, completion, text, result, reward.failure or result.failure)

    def _text(self, completion: Completion, stop_strings: tuple[str, ...]) -> str:
        text = self._renderer.decode_reply(completion.token_ids.tolist())
        ends = [at for stop in stop_strings if (at := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text


def _nothing() -> Completion:
    """What there is of a completion that the engine never returned."""
    no_logp = np.zeros(0, np.float32)
    no_ids = np.zeros(0, np.int32)
    return Completion(no_ids, no_logp, no_logp, no_ids, FinishReason.FAILED)


def _rollout(
    request: GenerateRequest, completion: Completion, text: str, result: RewardResult, failure: Failure | None
) -> Rollout:
    return Rollout(
        sample=request.params.sample,
        token_ids=completion.token_ids,
        loss_mask=np.ones(len(completion.token_ids), np.bool_),
        logp=completion.logp,
        logp_behaviour=completion.logp_behaviour,
        serials=completion.serials,
        temperature=request.params.temperature,
        finish=completion.finish,
        text=text,
        reward=result.value,
        reward_parts=result.record(),
        failure=failure,
        experts=completion.experts,
        reward_reason=result.reason,
        grader=result.grader,
    )
