"""Groups of several sizes: the two rules by themselves, then two loops that obey them in random interleavings."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from tithe.staleness import Bounds, choose_batch, fit_group, must_drop, must_publish, room_for_rollouts


@given(wanted=st.integers(1, 40), room=st.integers(1, 40), least=st.integers(1, 8))
def test_a_group_fits_its_batch_and_leaves_no_remainder_too_small_for_another(wanted, room, least):
    size = fit_group(wanted, room, least)
    assert min(least, room) <= size <= room
    assert room - size == 0 or room - size >= least
    assert size < max(wanted, least) + least
    if least <= wanted and room - wanted >= least:
        assert size == wanted


@settings(max_examples=200)
@given(sizes=st.lists(st.integers(1, 6), max_size=9), wanted=st.integers(1, 12))
def test_a_batch_is_the_first_subset_of_the_right_sum_among_all_subsets(sizes, wanted):
    chosen = choose_batch(sizes, wanted)
    if sum(sizes) < wanted:
        assert chosen == []
        return
    subsets = [s for n in range(len(sizes) + 1) for s in itertools.combinations(range(len(sizes)), n)]
    fullest = max(total for s in subsets if (total := sum(sizes[i] for i in s)) <= wanted)
    assert tuple(chosen) == min(s for s in subsets if sum(sizes[i] for i in s) == fullest)


@given(size=st.integers(1, 8), batch=st.integers(1, 5), waiting=st.integers(0, 30))
def test_with_one_size_a_batch_is_the_oldest_groups(size, batch, waiting):
    assert choose_batch([size] * waiting, size * batch) == (list(range(batch)) if waiting >= batch else [])


@dataclass
class Loops:
    """Two loops reduced to sizes. Groups end in random order; some are dropped; their sizes are taken up again."""

    bounds: Bounds
    sizes: list[int]
    is_adaptive: bool
    rng: random.Random
    trainer: int = 0
    served: int = 0
    running: list[tuple[int, int]] = field(default_factory=list)
    waiting: list[tuple[int, int]] = field(default_factory=list)
    owed: list[int] = field(default_factory=list)
    batches: list[list[tuple[int, int]]] = field(default_factory=list)

    def admit(self) -> bool:
        b = self.bounds
        running = sum(size for size, _ in self.running)
        accepted = self.trainer * b.batch_rollouts + sum(size for size, _ in self.waiting)
        room = room_for_rollouts(b, accepted=accepted, running=running, served_serial=self.served)
        if room <= 0:
            return False
        if self.owed:
            size = min(self.owed.pop(0), room)
        else:
            batch = (accepted + running) // b.batch_rollouts
            wanted = self.rng.choice(self.sizes) if self.is_adaptive else self.sizes[batch % len(self.sizes)]
            size = fit_group(wanted, (room - 1) % b.batch_rollouts + 1, min(self.sizes))
        assert 1 <= size <= room
        self.running.append((size, self.served))
        return True

    def finish(self) -> bool:
        if not self.running:
            return False
        group = self.running.pop(self.rng.randrange(len(self.running)))
        if self.rng.random() < 0.1:
            self.owed.append(group[0])  # failed as a whole
        else:
            self.waiting.append(group)
        return True

    def train(self) -> bool:
        b = self.bounds
        if must_publish(b, trainer_serial=self.trainer, served_serial=self.served):
            self.served = self.trainer
            return True
        old = [g for g in self.waiting if must_drop(b, min_serial=g[1], trainer_serial=self.trainer)]
        self.waiting = [g for g in self.waiting if g not in old]
        self.owed += [size for size, _ in old]
        sizes = [size for size, _ in self.waiting]
        chosen = choose_batch(sizes, b.batch_rollouts, more_to_come=bool(self.running))
        if not chosen:
            return bool(old)
        self.batches.append([(self.waiting[i][0], self.trainer - self.waiting[i][1]) for i in chosen])
        self.waiting = [g for i, g in enumerate(self.waiting) if i not in chosen]
        self.trainer += 1
        return True

    def run(self, steps: int) -> None:
        moves = [self.admit, self.finish, self.train]
        for _ in range(steps):
            self.rng.shuffle(moves)
            assert any(move() for move in moves), f"deadlock: {self}"
            outstanding = sum(size for size, _ in self.running + self.waiting)
            assert outstanding <= self.bounds.max_outstanding


@st.composite
def loops(draw, *, is_adaptive, max_age=None):
    """Sizes of phases divide each other; adaptive sizes are anything from the least on."""
    lag = draw(st.integers(0, 3))
    batch = draw(st.sampled_from([8, 12, 24]))
    chain = {8: (2, 4, 8), 12: (3, 6, 12), 24: (2, 6, 12)}[batch]
    sizes = draw(st.lists(st.sampled_from(range(2, 9) if is_adaptive else chain), min_size=1, max_size=5))
    age = draw(st.integers(0, 3)) if max_age is None else max_age
    sync = draw(st.integers(1, max(1, min(lag, age + 1))))
    bounds = Bounds(
        batch_rollouts=batch, group_size=sizes[0] if not is_adaptive else 1, max_lag=lag, max_age=age, sync_every=sync
    )
    return Loops(bounds, sizes, is_adaptive, random.Random(draw(st.integers(0, 2**32))))


@settings(max_examples=150, deadline=None)
@given(loops=loops(is_adaptive=True))
def test_adaptive_sizes_never_stop_the_loops_and_fill_every_batch_but_for_less_than_a_group(loops):
    loops.run(400)
    assert len(loops.batches) >= 5
    for batch in loops.batches:
        assert loops.bounds.batch_rollouts - 2 * max(loops.sizes) < sum(size for size, _ in batch)
        assert sum(size for size, _ in batch) <= loops.bounds.batch_rollouts
        assert max(age for _, age in batch) <= loops.bounds.max_age


@settings(max_examples=100, deadline=None)
@given(loops=loops(is_adaptive=True, max_age=0))
def test_adaptive_sizes_make_whole_batches_of_one_version_at_age_zero(loops):
    loops.run(400)
    for batch in loops.batches:
        assert sum(size for size, _ in batch) == loops.bounds.batch_rollouts
        assert {age for _, age in batch} == {0}


@settings(max_examples=150, deadline=None)
@given(loops=loops(is_adaptive=False))
def test_phases_of_one_size_each_make_whole_batches_whatever_overtakes_and_is_dropped(loops):
    loops.run(400)
    assert {sum(size for size, _ in batch) for batch in loops.batches} == {loops.bounds.batch_rollouts}
