"""Messages between ranks: the same bits on the other side, and nothing but the kinds that were named."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from tithe.errors import Failure, FailureCause
from tithe.types import BatchScores, FinishReason, Rollout, RolloutGroup, TrainingBatch
from tithe.utils.wire import Wire, kinds_in

CARRIERS = kinds_in(TrainingBatch)


@dataclass(frozen=True)
class Secret:
    """A kind that no wire here knows."""

    name: str


def rollout(**changes: object) -> Rollout:
    logp = np.array([-0.1, np.nan, -np.inf], np.float32)
    ids = np.array([5, 2, 9], np.int32)
    one = Rollout(0, ids, ids > 4, logp, logp[::-1], ids, 0.7, FinishReason.STOP, reward_parts={"right": 1 / 3})
    return replace(one, **changes)


def test_a_batch_arrives_bit_for_bit() -> None:
    experts = np.arange(12, dtype=np.uint16).reshape(3, 2, 2)
    failed = rollout(failure=Failure(FailureCause.TIMEOUT, "too “late”"), reward=None, experts=experts)
    group = RolloutGroup(2**40, "p", np.zeros(0, np.int32), (rollout(), failed), 0, 3)
    logs = np.array([-0.5, 2.0], np.float32)
    scores = BatchScores(value=[[None, logs]], kl_coef=1 / 3, rejected=frozenset({(0, 1), (3, 2)}))
    sent = TrainingBatch([group], [[np.array([0.1], np.float32), None]], 7, scores)
    wire = Wire(*CARRIERS)
    got = wire.decode(wire.encode(sent))
    assert isinstance(got, TrainingBatch)
    (mine,) = got.groups
    for a, b in zip(mine.rollouts, group.rollouts, strict=True):
        for name in ("token_ids", "loss_mask", "logp", "logp_behaviour", "serials"):
            assert getattr(a, name).dtype == getattr(b, name).dtype
            assert getattr(a, name).tobytes() == getattr(b, name).tobytes()
        assert (a.finish, a.reward, a.reward_parts, a.failure) == (b.finish, b.reward, b.reward_parts, b.failure)
    np.testing.assert_array_equal(mine.rollouts[1].experts, experts)
    assert (mine.group_id, mine.prompt_ids.shape, got.serial) == (2**40, (0,), 7)
    assert got.advantages[0][1] is None
    assert got.scores is not None
    assert (got.scores.kl_coef, got.scores.rejected, got.scores.prox_logp) == (1 / 3, scores.rejected, None)
    assert got.scores.value is not None
    np.testing.assert_array_equal(got.scores.value[0][1], logs)
    mine.rollouts[0].logp[0] = 1.0  # its own memory


@pytest.mark.parametrize("value", [Secret("x"), b"bytes", Path("/x"), {1: 2}, np.array(["text"]), np.array([object()])])
def test_what_is_not_named_does_not_travel(value: object) -> None:
    with pytest.raises(TypeError):
        Wire(*CARRIERS).encode(value)


def test_a_reader_builds_nothing_but_its_own_kinds() -> None:
    with pytest.raises(ValueError, match="no message of the kinds"):
        Wire(*CARRIERS).decode(Wire(Secret).encode(Secret("x")))
    head = b'{"array": ["|O8", [1], 0]}'
    with pytest.raises(ValueError, match="no message of the kinds"):
        Wire(*CARRIERS).decode(len(head).to_bytes(8, "little") + head + b"\0" * 32)


def test_the_kinds_of_a_batch_are_those_its_fields_may_hold() -> None:
    assert set(CARRIERS) == {TrainingBatch, RolloutGroup, Rollout, BatchScores, FinishReason, Failure, FailureCause}


def test_two_kinds_of_one_name_are_told_apart_by_nobody() -> None:
    with pytest.raises(ValueError, match="one name"):
        Wire(Secret, type("Secret", (), {}))
