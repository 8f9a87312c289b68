"""The order in which prompts are drawn: one shuffle per pass over the task, a pure function of seed and position."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from tithe.errors import DataError


class PromptSource:
    """Endless shuffled passes over prompt ids, addressed by position.

    The order is by hash of (seed, pass, id): it depends neither on the order of the file nor on a library's random
    generator, so a resumed run goes on exactly. A task with fewer prompts than a batch simply reaches its next pass
    within the batch. Raises `DataError` for an empty or repeating list.

    >>> source = PromptSource(["a", "b", "c"], seed=1)
    >>> sorted(source.at(i) for i in range(3)), sorted(source.at(i) for i in range(3, 6))
    (['a', 'b', 'c'], ['a', 'b', 'c'])
    """

    def __init__(self, prompt_ids: Sequence[str], seed: int) -> None:
        if not prompt_ids:
            raise DataError("the task has no prompts to train on")
        if len(set(prompt_ids)) != len(prompt_ids):
            repeated = next(p for i, p in enumerate(prompt_ids) if p in prompt_ids[:i])
            raise DataError(f"two prompts of the task have the id {repeated!r}; ids must be unique")
        self._ids = tuple(sorted(prompt_ids))
        self._seed = seed
        self._pass = -1
        self._order: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def digest(self) -> str:
        """Identity of the order: equal digests draw equal prompts at equal positions."""
        return _hash(self._seed, "digest", *self._ids)

    def at(self, position: int) -> str:
        """The prompt at a position; positions count on through all passes."""
        wanted, offset = divmod(position, len(self._ids))
        if wanted != self._pass:
            self._order = tuple(sorted(self._ids, key=lambda prompt_id: _hash(self._seed, str(wanted), prompt_id)))
            self._pass = wanted
        return self._order[offset]

    def coin(self, position: int) -> float:
        """A random number in [0, 1) of a position: the same for a prompt and a pass, whatever else is drawn."""
        wanted = position // len(self._ids)
        return int(_hash(self._seed, "coin", str(wanted), self.at(position)), 16) / 2**128


def _hash(seed: int, *parts: str) -> str:
    digest = hashlib.blake2b(str(seed).encode(), digest_size=16)
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
