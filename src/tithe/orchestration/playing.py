"""Playing one group: the same prompt through the environment once per sample, all at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from tithe.errors import Failure, FailureCause, RolloutFailure, UserError, boundary
from tithe.types import (
    Completion,
    Env,
    FinishReason,
    GenerateFn,
    GenerateRequest,
    PromptItem,
    Rollout,
    RolloutEngine,
    SamplingParams,
)

RenderFn = Callable[[PromptItem], Sequence[int]]
"""Prompt → token ids, exactly those that are sampled from and trained on."""


def generate_with(engine: RolloutEngine) -> GenerateFn:
    """The `GenerateFn` of an engine, for coroutines of any event loop."""

    async def generate(request: GenerateRequest) -> Completion:
        return await asyncio.wrap_future(engine.submit(request))

    return generate


@dataclass(frozen=True)
class Player:
    """Plays prompts through an environment. Whatever goes wrong inside becomes `Rollout.failure`.

    `params` is the template of every request; `timeout_s` bounds one rollout, from submission and including the
    engine's queue (None: no bound).
    """

    env: Env
    generate: GenerateFn
    render: RenderFn
    timeout_s: float | None = None

    async def play(
        self,
        item: PromptItem,
        variants: Sequence[SamplingParams],
        adapter: str | None,
        places: Callable[[int], None] = lambda _: None,
    ) -> tuple[tuple[int, ...], tuple[Rollout, ...]]:
        """The prompt's ids and one rollout per variant, in order.

        Each variant is taken to have a place in the engine from the start. `places` is told -1 when a turn of one has
        been sampled (or none ever will be) and +1 when it asks for another: one that waits for its tool or its reward
        has none.

        Raises `UserError` and cancellation only: what the user has to mend (a reward function that returns no number)
        is nobody's episode.
        """
        with boundary(FailureCause.ENVIRONMENT) as slot:
            prompt_ids = tuple(self.render(item))
        if slot.failure is not None:
            return (), tuple(failed_rollout(params, slot.failure) for params in variants)
        requests = [GenerateRequest(prompt_ids, params, adapter) for params in variants]
        plays = (self._play_one(item, request, places) for request in requests)
        played = await asyncio.gather(*plays, return_exceptions=True)
        for outcome in played:
            if isinstance(outcome, BaseException):
                raise outcome
        return prompt_ids, tuple(outcome for outcome in played if isinstance(outcome, Rollout))

    async def _play_one(self, item: PromptItem, request: GenerateRequest, places: Callable[[int], None]) -> Rollout:
        turns = _Turns(self.generate, places)
        rollout: Rollout | None = None
        breach: UserError | None = None
        with boundary(FailureCause.ENVIRONMENT) as slot:
            try:
                rollout = await self._attempt(item, request, turns.generate)
            except UserError as error:
                breach = error
            finally:
                turns.end()
        if breach is not None:
            raise breach
        if slot.failure is not None:
            return failed_rollout(request.params, slot.failure)
        assert rollout is not None
        return rollout

    async def _attempt(self, item: PromptItem, request: GenerateRequest, generate: GenerateFn) -> Rollout:
        try:
            async with asyncio.timeout(self.timeout_s):
                answer = cast("object", await self.env.rollout(item, request, generate))
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # not this task but what it waited for was cancelled: the engine gave the request up
            raise RolloutFailure(FailureCause.CANCELLED, "the engine cancelled the request") from error
        if not isinstance(answer, Rollout):
            raise RolloutFailure(FailureCause.ENVIRONMENT, f"the environment returned {answer!r} and no rollout")
        return replace(answer, sample=request.params.sample)


class _Turns:
    """One rollout's calls of the engine; its first turn has a place from the start."""

    def __init__(self, generate: GenerateFn, places: Callable[[int], None]) -> None:
        self._generate, self._places = generate, places
        self._expected = True

    async def generate(self, request: GenerateRequest) -> Completion:
        if not self._expected:
            self._places(1)
        self._expected = False
        try:
            return await self._generate(request)
        finally:
            self._places(-1)

    def end(self) -> None:
        """The rollout is over."""
        if self._expected:
            self._places(-1)


def failed_rollout(params: SamplingParams, failure: Failure) -> Rollout:
    """A rollout without tokens that says why."""
    ids, numbers = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return Rollout(
        sample=params.sample,
        token_ids=ids,
        loss_mask=np.zeros(0, np.bool_),
        logp=numbers,
        logp_behaviour=numbers,
        serials=ids,
        temperature=params.temperature,
        finish=FinishReason.FAILED,
        failure=failure,
    )
