"""Scenarios by hand, and what must hold of every outcome."""

from __future__ import annotations

from itertools import pairwise

from tithe.pool import GroupState
from tithe.simulator import Fixed, LaneCosts, Layout, Outcome, PublishCosts, Scenario, Workload
from tithe.staleness import Bounds

SECOND = LaneCosts(tick_fixed_s=1.0, micro_fixed_s=1.0)
"""A tick takes a second and a micro-batch a second, whatever is in them."""


def bounds(lag=0, *, age=None, sync_every=1, batch=1, group=1) -> Bounds:
    return Bounds(batch, group, lag, lag if age is None else age, sync_every)


def scene(rules: Bounds, costs=SECOND, work: Workload | None = None, **more) -> Scenario:
    """One token per rollout, after a prompt of one token; a batch is one micro-batch."""
    work = work or Workload(prompt_tokens=Fixed(1), new_tokens=Fixed(1))
    return Scenario(rules, costs, work, **{"steps": 8, "micro_batch_tokens": 10**9, "max_live_versions": 99, **more})


RICH = LaneCosts(
    tick_fixed_s=0.01,
    prefill_s_per_token=1e-4,
    decode_s_per_sequence=1e-3,
    decode_s_per_cached_token=1e-6,
    train_s_per_token=5e-4,
    micro_fixed_s=2e-3,
    optimizer_s=0.01,
    publish=PublishCosts(0.01, 0.02, 0.01),
)
TWO_LANES = Layout("separate")


def overlaps(outcome: Outcome, one: str, other: str) -> bool:
    """Whether two lanes ever work at the same time."""
    spans = outcome.ledger.spans
    return any(
        a.begin_s < b.end_s - 1e-9 and b.begin_s < a.end_s - 1e-9
        for a in spans
        if a.lane == one
        for b in spans
        if b.lane == other
    )


def check(outcome: Outcome) -> None:
    """The invariants of every simulation."""
    scenario, pool, ledger = outcome.scenario, outcome.pool, outcome.ledger
    rules = scenario.bounds
    assert pool.serial == scenario.steps == len(ledger.batches)
    assert [row.serial for row in ledger.batches] == list(range(1, scenario.steps + 1))
    assert all(0 <= row.lag <= rules.max_lag for row in ledger.batches)
    assert all(0 <= age <= rules.max_age for row in ledger.batches for age in row.ages)
    assert all(len(row.ages) == rules.groups_per_batch for row in ledger.batches)
    states, left = outcome.states(), pool.left
    assert states[GroupState.TRAINED] == left["trained"] == scenario.steps * rules.groups_per_batch
    assert states[GroupState.DROPPED] == left["stale"] + left["failed"]
    assert ledger.counts["admitted"] - ledger.counts["given_up"] == sum(states.values())
    assert sum(row.dropped for row in ledger.batches) <= left["stale"]
    for lane in outcome.lanes:
        spans = [span for span in ledger.spans if span.lane == lane]
        assert all(a.end_s <= b.begin_s + 1e-9 for a, b in pairwise(spans))
        assert ledger.busy_s(lane) <= outcome.span_s + 1e-6
    for shares in outcome.utilisation().values():
        assert abs(sum(shares.values()) - 1) < 1e-9
        assert min(shares.values()) >= 0
