"""Judges texts in worker processes that can be killed, from any thread and any event loop.

    submit ──▶ queue ──▶ one thread per worker ──▶ worker process    consumes: jobs; produces: the result of each future
                              │  clock starts here     │             waits for: the worker's reply or the time limit
                              ◀──── reply, or kill ────┘             unblocked by: reply, time limit, death, close()

What is linear and calls nobody's code (numbers under the built-in functions, without format rules or further parts) is
judged in the calling thread.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from tithe.errors import ConfigError, DataError, Failure, FailureCause, RolloutFailure, boundary
from tithe.rewards.grading import SCORES, grade_at_once
from tithe.rewards.process import GRACE_S, WorkerProcess
from tithe.rewards.spec import KEY, SYMBOLIC_MATH, ModelScore, RewardModel, RewardResult, RewardSpec
from tithe.rewards.symbolic import require
from tithe.rewards.wire import pack

if TYPE_CHECKING:  # only attributes of an item are read here
    from tithe.types import PromptItem

_MAX_IN_PROCESS_CHARS: Final = 100_000
_STATS: Final = ("scored", "abstained", "failed", "timeouts", "deaths", "worker_starts")


@dataclass(frozen=True)
class _Job:
    payload: bytes | None  # None only loads the function
    future: Future[RewardResult]


class RewardPool:
    """Scores completions. Thread-safe; `close` (or a `with` block) ends the workers.

    `timeout_s` counts from the moment a worker gets the text. A judge that fails, dies or takes too long gives an
    abstention with `failure` set; its worker is replaced. A function that cannot be loaded, or returns something that
    is no reward, raises `ConfigError` out of `score`. Workers start with the first text that needs one, or in `check`.
    `log_path` collects what user functions print (default: discarded).
    """

    def __init__(
        self,
        spec: RewardSpec,
        workers: int = 1,
        timeout_s: float = 5.0,
        memory_mib: int = 1024,
        *,
        log_path: Path | None = None,
        in_process: bool = True,
    ) -> None:
        self._spec = spec
        self.models: Mapping[str, RewardModel] = {}
        """The reward models that `spec` names, by function: set before the first text is judged."""
        self._n_workers = workers
        self._timeout_s = timeout_s
        self._memory_mib = memory_mib
        self._log_path = log_path
        self._in_process = in_process and spec.is_simple
        if spec.function == SYMBOLIC_MATH:
            require()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._judging_s = 0.0
        self._threads: list[threading.Thread] = []
        self._live: set[WorkerProcess] = set()
        self._is_closed = False

    async def score(self, item: PromptItem, text: str, info: Mapping[str, Any] | None = None) -> RewardResult:
        """Judge `text` as an answer to `item`; `info` (`finish`, `token_ids`) reaches functions that ask for it. Reward
        models are asked first; one that fails or gives no finite number makes an abstention with that failure."""
        began_s = time.perf_counter()
        scores: dict[str, ModelScore] = {}
        for function in self._spec.models:
            model = self.models[function]
            with boundary(FailureCause.REWARD) as slot:
                value = await asyncio.wrap_future(model.ask(item, text))
                if not math.isfinite(value):
                    raise RolloutFailure(FailureCause.REWARD, f"the reward model gave {value}")
                scores[function] = ModelScore(value, model.grader)
            if slot.failure is not None:
                failed = RewardResult(None, reason=slot.failure.message, failure=slot.failure, grader=model.grader)
                return self._counted(failed.timed(time.perf_counter() - began_s))
        return await asyncio.wrap_future(self.submit(item, text, info, scores))

    def submit(
        self,
        item: PromptItem,
        text: str,
        info: Mapping[str, Any] | None = None,
        scores: Mapping[str, ModelScore] | None = None,
    ) -> Future[RewardResult]:
        """As `score`, for threads: never blocks on a worker. `scores` is what the spec's reward models said, by
        function. Raises `DataError` for a row that JSON cannot carry."""
        future: Future[RewardResult] = Future()
        result = None
        began_s = time.perf_counter()
        if self._in_process and len(text) <= _MAX_IN_PROCESS_CHARS:
            result = grade_at_once(self._spec, item, text, scores)
        if result is not None:
            self._finish(future, result, began_s)
        else:
            said = {function: [score.value, score.grader] for function, score in (scores or {}).items()}
            self._queue(_Job(_payload(item, text, {**(info or {}), **({SCORES: said} if said else {})}), future))
        return future

    def check(self) -> None:
        """Start a worker and load the function, as early proof. Raises `ConfigError`; blocks until it is loaded."""
        if not (self._in_process and self._spec.function != SYMBOLIC_MATH):
            future: Future[RewardResult] = Future()
            self._queue(_Job(None, future))
            future.result()

    def stats(self) -> Mapping[str, float]:
        """Since the start: counts of scored, abstained (failures included), failed, timeouts, deaths, worker_starts;
        `reward_s`, the seconds that judging took, of all texts together and without their waiting for a worker."""
        with self._lock:
            return {f"reward_{name}": float(self._counts[name]) for name in _STATS} | {"reward_s": self._judging_s}

    def close(self) -> None:
        """Kill the workers and reap them; jobs that are queued or running end as cancelled. Idempotent; blocks."""
        with self._lock:
            self._is_closed = True
            threads, live = self._threads, list(self._live)
            self._threads = []
        for _ in threads:
            self._jobs.put(None)
        for worker in live:
            worker.interrupt()
        for thread in threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _queue(self, job: _Job) -> None:
        with self._lock:
            if not self._is_closed:
                if not self._threads:
                    names = [f"reward-{number}" for number in range(self._n_workers)]
                    self._threads = [threading.Thread(target=self._serve, name=name, daemon=True) for name in names]
                    for thread in self._threads:
                        thread.start()
                self._jobs.put(job)
                return
        self._finish(job.future, _closed())

    def _serve(self) -> None:
        """One thread and its worker process, until `close`."""
        worker: WorkerProcess | None = None
        while (job := self._jobs.get()) is not None:
            if not job.future.set_running_or_notify_cancel():
                continue
            if self._is_closed:
                self._finish(job.future, _closed())
                continue
            began_s = time.perf_counter()
            try:
                if worker is not None and not worker.is_alive():
                    self._retire(worker)
                    worker = None
                worker = worker or self._start()
                began_s = time.perf_counter()
                reply = {} if job.payload is None else worker.ask(job.payload, self._timeout_s)
                self._settle(job.future, reply, began_s)
            except ConfigError as error:
                job.future.set_exception(error)
            except (TimeoutError, EOFError, OSError, ValueError) as error:  # the last: what came is no message
                self._finish(job.future, self._lost(worker, error), began_s)
                worker = None
        if worker is not None:
            self._retire(worker)

    def _start(self) -> WorkerProcess:
        worker = WorkerProcess(self._spec, self._memory_mib, self._log_path)
        with self._lock:
            self._counts["worker_starts"] += 1
            self._live.add(worker)
            is_closed = self._is_closed
        if is_closed:  # closed while it started: nobody else has seen it
            worker.interrupt()
        return worker

    def _retire(self, worker: WorkerProcess, grace_s: float = 0.0) -> str:
        with self._lock:
            self._live.discard(worker)
        return worker.kill(grace_s)

    def _lost(self, worker: WorkerProcess | None, error: Exception) -> RewardResult:
        """Replace a worker that was too slow or died; what its job gets instead of a reward."""
        grace_s = 0.0 if isinstance(error, TimeoutError) else GRACE_S
        how = str(error) if worker is None else self._retire(worker, grace_s)
        if self._is_closed:
            return _closed()
        if isinstance(error, TimeoutError):
            message = f"judging took longer than reward.timeout_s = {self._timeout_s:g}"
            failure, count = Failure(FailureCause.TIMEOUT, message), "timeouts"
        else:
            message = f"the reward worker ended ({how}) while judging with {self._spec.function}"
            failure, count = Failure(FailureCause.REWARD, message), "deaths"
        with self._lock:
            self._counts[count] += 1
        return RewardResult(None, reason=failure.message, failure=failure)

    def _settle(self, future: Future[RewardResult], reply: Mapping[str, Any], began_s: float) -> None:
        """Turn a worker's reply into the future's result."""
        if "breach" in reply:
            future.set_exception(ConfigError(reply["breach"], KEY))
        elif "failed" in reply:
            failure = Failure(FailureCause.REWARD, reply["failed"])
            self._finish(future, RewardResult(None, reason=failure.message, failure=failure), began_s)
        elif not reply:
            future.set_result(RewardResult(None))
        else:
            result = RewardResult(
                reply["value"], reply["parts"], reply["facts"], reply["reason"], grader=reply["grader"]
            )
            self._finish(future, result, began_s)

    def _finish(self, future: Future[RewardResult], result: RewardResult, began_s: float | None = None) -> None:
        timed = result if began_s is None else result.timed(time.perf_counter() - began_s)
        future.set_result(self._counted(timed))

    def _counted(self, result: RewardResult) -> RewardResult:
        with self._lock:
            self._counts["abstained" if result.value is None else "scored"] += 1
            self._counts["failed"] += result.failure is not None
            self._judging_s += result.seconds
        return result


def _closed() -> RewardResult:
    failure = Failure(FailureCause.CANCELLED, "the reward pool was closed")
    return RewardResult(None, reason=failure.message, failure=failure)


def _payload(item: PromptItem, text: str, info: Mapping[str, Any]) -> bytes:
    row = {
        "id": item.id,
        "messages": [dict(message) for message in item.messages],
        "text": item.text,
        "answer": item.answer,
        "extra": dict(item.extra),
    }
    try:
        return pack({"item": row, "text": text, "info": dict(info)})
    except (TypeError, ValueError) as error:
        raise DataError(f"the row cannot be sent to a reward worker: {error}", where=f"prompt {item.id}") from error
