"""Conversations with tools: the model writes, a tool answers, the model goes on, until a reply calls nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from tithe.envs.single_turn import ENDED
from tithe.envs.tool_prompt import CLOSING
from tithe.envs.tools import Tool, ToolAnswer
from tithe.errors import Failure, FailureCause, boundary
from tithe.renderers import ChatRenderer
from tithe.rewards import FACT, RewardPool, RewardResult
from tithe.rewards.tool_calls import ParsedReply, ToolCall, parse_tool_calls
from tithe.types import Completion, ExpertArray, FinishReason, GenerateFn, GenerateRequest, PromptItem, Rollout

TURN_STRIDE: Final = 1 << 24
"""Each turn draws under a sample number of its own, so that no two turns share random numbers."""

MAX_CALLS: Final = 16
"""Most calls of one reply that are made, each in a thread of its own."""


@dataclass(frozen=True)
class TurnRules:
    """`max_turns` replies at most; `turn_reward` is paid for each reply whose calls all worked, and taken for each with
    a malformed, unknown or refused one."""

    max_turns: int = 4
    call_format: str = "hermes"
    turn_reward: float = 0.0


class ToolEnv:
    """Implements `types.Env`. Safe for any number of conversations at once: while one waits for a tool, others
    generate.

    Consumes: a prompt whose ids are in the request. Produces: one `Rollout` over the whole conversation: the model's
    tokens exactly as they were sampled, and between them, with loss mask False, what the chat template and the tools
    wrote. Nothing is ever encoded again, so the ids of each turn begin with all ids of the turn before. Waits for: the
    engine, the tools, the reward. Unblocked by: their answers, or the tool's time limit.

    `params.max_new_tokens` bounds everything after the prompt, tools' answers included. A conversation that reaches it,
    or ends at the last turn with a call, counts as truncated (`FinishReason.LENGTH`). The reward judges all that the
    model wrote, a reply a line. Random access: the same request gives the same conversation as long as the tools answer
    the same.
    """

    def __init__(
        self, renderer: ChatRenderer, rewards: RewardPool, tools: Sequence[Tool], rules: TurnRules | None = None
    ) -> None:
        self._renderer = renderer
        self._rewards = rewards
        self._tools: Mapping[str, Tool] = {tool.name: tool for tool in tools}
        self._rules = rules or TurnRules()
        closing = CLOSING.get(self._rules.call_format)
        self._stops = () if closing is None else (closing,)
        self._role = renderer.tool_role()

    async def rollout(self, item: PromptItem, request: GenerateRequest, generate: GenerateFn) -> Rollout:
        """Play one conversation and judge it."""
        talk = _Conversation(request)
        with boundary(FailureCause.ENVIRONMENT) as slot:
            await self._converse(talk, generate)
        failure = talk.failure or slot.failure
        result = RewardResult(None)
        if failure is None:
            with boundary(FailureCause.REWARD) as reward:
                info = {"finish": talk.finish.value, "token_ids": list(talk.ids)}
                result = await self._rewards.score(item, "\n".join(talk.replies), info)
            failure = reward.failure or result.failure
        return talk.rollout(self._renderer.decode(talk.ids), result, self._rules.turn_reward, failure)

    async def _converse(self, talk: _Conversation, generate: GenerateFn) -> None:
        for turn in range(self._rules.max_turns):
            with boundary(FailureCause.ENGINE) as engine:
                request = talk.request(turn, self._stops, may_continue=turn + 1 < self._rules.max_turns)
                completion = await generate(request)
            if engine.failure is not None:
                talk.failure = engine.failure
                return
            talk.take(completion)
            if completion.finish in ENDED:
                talk.failure = ENDED[completion.finish]
                return
            text = self._renderer.decode_reply(completion.token_ids.tolist())
            talk.replies.append(text)
            parsed = parse_tool_calls(text, self._rules.call_format)
            if completion.finish is not FinishReason.STOP or not (parsed.calls or parsed.malformed):
                return
            answers = await self._answers(parsed)
            talk.judge_turn(parsed, answers)
            if turn + 1 == self._rules.max_turns or not self._tell(talk, completion, answers):
                talk.finish = FinishReason.LENGTH
                return

    async def _answers(self, parsed: ParsedReply) -> list[ToolAnswer]:
        """One for each call in order, then one for each that cannot be read. All tools run at the same time; of more
        than `MAX_CALLS` calls none is."""
        if len(parsed.calls) > MAX_CALLS:
            text = f"error: {len(parsed.calls)} calls in one reply are more than {MAX_CALLS}; none was made"
            return [ToolAnswer(text, is_error=True)]
        answers = await asyncio.gather(*(self._answer(call) for call in parsed.calls))
        wrong = [ToolAnswer(f"error: malformed call: {fault.reason}", is_error=True) for fault in parsed.malformed]
        return [*answers, *wrong]

    async def _answer(self, call: ToolCall) -> ToolAnswer:
        tool = self._tools.get(call.name)
        if tool is None:
            return ToolAnswer(f"error: there is no function {call.name[:60]!r}", is_error=True)
        return await tool.call(call.arguments)

    def _tell(self, talk: _Conversation, completion: Completion, answers: Sequence[ToolAnswer]) -> bool:
        """Add the answers; False when no room is left for a reply."""
        messages = [{"role": self._role, "content": answer.text} for answer in answers]
        before = talk.prompt_ids(without=len(completion.token_ids))
        following = self._renderer.extend(before, completion.token_ids.tolist(), messages)
        return talk.add(following[len(before) + len(completion.token_ids) :])


@dataclass(eq=False)
class _Conversation:
    """What has been said: ids after the prompt, and what training needs of each."""

    first: GenerateRequest
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    behaviour: list[float] = field(default_factory=list)
    serials: list[int] = field(default_factory=list)
    replies: list[str] = field(default_factory=list)
    turns: list[bool] = field(default_factory=list)
    experts: ExpertArray | None = None
    finish: FinishReason = FinishReason.FAILED
    failure: Failure | None = None

    def prompt_ids(self, without: int = 0) -> tuple[int, ...]:
        """Prompt and everything after it, less the last ids."""
        return (*self.first.prompt_ids, *self.ids[: len(self.ids) - without])

    def request(self, turn: int, stops: tuple[str, ...], *, may_continue: bool) -> GenerateRequest:
        """The next turn's."""
        params = self.first.params
        turned = replace(
            params,
            max_new_tokens=params.max_new_tokens - len(self.ids),
            stop_strings=(*params.stop_strings, *stops),
            sample=params.sample + turn * TURN_STRIDE,
        )
        return replace(self.first, prompt_ids=self.prompt_ids(), params=turned, may_continue=may_continue)

    def take(self, completion: Completion) -> None:
        """A reply of the model."""
        count = len(completion.token_ids)
        self.ids += completion.token_ids.tolist()
        self.mask += [True] * count
        self.logp += completion.logp.tolist()
        self.behaviour += completion.logp_behaviour.tolist()
        self.serials += completion.serials.tolist()
        self.experts = completion.experts  # of every position so far: a turn's prompt is computed with it
        self.finish = completion.finish

    def add(self, ids: Sequence[int]) -> bool:
        """What others wrote; not added, and False, when it leaves no room for a reply."""
        if len(self.ids) + len(ids) >= self.first.params.max_new_tokens:
            return False
        self.ids += ids
        self.mask += [False] * len(ids)
        self.logp += [0.0] * len(ids)
        self.behaviour += [0.0] * len(ids)
        self.serials += [self.serials[-1]] * len(ids)
        return True

    def judge_turn(self, parsed: ParsedReply, answers: Sequence[ToolAnswer]) -> None:
        """Whether every call of a turn worked."""
        self.turns.append(not parsed.malformed and not any(answer.is_error for answer in answers))

    def rollout(self, text: str, result: RewardResult, turn_reward: float, failure: Failure | None) -> Rollout:
        """Everything, with what each turn was paid."""
        parts = dict(result.record())
        value = result.value
        if value is not None and turn_reward:
            paid = {f"turn.{n}": turn_reward if good else -turn_reward for n, good in enumerate(self.turns, start=1)}
            parts.update(paid)
            value += sum(paid.values())
        parts[f"{FACT}turns"] = float(len(self.replies))
        parts[f"{FACT}good_calls"] = float(sum(self.turns))
        parts[f"{FACT}bad_calls"] = float(len(self.turns) - sum(self.turns))
        return Rollout(
            sample=self.first.params.sample,
            token_ids=np.array(self.ids, np.int32),
            loss_mask=np.array(self.mask, np.bool_),
            logp=np.array(self.logp, np.float32),
            logp_behaviour=np.array(self.behaviour, np.float32),
            serials=np.array(self.serials, np.int32),
            temperature=self.first.params.temperature,
            finish=self.finish,
            text=text,
            reward=value,
            reward_parts=parts,
            reward_reason=result.reason,
            grader=result.grader,
            failure=failure,
            experts=self.experts,
        )
