"""The pool in memory: the states and moves of `tithe.pool`, without its disk.

    admit ─▶ RUNNING ─▶ READY ─▶ LEASED ─▶ TRAINED      reject, drop ─▶ DROPPED

It outlives the process that is simulated: a crash gives up what runs, and a restart rewinds to the last checkpoint.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from tithe.errors import PoolError
from tithe.pool import Draw
from tithe.pool.states import COMMIT, DROP, LEASE, REJECT, REQUEUE, TRAIN, GroupState, Move
from tithe.simulator.prompts import Prompts
from tithe.simulator.shapes import Shape


@dataclass(eq=False)
class Group:
    """A row of the pool. `usable` rollouts are trained; `rows` is what a training pass computes of them; `pass_rate`
    is the share that is right, where that is simulated."""

    group_id: int
    prompt: int
    batch: int
    """It was admitted for, the first being 0."""
    shape: Shape
    admitted_serial: int
    admitted_s: float
    state: GroupState = GroupState.RUNNING
    min_serial: int = 0
    usable: int = 0
    pass_rate: float | None = None
    rows: int = 0
    tokens: int = 0
    ended_s: float = 0.0
    batch_serial: int | None = None
    batch_position: int = 0

    @property
    def place(self) -> tuple[bool, int, int, int]:
        """Its place in the queue: what is trained again first, in its old batches; then by admission."""
        again = self.batch_serial
        return (again is None, again or 0, self.batch_position, self.group_id)


class GroupPool:
    """Every group is somewhere, and leaves exactly once."""

    def __init__(self, prompts: Prompts | None = None) -> None:
        self.prompts = prompts or Prompts()
        self.serial = 0
        self.groups: dict[int, Group] = {}
        self.left: Counter[str] = Counter()
        self._put_back: deque[tuple[int, int | None, int]] = deque()  # prompt, id that its group takes again, size
        self._next_id = 0
        self._counts: Counter[GroupState] = Counter()
        self._rollouts: Counter[GroupState] = Counter()
        self._ready: dict[int, Group] = {}

    @property
    def running(self) -> int:
        """Groups admitted and not finished."""
        return self._counts[GroupState.RUNNING]

    @property
    def waiting(self) -> int:
        """Groups that are READY."""
        return self._counts[GroupState.READY]

    @property
    def leased(self) -> int:
        """Groups in the batch that is trained."""
        return self._counts[GroupState.LEASED]

    @property
    def running_rollouts(self) -> int:
        """Of groups that run."""
        return self._rollouts[GroupState.RUNNING]

    @property
    def waiting_rollouts(self) -> int:
        """Of READY groups."""
        return self._rollouts[GroupState.READY]

    @property
    def outstanding_rollouts(self) -> int:
        """Of groups that run, wait or are leased."""
        return self.running_rollouts + self.waiting_rollouts + self._rollouts[GroupState.LEASED]

    def _count(self, state: GroupState, group: Group, by: int) -> None:
        self._counts[state] += by
        self._rollouts[state] += by * group.shape.size

    def admit(self, draw: Draw, shape: Callable[[int, int, int], Shape], serial: int, now_s: float) -> Group:
        """Begin the group of the next prompt: one that was put back, at the size that it had, else a new one. `shape`
        makes it of size, prompt and group id."""
        if self._put_back:
            prompt, again, size = self._put_back.popleft()
            size = min(size, draw.most)
        else:
            prompt, again = self.prompts.draw(draw.batch), None
            size = draw.samples(self.prompts.record(prompt, draw.batch))
        group_id = self._next_id if again is None else again
        self._next_id += again is None
        self.prompts.admit(prompt, draw.batch)
        made = shape(size, prompt, group_id)
        group = self.groups[group_id] = Group(group_id, prompt, draw.batch, made, serial, now_s)
        self._count(GroupState.RUNNING, group, 1)
        return group

    def commit(self, group: Group) -> None:
        """RUNNING → READY."""
        self._move(group, COMMIT)

    def reject(self, group: Group) -> None:
        """RUNNING → DROPPED: nothing of it can be used; its prompt is put back."""
        self._move(group, REJECT)
        self._put_back.append((group.prompt, None, group.shape.size))
        self.left["failed"] += 1

    def drop_stale(self, group: Group) -> None:
        """READY → DROPPED: too old; its prompt is put back."""
        self._move(group, DROP)
        self._put_back.append((group.prompt, None, group.shape.size))
        group.batch_serial = None
        self.left["stale"] += 1

    def ready(self) -> list[Group]:
        """READY groups in their order."""
        return sorted(self._ready.values(), key=lambda group: group.place)

    def lease(self, groups: list[Group]) -> None:
        """READY → LEASED."""
        for group in groups:
            self._move(group, LEASE)

    def mark_trained(self, groups: list[Group]) -> None:
        """LEASED → TRAINED; the serial rises with it."""
        self.serial += 1
        for position, group in enumerate(groups):
            self._move(group, TRAIN)
            group.batch_serial, group.batch_position = self.serial, position
        self.left["trained"] += len(groups)

    def crash(self, checkpoint_serial: int) -> tuple[int, int]:
        """The process has died and is back: what ran is made again under the same ids, leased groups are READY, and
        those trained after the checkpoint are READY in their old batches. Returns how many were given up and replayed.
        """
        given_up = [group for group in self.groups.values() if group.state is GroupState.RUNNING]
        for group in given_up:
            del self.groups[group.group_id]
            self._count(GroupState.RUNNING, group, -1)
            self.prompts.give_up(group.prompt, group.batch)
        again = sorted(((g.prompt, g.group_id, g.shape.size) for g in given_up), key=lambda one: -one[1])
        self._put_back.extendleft(again)
        replayed = 0
        for group in self.groups.values():
            if group.state is GroupState.LEASED:
                self._move(group, REQUEUE)
            elif group.state is GroupState.TRAINED and (group.batch_serial or 0) > checkpoint_serial:
                group.state = GroupState.READY
                self._count(GroupState.TRAINED, group, -1)
                self._count(GroupState.READY, group, 1)
                self._ready[group.group_id] = group
                replayed += 1
        self.left["trained"] -= replayed
        self.serial = checkpoint_serial
        return len(given_up), replayed

    def _move(self, group: Group, move: Move) -> None:
        if group.state not in move.sources:
            raise PoolError(f"group {group.group_id} is {group.state} and cannot be {move.name}")
        self._count(group.state, group, -1)
        self._count(move.target, group, 1)
        if group.state is GroupState.READY:
            del self._ready[group.group_id]
        if move.target is GroupState.READY:
            self._ready[group.group_id] = group
        group.state = move.target
