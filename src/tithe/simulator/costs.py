"""What a piece of work on a compute lane takes, in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class WorkCosts(Protocol):
    """Seconds of work on one copy of the base: `LaneCosts` as measured on a run, or the planner's."""

    def tick_s(self, *, prefill_tokens: int, sequences: int, context_tokens: int) -> float:
        """One engine tick: `prefill_tokens` rows of prompts and one row for each of `sequences`, which hold
        `context_tokens` cached tokens together."""
        ...

    def train_s(self, tokens: int) -> float:
        """Forward and backward over one micro-batch of so many rows."""
        ...

    @property
    def optimizer_s(self) -> float:
        """The optimizer step that ends a batch."""
        ...

    @property
    def publish(self) -> PublishCosts:
        """One publication."""
        ...


@dataclass(frozen=True)
class PublishCosts:
    """A publication in its three parts, one after another.

    On a shared base the first and last are jobs of the one lane; the second occupies nobody and delays the trainer all
    the same.

    >>> PublishCosts(trainer_s=0.2, transfer_s=0.5, engine_s=0.3).total_s
    1.0
    """

    trainer_s: float = 0.0
    """On the trainer's lane: casting, the trainer's own answers to the probe."""
    transfer_s: float = 0.0
    """On no lane: files, network."""
    engine_s: float = 0.0
    """On each engine's lane: loading the version and proving it."""

    @property
    def total_s(self) -> float:
        """From the optimizer step to the served version when no lane is busy."""
        return self.trainer_s + self.transfer_s + self.engine_s


@dataclass(frozen=True)
class LaneCosts:
    """Costs that are linear in rows: what a processor shows, where a row costs the same in prefill and decode.

        tick = tick_fixed_s + prefill_tokens · prefill_s_per_token + sequences · decode_s_per_sequence
               + context_tokens · decode_s_per_cached_token
        micro-batch = micro_fixed_s + tokens · train_s_per_token

    >>> LaneCosts(tick_fixed_s=0.5, decode_s_per_sequence=0.25).tick_s(prefill_tokens=0, sequences=2, context_tokens=9)
    1.0
    """

    tick_fixed_s: float = 0.0
    prefill_s_per_token: float = 0.0
    decode_s_per_sequence: float = 0.0
    decode_s_per_cached_token: float = 0.0
    train_s_per_token: float = 0.0
    micro_fixed_s: float = 0.0
    optimizer_s: float = 0.0
    publish: PublishCosts = PublishCosts()

    def tick_s(self, *, prefill_tokens: int, sequences: int, context_tokens: int) -> float:
        """See the class."""
        rows_s = prefill_tokens * self.prefill_s_per_token + sequences * self.decode_s_per_sequence
        return self.tick_fixed_s + rows_s + context_tokens * self.decode_s_per_cached_token

    def train_s(self, tokens: int) -> float:
        """See the class."""
        return self.micro_fixed_s + tokens * self.train_s_per_token
