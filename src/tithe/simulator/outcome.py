"""What a simulation says, in figures with their units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tithe.pool.states import GroupState
from tithe.simulator.draws import histogram, percentile
from tithe.simulator.groups import Group, GroupPool
from tithe.simulator.ledger import PUBLISH, SAMPLE, TRAIN, BatchRow, Ledger
from tithe.simulator.scenario import Scenario

KINDS = (SAMPLE, TRAIN, PUBLISH)
BUSY = 0.9


@dataclass(frozen=True, eq=False)
class Outcome:
    """A finished simulation. Rates are those after the pipeline has filled: the first M + 1 batches are left out of
    them, at most half. `span_s` is the whole time, crashes and restarts included.
    """

    scenario: Scenario
    pool: GroupPool
    ledger: Ledger
    span_s: float
    lanes: tuple[str, ...]
    crashes: int

    @property
    def warm_batches(self) -> int:
        """Batches left out of rates."""
        return min(self.scenario.bounds.max_age + 1, self.scenario.steps // 2)

    @property
    def batches(self) -> list[BatchRow]:
        """Trained batches after the pipeline has filled."""
        return self.ledger.batches[self.warm_batches :]

    @property
    def steady_s(self) -> float:
        """Seconds over which rates are taken."""
        rows, warm = self.ledger.batches, self.warm_batches
        return rows[-1].end_s - (rows[warm - 1].end_s if warm else 0.0)

    @property
    def step_s(self) -> float:
        """Mean seconds from one trained batch to the next."""
        return self.steady_s / len(self.batches)

    @property
    def rollouts_per_s(self) -> float:
        """Trained rollouts per second."""
        return sum(row.rollouts for row in self.batches) / self.steady_s if self.steady_s else 0.0

    @property
    def age_mean(self) -> float:
        """Mean age of trained groups, in batches."""
        ages = [age for row in self.batches for age in row.ages]
        return sum(ages) / len(ages)

    @property
    def trained_groups(self) -> list[Group]:
        """Of all batches, those of the filling pipeline among them."""
        return [group for group in self.pool.groups.values() if group.state is GroupState.TRAINED]

    @property
    def mixed_frac(self) -> float | None:
        """Share of trained rollouts in groups with right answers and wrong ones, which alone teach a group-relative
        loss; None where no pass rate is given."""
        found = [(group.shape.size, group.pass_rate) for group in self.trained_groups if group.pass_rate is not None]
        total = sum(size for size, _ in found)
        return sum(size for size, rate in found if 0 < rate < 1) / total if total else None

    def age_histogram(self) -> dict[int, float]:
        """Share of trained groups by age in batches."""
        return histogram([age for row in self.batches for age in row.ages])

    def lag_histogram(self) -> dict[int, float]:
        """Share of batches by how far the trainer was ahead of the served version when they began."""
        return histogram([row.lag for row in self.batches])

    def gap_histogram(self) -> dict[int, float]:
        """Share of batches by the distance to the oldest live version after their publication (`version_gap`)."""
        return histogram([row.version_gap for row in self.batches])

    def utilisation(self) -> dict[str, dict[str, float]]:
        """By lane: the share of the whole time spent on each kind of work, and idle."""
        shares: dict[str, dict[str, float]] = {}
        for lane in self.lanes:
            busy = {f"{kind}_frac": self.ledger.busy_s(lane, kind) / self.span_s for kind in KINDS}
            shares[lane] = {**busy, "idle_frac": max(0.0, 1.0 - sum(busy.values()))}
        return shares

    def idle_frac(self) -> float:
        """Mean idle share of the lanes."""
        return sum(lane["idle_frac"] for lane in self.utilisation().values()) / len(self.lanes)

    def bottleneck(self) -> str:
        """What more of would help: a resource that is busy nine tenths of the time, or else more overlap."""
        busy = {f"the lane {lane}": 1.0 - shares["idle_frac"] for lane, shares in self.utilisation().items()}
        workers = self.scenario.reward_workers
        if workers is not None:
            busy["reward workers"] = self.ledger.seconds["reward_work"] / workers / self.span_s
        name, share = max(busy.items(), key=lambda item: item[1])
        return f"{name}, {share:.0%} busy" if share >= BUSY else f"waiting: nothing is busy over {share:.0%}"

    def record(self) -> dict[str, Any]:
        """As JSON: see docs/simulator.md."""
        return {**self._setting(), **self._speed(), **self._waiting(), **self._staleness(), **self._groups()}

    def _setting(self) -> dict[str, Any]:
        scenario, bounds = self.scenario, self.scenario.bounds
        return {
            "mode": scenario.mode,
            "layout": scenario.layout.name,
            "batch_rollouts": bounds.batch_rollouts,
            "group_rollouts": bounds.group_size,
            "max_policy_update_lag_batches": bounds.max_lag,
            "max_sample_age_batches": bounds.max_age,
            "sync_every_batches": bounds.sync_every,
            "buffer_rollouts": min(scenario.buffer, bounds.max_outstanding),
            "in_flight_sequences": scenario.max_running,
            "on_publish": scenario.on_publish,
            "batches": scenario.steps,
            "warm_batches": self.warm_batches,
            "seed": scenario.seed,
        }

    def _speed(self) -> dict[str, Any]:
        counts, steps = self.ledger.counts, [row.step_s for row in self.batches]
        tokens = sum(row.tokens for row in self.batches)
        return {
            "span_s": self.span_s,
            "step_s": self.step_s,
            "step_p50_s": percentile(steps, 0.5),
            "step_p90_s": percentile(steps, 0.9),
            "trained_rollouts_per_s": self.rollouts_per_s,
            "trained_tok_per_s": tokens / self.steady_s if self.steady_s else 0.0,
            "drawn_tok": counts["drawn_tokens"],
            "sequences_per_tick": counts["drawn_tokens"] / counts["ticks"] if counts["ticks"] else 0.0,
            "utilisation": self.utilisation(),
            "idle_frac": self.idle_frac(),
            "bottleneck": self.bottleneck(),
        }

    def _waiting(self) -> dict[str, Any]:
        rows, seconds, workers = self.batches, self.ledger.seconds, self.scenario.reward_workers
        n = len(rows)
        held = {name.removeprefix("held_back_by_"): s for name, s in seconds.items() if name.startswith("held_back")}
        return {
            "trainer_wait_s_per_step": sum(row.wait_s for row in rows) / n,
            "train_s_per_step": sum(row.train_s for row in rows) / n,
            "publish_s_per_step": sum(row.publish_s for row in rows) / n,
            "admission_held_back_s": dict(sorted(held.items())),
            "reward_worker_busy_frac": None if workers is None else seconds["reward_work"] / workers / self.span_s,
            "reward_queue_s": seconds["reward_queue"],
            "version_room_wait_s": seconds["version_room"],
        }

    def _staleness(self) -> dict[str, Any]:
        return {
            "age_mean_batches": self.age_mean,
            "age_histogram_frac": {str(age): share for age, share in self.age_histogram().items()},
            "lag_histogram_frac": {str(lag): share for lag, share in self.lag_histogram().items()},
            "version_gap_histogram_frac": {str(gap): share for gap, share in self.gap_histogram().items()},
        }

    def _groups(self) -> dict[str, Any]:
        counts, pool, left = self.ledger.counts, self.pool, self.pool.left
        return {
            "groups_admitted": counts["admitted"],
            "groups_trained": left["trained"],
            "rollouts_per_group": sum(group.shape.size for group in self.trained_groups) / left["trained"],
            "rollouts_mixed_frac": self.mixed_frac,
            "groups_dropped_stale": left["stale"],
            "groups_dropped_failed": left["failed"],
            "groups_left_running": pool.running,
            "groups_left_waiting": pool.waiting + pool.leased,
            "groups_given_up": counts["given_up"],
            "groups_replayed": counts["replayed"],
            "dropped_tok": counts["dropped_tokens"],
            "failed_rollouts": counts["failed_rollouts"],
            "publications": counts["publications"],
            "crashes": self.crashes,
        }

    def states(self) -> dict[GroupState, int]:
        """Groups by state at the end."""
        found = [group.state for group in self.pool.groups.values()]
        return {state: found.count(state) for state in GroupState}
