"""Groups of several sizes in batches of one size: how large a group may be, and which groups make a batch.

Names as in `bounds`: B rollouts per batch, outstanding = A + R - S·B rollouts that wait, are leased or running.

Rules

    fit_group      a new group takes the samples it wants, but no more than its batch has room for, and all that is left
                   when the rest would be less than the smallest group
    choose_batch   a batch is the first set of waiting groups, in queue order, that sums to exactly B

Why batches are whole: groups are admitted so that outstanding passes every multiple of B, and a group that is dropped
leaves its size to the one that takes its place. So when everything outstanding is finished, it sums to a multiple of B.
With one number of samples, or several of which each divides the next (8, 4, 2), any B rollouts hold a set of exactly B.
With others, groups that overtook one another may leave none; the batch then waits for what still runs, and if that
does not help either it is the fullest set, short of B by less than a group. At M = 0 every batch is whole: what is
outstanding is that one batch. The loops cannot wait for each other: if fewer than B rollouts wait and none runs,
outstanding < B and a group of at most B - outstanding may start (proof 5 of `bounds`).
"""

from __future__ import annotations

from collections.abc import Sequence


def fit_group(wanted: int, room: int, least: int) -> int:
    """Samples of a group that wants `wanted`, where its batch has room for `room` ≥ 1 rollouts.

    Never more than `room`; at least `least` unless the room itself is smaller; less than `wanted` + `least`.

    >>> [fit_group(wanted, 10, 4) for wanted in (4, 6, 7, 12)]
    [4, 6, 10, 10]
    """
    size = min(max(wanted, least), room)
    return room if 0 < room - size < least else size


def choose_batch(sizes: Sequence[int], wanted: int, *, more_to_come: bool = False) -> list[int]:
    """Positions of the groups that make a batch of `wanted` rollouts, `sizes` being those that wait, oldest first.

    Empty while fewer than `wanted` rollouts wait. Of all sets that sum to `wanted` it is the one with the oldest
    groups (the first in lexicographic order). Where there is none, the answer is empty as well if there is
    `more_to_come` (groups that run), else the largest sum below counts. O(groups · wanted / 64), by bit sets.

    >>> choose_batch([4, 4, 4], 8), choose_batch([6, 4, 2, 4], 8), choose_batch([6, 6], 8), choose_batch([4], 8)
    ([0, 1], [0, 2], [0], [])
    >>> choose_batch([6, 6], 8, more_to_come=True)
    []
    """
    if sum(sizes) < wanted:
        return []
    below = (1 << (wanted + 1)) - 1
    reachable = [1]  # reachable[-1 - i]: bit s is set when some of sizes[i:] sum to s
    for size in reversed(sizes):
        reachable.append((reachable[-1] | reachable[-1] << size) & below)
    rest = reachable[-1].bit_length() - 1
    if rest < wanted and more_to_come:
        return []
    chosen: list[int] = []
    for position, size in enumerate(sizes):
        later = reachable[len(sizes) - 1 - position]
        if size <= rest and later >> (rest - size) & 1:
            chosen.append(position)
            rest -= size
    return chosen
