"""Held-out questions: one greedy answer and several at temperature 1 each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tithe.errors import Failure
from tithe.metrics import bootstrap_ci
from tithe.orchestration.control import RunControl
from tithe.orchestration.playing import Player
from tithe.rewards import is_readable, score_of
from tithe.types import PromptItem, SamplingParams

GROUP_BASE = 1 << 30
"""Evaluation requests have group numbers from here on, question by question. Training groups count from 0 and never
come this far, so evaluations neither share random numbers with training nor can be cancelled by it."""


@dataclass(frozen=True)
class Answer:
    """One answer and what it is worth: `score` is 1 for right and 0 for wrong, or the reward where that is not known
    (`rewards.score_of`). `failure` says why there is none, and is worth 0.

    >>> Answer("so 3+4=7", 1.0, readable=True).score
    1.0
    """

    text: str
    score: float
    readable: bool
    failure: Failure | None = None


@dataclass(frozen=True)
class QuestionResult:
    """The answers to one question: sampled at temperature 1, and greedy.

    >>> right, wrong = Answer("7", 1.0, readable=True), Answer("8", 0.0, readable=True)
    >>> QuestionResult("sum-3-4", (right, wrong), right).sampled[1].text
    '8'
    """

    question_id: str
    sampled: tuple[Answer, ...]
    greedy: Answer


@dataclass(frozen=True)
class Evaluation:
    """All questions in the order they were given."""

    questions: tuple[QuestionResult, ...]

    def failures(self) -> list[Failure]:
        """Of all answers that failed, in order."""
        answers = [answer for q in self.questions for answer in (*q.sampled, q.greedy)]
        return [answer.failure for answer in answers if answer.failure is not None]

    def row(self, *, seed: int) -> dict[str, float]:
        """The metric row: means with 95 % intervals, bootstrapped over questions with `seed`. `eval_failed`, the share
        of all answers that failed, is in it where there is any; `eval_is_reward` where a score lies outside 0 to 1, so
        that the means are no shares of right answers.
        """
        sampled = bootstrap_ci([[answer.score for answer in q.sampled] for q in self.questions], seed=seed)
        greedy = bootstrap_ci([q.greedy.score for q in self.questions], seed=seed)
        failed, asked = len(self.failures()), sum(len(q.sampled) + 1 for q in self.questions)
        scores = [answer.score for q in self.questions for answer in (*q.sampled, q.greedy)]
        return {
            **({"eval_failed": failed / asked} if failed else {}),
            **({"eval_is_reward": 1.0} if min(scores) < 0 or max(scores) > 1 else {}),
            "eval_sampled": sampled.mean,
            "eval_sampled_lo": sampled.lo,
            "eval_sampled_hi": sampled.hi,
            "eval_greedy": greedy.mean,
            "eval_greedy_lo": greedy.lo,
            "eval_greedy_hi": greedy.hi,
            "eval_readable": float(np.mean([answer.readable for q in self.questions for answer in q.sampled])),
            "eval_greedy_readable": float(np.mean([q.greedy.readable for q in self.questions])),
        }


def evaluate(
    questions: Sequence[PromptItem],
    *,
    player: Player,
    params: SamplingParams,
    adapter: str | None,
    samples: int,
    control: RunControl | None = None,
    max_questions: int = 64,
) -> Evaluation | None:
    """Answer every question `samples` times at temperature 1 and once greedily, under one adapter (None: the bare
    base).

    `params` gives seed, lengths and stops; its filters (top-p, top-k, min-p) are left out, so that the policy itself is
    measured. Random numbers depend on the seed, the question's place and the sample alone: two evaluations differ by
    their policies, and training is not disturbed. At most `max_questions` are in work at once. Blocks; runs an event
    loop of its own. Returns None when `control` breaks it off (signal, failure). Raises `UserError` for what the user
    has to mend.
    """
    plain = replace(params, top_p=1.0, top_k=0, min_p=0.0)
    job = _Evaluating(player, plain, adapter, samples, asyncio.Semaphore(max_questions))
    return asyncio.run(_unless_hurried(job, questions, control))


@dataclass(frozen=True)
class _Evaluating:
    player: Player
    params: SamplingParams
    adapter: str | None
    samples: int
    room: asyncio.Semaphore

    async def all(self, questions: Sequence[PromptItem]) -> Evaluation:
        results = await asyncio.gather(*(self.one(place, item) for place, item in enumerate(questions)))
        return Evaluation(tuple(results))

    async def one(self, place: int, item: PromptItem) -> QuestionResult:
        params = replace(self.params, group=GROUP_BASE + place, temperature=1.0)
        variants = [replace(params, sample=sample) for sample in range(self.samples)]
        variants.append(replace(params, sample=self.samples, temperature=0.0))
        async with self.room:
            _, rollouts = await self.player.play(item, variants, self.adapter)
        *sampled, greedy = (Answer(r.text, score_of(r), is_readable(r), r.failure) for r in rollouts)
        return QuestionResult(item.id, tuple(sampled), greedy)


async def _unless_hurried(
    job: _Evaluating, questions: Sequence[PromptItem], control: RunControl | None
) -> Evaluation | None:
    work = asyncio.ensure_future(job.all(questions))
    if control is None:
        return await work
    loop = asyncio.get_running_loop()

    def look() -> None:
        if control.hurrying:
            work.cancel()

    def listener() -> None:
        loop.call_soon_threadsafe(look)

    with control.listening(listener):
        look()
        try:
            return await work
        except asyncio.CancelledError:
            if control.hurrying:
                return None
            raise
