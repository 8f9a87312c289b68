"""Which prompt comes next, and what is known of it: the order, the curriculum and the records of `tithe.pool`.

Without a number of prompts the task never ends, no prompt comes back, and nothing is ever known of one.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from tithe.pool import Curriculum, PromptRecord, PromptSource


class Prompts:
    """The prompts of a task, numbered from 0, in shuffled passes; `n_prompts` 0: new ones for ever.

    >>> prompts = Prompts()
    >>> prompts.draw(batch=0), prompts.draw(batch=0)
    (0, 1)
    """

    def __init__(self, n_prompts: int = 0, seed: int = 0, curriculum: Curriculum | None = None) -> None:
        self._source = PromptSource([str(number) for number in range(n_prompts)], seed) if n_prompts else None
        self._curriculum = curriculum or Curriculum()
        self._cursor = 0
        self._admitted: Counter[tuple[int, int]] = Counter()  # (prompt, batch) of groups
        self._measured: defaultdict[int, dict[int, tuple[int, float]]] = defaultdict(dict)

    def draw(self, batch: int) -> int:
        """The next prompt for a batch that the curriculum does not pass over; if it passes over all, the next."""
        source, start = self._source, self._cursor
        if source is None:
            self._cursor += 1
            return start
        seen = range(start, start + 2 * len(source))  # two passes meet every prompt
        cursor = next((at for at in seen if not self._is_passed_over(source, at, batch)), start)
        self._cursor = cursor + 1
        return int(source.at(cursor))

    def _is_passed_over(self, source: PromptSource, cursor: int, batch: int) -> bool:
        if not self._curriculum.is_on:
            return False
        prompt = int(source.at(cursor))
        is_there = self._admitted[prompt, batch] > 0
        return is_there or self._curriculum.skips(self.record(prompt, batch), batch=batch, coin=source.coin(cursor))

    def admit(self, prompt: int, batch: int) -> None:
        """A group of the prompt begins for a batch."""
        self._admitted[prompt, batch] += 1

    def give_up(self, prompt: int, batch: int) -> None:
        """It ended without a trace: a crash."""
        self._admitted[prompt, batch] -= 1

    def measure(self, prompt: int, batch: int, group_id: int, pass_rate: float) -> None:
        """A group of the prompt was judged. Of several for a batch the one with the highest id counts."""
        before = self._measured[prompt].get(batch)
        if before is None or before[0] < group_id:
            self._measured[prompt][batch] = group_id, pass_rate

    def record(self, prompt: int, before_batch: int) -> PromptRecord | None:
        """The newest measured group for a batch before that one, as the pool keeps it."""
        batches = [batch for batch in self._measured.get(prompt, ()) if batch < before_batch]
        if not batches:
            return None
        return PromptRecord(self._measured[prompt][max(batches)][1], max(batches))
