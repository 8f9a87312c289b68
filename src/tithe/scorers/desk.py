"""Where requests for scores wait for the lane."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future

from tithe.errors import Failure, FailureCause, RolloutFailure, UserError, boundary
from tithe.models import Lane
from tithe.scorers.decoder_scorer import Scorer
from tithe.scorers.replies import Reply

_Request = tuple[Reply, Future[float]]


class ScoringDesk:
    """Batches requests of any thread into jobs of the lane, where they take turns with sampling and training.

    consumes      replies, from `submit`
    produces      a future for each: its score, or `RolloutFailure` with one cause
    waits for     its turn on the lane
    unblocked by  the lane, which takes one batch at a time; what arrives meanwhile makes the next
    """

    def __init__(self, scorer: Scorer, lane: Lane, *, batch_tokens: int) -> None:
        """`batch_tokens` bounds what one job scores, prompts counted for each reply: how long others wait for it."""
        self._scorer, self._lane, self._batch_tokens = scorer, lane, batch_tokens
        self._waiting: deque[_Request] = deque()
        self._lock = threading.Lock()
        self._is_queued = False

    def submit(self, reply: Reply) -> Future[float]:
        """Queue one; never blocks. A reply that is longer than the model can read fails at once."""
        future: Future[float] = Future()
        if reply.n_tokens > self._scorer.max_tokens:
            message = f"{reply.n_tokens} tokens are more than the reward model's {self._scorer.max_tokens}"
            future.set_exception(RolloutFailure(FailureCause.REWARD, message))
            return future
        with self._lock:
            self._waiting.append((reply, future))
            if self._is_queued:
                return future
            self._is_queued = True
        self._lane.submit(self._work).add_done_callback(self._settle)
        return future

    def _settle(self, job: Future[None]) -> None:
        """A job that the lane never ran leaves nobody waiting."""
        if job.cancelled() or job.exception() is not None:
            _fail(self._take(everything=True)[0], Failure(FailureCause.CANCELLED, "the compute lane is closed"))

    def _take(self, *, everything: bool = False) -> tuple[list[_Request], bool]:
        """The next batch, without those whose asker has gone, and whether more wait: another job must then follow."""
        batch: list[_Request] = []
        tokens = 0
        with self._lock:
            while self._waiting:
                reply, future = self._waiting[0]
                if batch and not everything and tokens + reply.n_tokens > self._batch_tokens:
                    break
                self._waiting.popleft()
                if future.set_running_or_notify_cancel():
                    batch.append((reply, future))
                    tokens += reply.n_tokens
            self._is_queued = bool(self._waiting)
            return batch, self._is_queued

    def _work(self) -> None:
        batch, more = self._take()
        if more:  # behind what came to the lane meanwhile
            self._lane.submit(self._work).add_done_callback(self._settle)
        scores: list[float] = []
        try:
            with boundary(FailureCause.REWARD) as slot:
                scores = self._scorer.score([reply for reply, _ in batch])
            failure = slot.failure
        except UserError as error:  # a reply that cannot be laid out
            failure = Failure(FailureCause.REWARD, str(error))
        if failure is not None:
            _fail(batch, failure)
            return
        for (_, future), score in zip(batch, scores, strict=True):
            future.set_result(score)


def _fail(batch: list[_Request], failure: Failure) -> None:
    for _, future in batch:
        future.set_exception(RolloutFailure(failure.cause, failure.message))
