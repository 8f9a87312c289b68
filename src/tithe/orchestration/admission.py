"""How large the next group may be, and with which settings it is sampled."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tithe.config import PhaseValues, Schedule
from tithe.pool import Draw, PoolCounts, PromptRecord, adaptive_samples
from tithe.staleness import Bounds, fit_group, room_for_rollouts
from tithe.types import SamplingParams


@dataclass(frozen=True)
class GroupSizes:
    """How far the number of samples follows a prompt's record: from the first of `span` to the second; None: not.

    >>> GroupSizes((4, 16)).largest(8)
    16
    """

    span: tuple[int, int] | None = None

    @property
    def least(self) -> int:
        """Fewest samples that a group may have."""
        return 1 if self.span is None else self.span[0]

    def largest(self, usual: int) -> int:
        """Most samples that a prompt is given where the usual number is `usual`."""
        return usual if self.span is None else self.span[1]

    def wanted(self, usual: int, record: PromptRecord | None) -> int:
        """Samples for a prompt."""
        if self.span is None:
            return usual
        return adaptive_samples(record, usual=usual, least=self.span[0], most=self.span[1])


@dataclass(frozen=True)
class Room:
    """Room for one more group: `most` rollouts by the staleness bounds, `in_batch` of them in the batch numbered
    `batch`, `likely` as many as the group will hardly exceed.

    >>> Room(batch=3, most=16, in_batch=8, likely=4, phase=None).in_batch
    8
    """

    batch: int
    most: int
    in_batch: int
    likely: int
    phase: PhaseValues | None


@dataclass(frozen=True)
class AdmissionRules:
    """Pure functions of counts. Groups are numbered by the batch they are for: outstanding and trained rollouts in the
    order of admission, cut into batches. Without a schedule, `params` and the bounds' group size hold throughout.
    """

    bounds: Bounds
    params: SamplingParams
    schedule: Schedule | None = None
    sizes: GroupSizes = field(default_factory=GroupSizes)

    def room(self, counts: PoolCounts, served_serial: int) -> Room | None:
        """Room for the next group under the served version; None when there is none."""
        size = self.bounds.batch_rollouts
        accepted, running = counts.accepted_rollouts(batch_rollouts=size), counts.running_rollouts
        most = room_for_rollouts(self.bounds, accepted=accepted, running=running, served_serial=served_serial)
        if most <= 0:
            return None
        batch = (accepted + running) // size
        phase = None if self.schedule is None else self.schedule.at(batch)
        in_batch = (most - 1) % size + 1  # `most` ends with a batch
        likely = min(self.sizes.largest(self._usual(phase)), in_batch)
        return Room(batch, most, in_batch, likely, phase)

    def draw(self, room: Room) -> Draw:
        """What to ask the pool for."""
        usual, sizes = self._usual(room.phase), self.sizes
        return Draw(
            batch=room.batch,
            phase="" if room.phase is None else room.phase.name,
            samples=lambda record: fit_group(sizes.wanted(usual, record), room.in_batch, sizes.least),
            most=room.most,
        )

    def sampling(self, batch: int, group_id: int) -> SamplingParams:
        """The template of the requests of a group admitted for `batch`."""
        if self.schedule is None:
            return replace(self.params, group=group_id)
        phase = self.schedule.at(batch)
        return replace(self.params, group=group_id, temperature=phase.temperature, top_p=phase.top_p)

    def _usual(self, phase: PhaseValues | None) -> int:
        return self.bounds.group_size if phase is None else phase.samples
