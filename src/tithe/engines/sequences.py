"""What the shared engine keeps per version, per prompt and per running request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from tithe.models import ModelAdapter
from tithe.types import Completion, ExpertArray, FinishReason, GenerateRequest


@dataclass(frozen=True, eq=False)
class LiveVersion:
    """An adapter the engine holds; `serial` tags the tokens it draws. The bare base has no model and serial -1."""

    name: str
    serial: int
    model: ModelAdapter | None


BASE = LiveVersion("", -1, None)


CLOSED = "the compute lane is closed: the run has ended"
"""Why a request is refused that comes too late."""


@dataclass(eq=False)
class Prompt:
    """A prompt's keys and values under one version, shared by every request with the same (adapter name, tokens).

    Positions below `computed` are in `pages`; `last_x` [H] is the residual row that predicts the first completion
    token. `slot` is its row of the block table; `users` counts the running requests that read it; `used` says when it
    was wanted last.
    """

    version: LiveVersion
    tokens: tuple[int, ...]
    pages: list[int]
    slot: int
    computed: int = 0
    last_x: Tensor | None = None
    users: int = 0
    used: int = 0
    experts: list[ExpertArray] = field(default_factory=list)
    """What its rows took, a piece a prefill."""

    @property
    def ready(self) -> bool:
        """Whether samples can start."""
        return self.last_x is not None


@dataclass(frozen=True, eq=False)
class Kept:
    """What a request has left behind that may be continued: the keys and values of its prompt and of all that was
    drawn, less the last token, all computed under one version.

    Whole pages may be shared with prompts; the last one, where it is partly filled, is nobody else's.
    """

    version: LiveVersion
    group: int
    tokens: tuple[int, ...]
    pages: list[int]
    experts: list[ExpertArray]
    used: int


@dataclass(eq=False)
class Waiting:
    """A request that has not begun."""

    request: GenerateRequest
    future: Future[Completion]
    version: LiveVersion


@dataclass(eq=False)
class Running:
    """A request that has begun: lists grow by one per drawn token.

    `computed` positions are in the pages (0 until the prompt is ready). `own` are the pages behind the prompt's shared
    ones. `is_mixed`: several versions have computed them.
    """

    request: GenerateRequest
    future: Future[Completion]
    version: LiveVersion
    slot: int
    prompt: Prompt
    own: list[int]
    computed: int = 0
    cancelled: bool = False
    is_mixed: bool = False
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    behaviour: list[float] = field(default_factory=list)
    serials: list[int] = field(default_factory=list)
    experts: list[ExpertArray] = field(default_factory=list)
    """What the rows behind the prompt took, under the version that computed them last."""

    @property
    def length(self) -> int:
        """Prompt and completion tokens so far."""
        return len(self.request.prompt_ids) + len(self.tokens)

    def pending(self) -> list[int]:
        """Tokens whose positions are still to be computed before the next can be drawn."""
        return self.tokens[self.computed - len(self.request.prompt_ids) :]

    def finish_reason(self, decode: Callable[[Sequence[int]], str] | None) -> FinishReason | None:
        """Why the token drawn last ends the request; None when it goes on."""
        params = self.request.params
        if self.tokens[-1] in params.stop_token_ids:
            return FinishReason.STOP
        if params.stop_strings and decode is not None:
            text = decode(self.tokens)
            if any(stop in text for stop in params.stop_strings):
                return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= params.max_new_tokens else None

    def completion(self, finish: FinishReason) -> Completion:
        """The answer."""
        experts = np.concatenate([*self.prompt.experts, *self.experts]) if self.prompt.experts else None
        if experts is not None and len(experts) != self.length - 1:
            experts = None  # cancelled before its positions were computed
        return completion(self.tokens, self.logp, self.behaviour, self.serials, finish, experts)


def completion(
    tokens: list[int],
    logp: list[float],
    behaviour: list[float],
    serials: list[int],
    finish: FinishReason,
    experts: ExpertArray | None = None,
) -> Completion:
    """A `Completion` from lists of one length."""
    return Completion(
        np.array(tokens, np.int32),
        np.array(logp, np.float32),
        np.array(behaviour, np.float32),
        np.array(serials, np.int32),
        finish,
        experts=experts,
    )


def resolve(future: Future[Completion], answer: Completion) -> None:
    """Answer a request unless its caller has given it up."""
    if future.set_running_or_notify_cancel():
        future.set_result(answer)


def refuse(future: Future[Completion], error: BaseException) -> None:
    """Fail a request unless its caller has given it up."""
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
