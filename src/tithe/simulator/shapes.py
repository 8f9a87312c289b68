"""What one group will be like, decided by its number alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tithe.simulator.draws import uniform
from tithe.simulator.scenario import Sample, Scenario, Turn


@dataclass(frozen=True)
class Shape:
    """A group's prompt and its rollouts.

    >>> Shape(8, (Sample((Turn(3),)), Sample((Turn(5),)))).new_tokens
    8
    """

    prompt_tokens: int
    samples: tuple[Sample, ...]

    @property
    def size(self) -> int:
        """Rollouts."""
        return len(self.samples)

    @property
    def new_tokens(self) -> int:
        """Drawn in all rollouts."""
        return sum(sample.new_tokens for sample in self.samples)


def draw_shape(scenario: Scenario, size: int, prompt: int, group_id: int) -> Shape:
    """The shape of a group of `size` rollouts. The same numbers give the same shape under every setting with the same
    seed.

    A measured group belongs to its prompt (or to the sample, as `measured_by` says). Of distributions only the prompt's
    own length and pass rate do; what is sampled differs from group to group.
    """
    work, seed = scenario.workload, scenario.seed
    measured = work.measured
    if measured:
        number = prompt if work.measured_by == "prompt" else group_id
        row = measured[(number + seed) % len(measured)]
        lengths: Sequence[int | None] = [row.new_tokens[i % len(row.new_tokens)] for i in range(size)]
        tokens, outside_s = row.prompt_tokens, row.outside_s
    else:
        lengths, outside_s = [None] * size, 0.0
        tokens = max(1, round(work.prompt_tokens.quantile(uniform(seed, "prompt", prompt))))
    drawn = [_draw_sample(scenario, group_id, i, length, outside_s) for i, length in enumerate(lengths)]
    if work.pass_rate is not None:
        rate = work.pass_rate.quantile(uniform(seed, "pass rate", prompt))
        drawn = [replace(one, is_right=uniform(seed, "right", group_id, i) < rate) for i, one in enumerate(drawn)]
    return Shape(tokens, tuple(drawn))


def _draw_sample(scenario: Scenario, group_id: int, sample: int, length: int | None, outside_s: float) -> Sample:
    work, seed, address = scenario.workload, scenario.seed, (group_id, sample)
    n_turns = max(1, round(work.turns.quantile(uniform(seed, "turns", *address))))
    turns: list[Turn] = []
    for number in range(n_turns):
        new = length
        if new is None:
            new = round(work.new_tokens.quantile(uniform(seed, "length", *address, number)))
        elif n_turns > 1:  # a measured rollout's tokens, spread over the turns
            new = length * (number + 1) // n_turns - length * number // n_turns if length else 0
        last = number == n_turns - 1
        wait_s = outside_s if last else work.tool_s.quantile(uniform(seed, "tool", *address, number))
        answer = 0 if last else round(work.tool_tokens.quantile(uniform(seed, "answer", *address, number)))
        turns.append(Turn(max(1, new), wait_s, answer))
    reward_s = work.reward_s.quantile(uniform(seed, "reward", *address))
    rate = scenario.failures.rollout_rate
    crashes = rate > 0 and uniform(seed, "crash", *address) < rate
    return Sample(tuple(turns), reward_s, crashes)
