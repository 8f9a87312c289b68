"""Requests from any thread: batched on the lane, answered once each, failures told one by one."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from tithe.errors import FailureCause, RolloutFailure, UserError
from tithe.models import Lane
from tithe.scorers import Reply, ScoringDesk

WAIT_S = 30.0


class Scale:
    """Scores by the first reply token; holds its first batch until it is let go."""

    max_tokens = 8

    def __init__(self, error: Exception | None = None) -> None:
        self.batches: list[int] = []
        self.threads: set[str] = set()
        self.go = threading.Event()
        self.error = error

    def score(self, replies: Sequence[Reply]) -> list[float]:
        self.go.wait(WAIT_S)
        self.batches.append(len(replies))
        self.threads.add(threading.current_thread().name)
        if self.error is not None:
            raise self.error
        return [float(reply.reply_ids[0]) for reply in replies]

    def memory_bytes(self) -> int:
        return 0


def reply(value: int, tokens: int = 2) -> Reply:
    return Reply((1,), (value,) * (tokens - 1))


@pytest.fixture
def lane() -> Iterator[Lane]:
    lane = Lane("desk-lane").start()
    yield lane
    lane.close()


def test_what_waits_together_is_scored_together_and_never_more_than_the_bound(lane: Lane) -> None:
    scale = Scale()
    desk = ScoringDesk(scale, lane, batch_tokens=6)
    first = desk.submit(reply(50))
    futures = [desk.submit(reply(value)) for value in range(7)]
    scale.go.set()
    assert first.result(WAIT_S) == 50.0
    assert [future.result(WAIT_S) for future in futures] == [float(value) for value in range(7)]
    assert scale.threads == {"desk-lane"}
    assert sum(scale.batches) == 8
    assert max(scale.batches) == 3, "three replies of two tokens fill six"


def test_others_take_their_turn_between_two_batches(lane: Lane) -> None:
    scale, order = Scale(), []
    desk = ScoringDesk(scale, lane, batch_tokens=2)
    futures = [desk.submit(reply(value)) for value in range(3)]
    lane.submit(lambda: order.append(len(scale.batches)))
    scale.go.set()
    for future in futures:
        future.result(WAIT_S)
    lane.call(lambda: None)
    assert scale.batches == [1, 1, 1]
    assert order[0] < 3, "a job that came later runs before the last batch"


@pytest.mark.parametrize("error", [ZeroDivisionError("bad"), UserError("bad")])
def test_a_failed_batch_is_one_failure_for_each(lane: Lane, error: Exception) -> None:
    scale = Scale(error)
    scale.go.set()
    desk = ScoringDesk(scale, lane, batch_tokens=64)
    for future in [desk.submit(reply(value)) for value in range(3)]:
        with pytest.raises(RolloutFailure, match="bad") as failed:
            future.result(WAIT_S)
        assert failed.value.cause is FailureCause.REWARD
    scale.error = None
    assert desk.submit(reply(4)).result(WAIT_S) == 4.0, "and the next one is scored"


def test_a_reply_beyond_the_models_positions_fails_at_once(lane: Lane) -> None:
    desk = ScoringDesk(Scale(), lane, batch_tokens=64)
    with pytest.raises(RolloutFailure, match="9 tokens are more than the reward model's 8"):
        desk.submit(reply(1, tokens=9)).result(0)


def test_a_closed_lane_leaves_nobody_waiting() -> None:
    lane = Lane("closing").start()
    scale = Scale()
    desk = ScoringDesk(scale, lane, batch_tokens=2)
    futures = [desk.submit(reply(value)) for value in range(4)]
    scale.go.set()
    lane.close()
    futures.append(desk.submit(reply(9)))
    errors = [future.exception(WAIT_S) for future in futures]
    failures = [error for error in errors if error is not None]
    assert errors[-1] is not None, "what comes after the end is not scored"
    assert {type(error) for error in failures} == {RolloutFailure}
    assert {getattr(error, "cause", None) for error in failures} == {FailureCause.CANCELLED}


def test_a_request_that_was_given_up_is_not_scored(lane: Lane) -> None:
    scale = Scale()
    desk = ScoringDesk(scale, lane, batch_tokens=64)
    desk.submit(reply(1))
    lane.submit(scale.go.wait, WAIT_S)
    given_up, kept = desk.submit(reply(2)), desk.submit(reply(3))
    cancelled = given_up.cancel()
    scale.go.set()
    assert kept.result(WAIT_S) == 3.0
    assert cancelled
    assert sum(scale.batches) == 2
