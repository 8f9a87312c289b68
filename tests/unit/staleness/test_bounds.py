"""The staleness contract: each rule by itself, then random interleavings of two loops that obey only the rules."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tithe.errors import ConfigError
from tithe.staleness import Bounds, may_begin_batch, may_start_group, must_drop, must_publish


@st.composite
def bounds(draw, max_age=None):
    lag = draw(st.integers(0, 5))
    group_size = draw(st.integers(1, 4))
    return Bounds(
        batch_rollouts=group_size * draw(st.integers(1, 4)),
        group_size=group_size,
        max_lag=lag,
        max_age=draw(st.integers(0, 5)) if max_age is None else max_age,
        sync_every=draw(st.integers(1, max(1, lag))),
    )


def test_capacity_counts_whole_groups():
    b = Bounds(batch_rollouts=8, group_size=4, max_lag=1, max_age=1)
    assert may_start_group(b, accepted=8, running=4, served_serial=0)
    assert not may_start_group(b, accepted=8, running=5, served_serial=0)
    assert may_start_group(b, accepted=8, running=5, served_serial=1)


def test_resumed_run_does_not_blow_up_its_budget():
    """D15: bound 2, batch 8, resumed at version 50: 24 rollouts may be outstanding, not 424."""
    b = Bounds(batch_rollouts=8, group_size=1, max_lag=2, max_age=2)
    running = 0
    while may_start_group(b, accepted=50 * 8, running=running, served_serial=50):
        running += 1
    assert running == b.max_outstanding == 24


def test_drop_and_begin_are_inclusive():
    b = Bounds(batch_rollouts=8, group_size=8, max_lag=2, max_age=3)
    assert not must_drop(b, min_serial=4, trainer_serial=7)
    assert must_drop(b, min_serial=3, trainer_serial=7)
    assert may_begin_batch(b, trainer_serial=6, served_serial=4)
    assert not may_begin_batch(b, trainer_serial=7, served_serial=4)


def test_publish_is_due_when_nothing_trainable_can_be_sampled():
    """`sync_every` alone would let M = 0 wait for ever (proof 5)."""
    b = Bounds(batch_rollouts=8, group_size=8, max_lag=4, max_age=0, sync_every=4)
    assert must_publish(b, trainer_serial=1, served_serial=0)
    assert not must_publish(b, trainer_serial=1, served_serial=1)


@pytest.mark.parametrize(
    ("kwargs", "key"),
    [
        ({"group_size": 0}, "rl.samples_per_prompt"),
        ({"batch_rollouts": 12}, "rl.batch_size_per_update"),
        ({"batch_rollouts": 0}, "rl.batch_size_per_update"),
        ({"max_lag": -1}, "rl.max_policy_update_lag"),
        ({"max_age": -1}, "rl.max_sample_age"),
        ({"sync_every": 0}, "rl.sync_every"),
        ({"max_lag": 2, "sync_every": 3}, "rl.sync_every"),
        ({"max_lag": 0, "sync_every": 2}, "rl.sync_every"),
    ],
)
def test_wrong_bounds_name_their_key(kwargs, key):
    good = {"batch_rollouts": 16, "group_size": 8, "max_lag": 4, "max_age": 4, "sync_every": 1}
    with pytest.raises(ConfigError) as caught:
        Bounds(**{**good, **kwargs})
    assert caught.value.key == key
    assert key in str(caught.value)


@dataclass
class Simulation:
    """Rollout and train loops reduced to counters. Groups finish in random order; a publish takes a while."""

    bounds: Bounds
    buffer: int
    rng: random.Random
    trainer: int = 0
    served: int = 0
    publishing: bool = False
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    batches: list[list[int]] = field(default_factory=list)
    dropped: int = 0

    def admit(self) -> bool:
        b = self.bounds
        accepted = self.trainer * b.batch_rollouts + len(self.waiting) * b.group_size
        running = len(self.running) * b.group_size
        room = (len(self.waiting) + len(self.running) + 1) * b.group_size <= self.buffer
        if not (room and may_start_group(b, accepted=accepted, running=running, served_serial=self.served)):
            return False
        self.running.append(self.served)
        return True

    def finish(self) -> bool:
        if not self.running:
            return False
        serial = self.running.pop(self.rng.randrange(len(self.running)))
        # on_publish = recompute or keep: later tokens may come from later versions, the oldest is what counts
        self.waiting.append(serial)
        return True

    def confirm(self) -> bool:
        if not self.publishing:
            return False
        self.served, self.publishing = self.trainer, False
        return True

    def train(self) -> bool:
        b = self.bounds
        if self.publishing:
            return False
        if must_publish(b, trainer_serial=self.trainer, served_serial=self.served):
            self.publishing = True
            return True
        keep = [s for s in self.waiting if not must_drop(b, min_serial=s, trainer_serial=self.trainer)]
        self.dropped += len(self.waiting) - len(keep)
        self.waiting = keep
        if len(keep) < b.groups_per_batch:
            return False
        assert may_begin_batch(b, trainer_serial=self.trainer, served_serial=self.served)
        picked = [keep.pop(self.rng.randrange(len(keep))) for _ in range(b.groups_per_batch)]
        self.batches.append([self.trainer - s for s in picked])
        self.trainer += 1
        return True

    def check(self) -> None:
        b = self.bounds
        outstanding = (len(self.waiting) + len(self.running)) * b.group_size
        assert outstanding <= max(0, self.served + b.max_age + 1 - self.trainer) * b.batch_rollouts <= b.max_outstanding
        assert self.trainer - self.served <= max(1, b.max_lag)

    def run(self, steps: int) -> None:
        moves = [self.admit, self.finish, self.confirm, self.train]
        for _ in range(steps):
            self.rng.shuffle(moves)
            assert any(move() for move in moves), "deadlock: no loop can move"
            self.check()


@settings(max_examples=150, deadline=None)
@given(b=bounds(), seed=st.integers(0, 2**32), extra=st.integers(0, 3))
def test_random_interleavings_keep_every_bound_and_never_stop(b, seed, extra):
    sim = Simulation(b, b.batch_rollouts + extra * b.group_size, random.Random(seed))
    sim.run(300)
    ages = [age for batch in sim.batches for age in batch]
    assert len(sim.batches) >= 300 // (6 * b.groups_per_batch + 6)
    assert max(ages, default=0) <= b.max_age
    assert min(ages, default=0) >= 0


@settings(max_examples=80, deadline=None)
@given(b=bounds(max_age=0), seed=st.integers(0, 2**32))
def test_age_zero_makes_exactly_one_batch_per_version(b, seed):
    sim = Simulation(b, b.max_outstanding, random.Random(seed))
    sim.run(300)
    assert sim.batches
    assert all(age == 0 for batch in sim.batches for age in batch)
    assert sim.dropped == 0


@settings(max_examples=80, deadline=None)
@given(b=bounds(), seed=st.integers(0, 2**32))
def test_training_in_admission_order_drops_nothing(b, seed):
    class InOrder(Simulation):
        def finish(self) -> bool:
            if self.running:
                self.waiting.append(self.running.pop(0))
                return True
            return False

        def train(self) -> bool:
            self.rng.randrange = lambda _n: 0
            return super().train()

    sim = InOrder(b, b.max_outstanding, random.Random(seed))
    sim.run(300)
    assert sim.dropped == 0
    assert sim.batches
