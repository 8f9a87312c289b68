"""Alarms: a listener over metric rows that says when a run goes wrong, and which key to change.

Consumes rows; produces `Alarm` values; waits for nothing and acts on nothing.
"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from tithe.errors import FailureCause
from tithe.metrics import FAILURE_PREFIX, MetricRow, RunningStats, iter_numbers
from tithe.monitoring._format import format_number

_log = logging.getLogger(__name__)


class AlarmKind(enum.StrEnum):
    """What went wrong."""

    REPEATED_FAILURE = "repeated failure"
    MOSTLY_DROPPED = "most groups dropped"
    ALL_ZERO_REWARDS = "all rewards zero"
    KL_RUNAWAY = "KL runaway"
    SKIPPED_STEP = "skipped step"
    FEW_PROMPTS = "few distinct prompts"


@dataclass(frozen=True)
class Alarm:
    """One alarm. `remedy_keys` are the configuration keys to look at first.

    >>> str(Alarm(AlarmKind.SKIPPED_STEP, 7, "The loss was not finite.", ("optimizer.lr",)))
    'step 7, skipped step: The loss was not finite. Look at: optimizer.lr'
    """

    kind: AlarmKind
    step: int
    message: str
    remedy_keys: tuple[str, ...]

    def __str__(self) -> str:
        return f"step {self.step}, {self.kind}: {self.message} Look at: {', '.join(self.remedy_keys)}"


@dataclass(frozen=True)
class AlarmRules:
    """When to raise. `batches` in a row (``monitor.alarm_after``) of one cause of failure, of groups mostly dropped, of
    rewards that are all 0; `few_prompts_batches` in a row with fewer distinct prompts than groups and than
    `few_prompts`. KL (nats/token) is
    compared with `kl_factor` times its mean over the batches `kl_first` to `kl_last`; a mean below `kl_noise_floor`
    counts as the floor, so that a policy that has hardly moved yet raises nothing.

    >>> AlarmRules(batches=5).few_prompts_batches
    3
    """

    batches: int = 3
    few_prompts_batches: int = 3
    few_prompts: int = 8
    kl_factor: float = 10.0
    kl_first: int = 5
    kl_last: int = 15
    kl_noise_floor: float = 1e-3


_FAILURE_REMEDIES: dict[str, tuple[str, ...]] = {
    FailureCause.TIMEOUT: ("reward.timeout_s", "reward.workers"),
    FailureCause.CANCELLED: ("rl.max_sample_age",),
    FailureCause.ENGINE: ("engine.kv_memory_mib", "engine.max_running"),
    FailureCause.REWARD: ("reward.function", "reward.memory_mib"),
    FailureCause.ENVIRONMENT: ("task.source",),
}


class _Streak:
    """Counts bad batches in a row; `extend` is True once per streak, when it reaches its length."""

    def __init__(self, needed: int) -> None:
        self._needed = needed
        self._length = 0

    def extend(self, *, bad: bool) -> bool:
        self._length = self._length + 1 if bad else 0
        return self._length == self._needed


class Alarms:
    """A metric sink that raises alarms. Each is raised once per episode and again only after it has cleared.

    Reads `failures_<cause>` (or `failures`), `groups` with `dropped_groups` and `prompts`, `reward_mean` and
    `reward_std`, `kl_mean`, `skipped`. A row that carries a rule's names is one batch; on other rows the rule is not
    judged. A step may repeat: a skipped batch is followed by another try. `raised` keeps every alarm in order.

    >>> alarms = Alarms(on_alarm=lambda alarm: print(alarm.kind))
    >>> for step in (1, 2, 3, 4):
    ...     alarms.write(step, {"reward_mean": 0.0, "reward_std": 0.0})
    all rewards zero
    """

    def __init__(
        self,
        rules: AlarmRules | None = None,
        *,
        on_alarm: Callable[[Alarm], None] = lambda alarm: _log.warning("%s", alarm),
    ) -> None:
        self.raised: list[Alarm] = []
        self._rules = rules or AlarmRules()
        self._on_alarm = on_alarm
        self._failures: dict[str, _Streak] = {}
        self._dropped = _Streak(self._rules.batches)
        self._zero = _Streak(self._rules.batches)
        self._few = _Streak(self._rules.few_prompts_batches)
        self._skipped = _Streak(1)
        self._kl_early = RunningStats()
        self._kl_high = False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Judge one row and tell of every alarm it raises."""
        for alarm in self._judge(step, values):
            self.raised.append(alarm)
            self._on_alarm(alarm)

    def replay(self, rows: Iterable[MetricRow]) -> None:
        """Take in rows of earlier, as after a resume: alarms are kept in `raised` but nobody is told again."""
        for row in rows:
            self.raised.extend(self._judge(int(row["step"]), dict(iter_numbers(row))))

    def close(self) -> None:
        """Nothing to release."""

    def _judge(self, step: int, values: Mapping[str, float]) -> list[Alarm]:
        found = self._judge_failures(step, values)
        for rule in (self._judge_drops, self._judge_rewards, self._judge_prompts, self._judge_kl, self._judge_skips):
            alarm = rule(step, values)
            if alarm is not None:
                found.append(alarm)
        return found

    def _judge_failures(self, step: int, values: Mapping[str, float]) -> list[Alarm]:
        counts = {n.removeprefix(FAILURE_PREFIX): v for n, v in values.items() if n.startswith(FAILURE_PREFIX)}
        if not counts:
            if "failures" not in values:
                return []
            counts = {"unnamed": values["failures"]}
        found: list[Alarm] = []
        for cause in sorted(counts.keys() | self._failures.keys()):
            streak = self._failures.setdefault(cause, _Streak(self._rules.batches))
            count = counts.get(cause, 0.0)
            if streak.extend(bad=count > 0):
                message = (
                    f"Rollouts failed for the same cause ({cause}) in {self._rules.batches} batches in a row; "
                    f"{count:.0f} in the last."
                )
                remedy = _FAILURE_REMEDIES.get(cause, ("reward.function", "task.source"))
                found.append(Alarm(AlarmKind.REPEATED_FAILURE, step, message, remedy))
        return found

    def _judge_drops(self, step: int, values: Mapping[str, float]) -> Alarm | None:
        if "groups" not in values or "dropped_groups" not in values:
            return None
        dropped, trained = values["dropped_groups"], values["groups"]
        if not self._dropped.extend(bad=dropped > trained):
            return None
        message = (
            f"More than half of the groups were dropped as too old in {self._rules.batches} batches in a row; "
            f"{dropped:.0f} of {dropped + trained:.0f} in the last."
        )
        return Alarm(AlarmKind.MOSTLY_DROPPED, step, message, ("rl.max_sample_age", "rl.rollout_buffer_size"))

    def _judge_rewards(self, step: int, values: Mapping[str, float]) -> Alarm | None:
        if "reward_mean" not in values or "reward_std" not in values:
            return None
        if not self._zero.extend(bad=values["reward_mean"] == 0 and values["reward_std"] == 0):
            return None
        message = (
            f"Every reward was exactly 0 in {self._rules.batches} batches in a row: nothing can be "
            "learned. Most often the grader finds no answer in the text."
        )
        keys = ("reward.function", "rollout.max_new_tokens", "rollout.system_prompt")
        return Alarm(AlarmKind.ALL_ZERO_REWARDS, step, message, keys)

    def _judge_prompts(self, step: int, values: Mapping[str, float]) -> Alarm | None:
        if "groups" not in values or "prompts" not in values:
            return None
        rules, prompts = self._rules, values["prompts"]
        if not self._few.extend(bad=prompts < min(rules.few_prompts, values["groups"])):
            return None
        message = (
            f"The same prompts came twice, leaving fewer than {rules.few_prompts} distinct ones, in "
            f"{rules.few_prompts_batches} batches in a row; {prompts:.0f} in {values['groups']:.0f} groups of the last."
        )
        keys = ("task.source", "schedule.rest_batches", "schedule.prompt_weights")
        return Alarm(AlarmKind.FEW_PROMPTS, step, message, keys)

    def _judge_kl(self, step: int, values: Mapping[str, float]) -> Alarm | None:
        kl = values.get("kl_mean")
        if kl is None or not math.isfinite(kl):
            return None
        rules = self._rules
        if rules.kl_first <= step <= rules.kl_last:
            self._kl_early.add(kl)
        if step <= rules.kl_last or self._kl_early.count == 0:
            return None
        limit = rules.kl_factor * max(self._kl_early.mean, rules.kl_noise_floor)
        was_high = self._kl_high
        self._kl_high = kl > limit or (was_high and kl > limit / 2)  # one excursion is one alarm
        if was_high or not self._kl_high:
            return None
        message = (
            f"KL to the reference is {format_number(kl)} nats/token, above {format_number(rules.kl_factor)} times its "
            f"mean over batches {rules.kl_first} to {rules.kl_last} (limit {format_number(limit)})."
        )
        return Alarm(AlarmKind.KL_RUNAWAY, step, message, ("optimizer.lr", "rl.kl_coef"))

    def _judge_skips(self, step: int, values: Mapping[str, float]) -> Alarm | None:
        if "skipped" not in values or not self._skipped.extend(bad=values["skipped"] > 0):
            return None
        message = "The optimizer step was skipped because the loss or a gradient was not finite."
        return Alarm(AlarmKind.SKIPPED_STEP, step, message, ("optimizer.lr", "optimizer.max_grad_norm"))
