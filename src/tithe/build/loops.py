"""The two loops of a run, wired to a session's objects and to the sinks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from tithe.advantages import make_advantages
from tithe.build.hooks import Evaluator, Saver, make_publisher, train_hooks
from tithe.build.learning import trainer_settings
from tithe.build.objective import advantage_plan, update_plan
from tithe.build.record import RunRecord
from tithe.build.session import Session
from tithe.config import RunConfig, schedule_of
from tithe.engines import SpreadEngine
from tithe.metrics import FanOut, JsonlSink, RowKind, TensorBoardSink, read_rows, row_kind
from tithe.monitoring import AlarmRules, Alarms, ProgressView
from tithe.orchestration import (
    GroupSizes,
    Learner,
    RolloutCounters,
    RolloutLoop,
    RolloutPlan,
    RunControl,
    ServedPolicy,
    TrainLoop,
    TrainOutcome,
    TrainPlan,
    run_training,
    stop_on_signals,
)
from tithe.pool import Checkpoint, Pool, PoolReader
from tithe.rewards import RunningScale
from tithe.staleness import Bounds
from tithe.trainer import TrainerSettings
from tithe.types import MetricSink, RolloutGroup
from tithe.weight_sync import DirectoryChannel

METRICS_FILE = "metrics.jsonl"
ROLLOUT_WORK = ("decode_s", "generated_tok", "prefill_s", "prefill_tok", "reused_tok", "reward_s")
"""Counters of the engine and of the graders that go into the metrics, batch by batch."""


def train_and_roll(
    session: Session, run_dir: Path, pool: Pool, start: Checkpoint | None, record: RunRecord, *, evaluating: bool
) -> TrainOutcome:
    """Run both loops to the end. `start` is the checkpoint a resume goes on from. Raises what a loop failed with."""
    cfg, control = session.cfg, RunControl()
    counters = RolloutCounters(drawn=lambda: _done(session, "generated_tok"))
    channel = DirectoryChannel(run_dir / "adapters", cfg.run.name)
    if isinstance(session.engine, SpreadEngine):
        session.engine.on_lost = control.fail
    served = ServedPolicy(control, max_live=cfg.engine.max_live_versions, retire=session.engine.drop_adapter)
    rollouts = RolloutLoop(
        pool=pool,
        items=session.items(),
        player=session.player,
        engine=session.engine,
        served=served,
        control=control,
        bounds=Bounds.of(cfg.rl),
        counters=counters,
        plan=_rollout_plan(session),
    )
    scaled = _reward_scale(cfg, pool)
    evaluator = Evaluator(session, run_dir, control) if evaluating else None
    plan = advantage_plan(cfg)
    with _sinks(cfg, run_dir, pool.serial) as fan:
        sink = _Observed(fan, record, lambda: {**session.engine.stats(), **session.rewards.stats()})
        publisher = make_publisher(session, channel, sink)
        train_loop = TrainLoop(
            pool=pool,
            learner=Learner(
                trainer=session.learner,
                lane=session.base.lane,
                control=control,
                advantages=lambda groups, scores, whole: make_advantages(scaled(groups), plan, scores, whole),
                update=update_plan(cfg, session.trainer),
                scorer=session.learner.scorer,
                settings_at=_settings_at(cfg),
            ),
            served=served,
            control=control,
            bounds=Bounds.of(cfg.rl),
            counters=counters,
            sink=sink,
            lineage=channel.lineage_after_resume(pool.serial, session.base.numeric_mode),
            work=lambda: _done(session, "generated_tok", "prefill_tok"),
            plan=_train_plan(cfg, evaluating=evaluating),
            hooks=train_hooks(publisher, evaluator, Saver(session, run_dir, channel)),
        )
        if start is not None:
            train_loop.resume_from(start)
        in_main = threading.current_thread() is threading.main_thread()
        with stop_on_signals(control) if in_main else nullcontext():
            return run_training(rollouts, train_loop)


def _done(session: Session, *names: str) -> float:
    """A sum of the engine's counters; an engine that serves nothing yet may lack them."""
    found = session.engine.stats()
    return sum(found.get(name, 0.0) for name in names)


def _reward_scale(cfg: RunConfig, pool: Pool) -> Callable[[Sequence[RolloutGroup]], Sequence[RolloutGroup]]:
    """What `reward.normalise` does to a batch before its advantages are taken."""
    if cfg.reward.normalise != "running":
        return lambda groups: groups

    def trained(after: int) -> list[tuple[int, float]]:
        with PoolReader(pool.path) as reader:
            rows = reader.query(
                "SELECT g.batch_serial AS serial, r.reward FROM rollout r JOIN rollout_group g USING (group_id)"
                " WHERE g.state = 'trained' AND g.batch_serial > ? AND r.reward IS NOT NULL AND r.cause IS NULL",
                (after,),
            )
        return [(row["serial"], row["reward"]) for row in rows]

    return RunningScale(trained)


def _settings_at(cfg: RunConfig) -> Callable[[int], TrainerSettings] | None:
    """The trainer's settings by batch, where a schedule changes them."""
    schedule = schedule_of(cfg)
    if len(schedule.values) == 1:
        return None
    return lambda serial: trainer_settings(cfg, schedule.at(serial))


def _rollout_plan(session: Session) -> RolloutPlan:
    cfg = session.cfg
    return RolloutPlan(
        session.params,
        on_publish=cfg.rollout.on_publish,
        buffer=cfg.rl.rollout_buffer_size,
        max_running=cfg.engine.max_running * cfg.run.ranks,
        failed_batches=cfg.monitor.alarm_after,
        schedule=schedule_of(cfg),
        diversity_penalty=cfg.reward.diversity_penalty,
        needs_spread=cfg.rl.dynamic_sampling,
        sizes=GroupSizes(cfg.schedule.adaptive_samples),
    )


def _train_plan(cfg: RunConfig, *, evaluating: bool) -> TrainPlan:
    run = cfg.run
    return TrainPlan(
        max_steps=run.max_steps,
        max_minutes=run.max_minutes,
        eval_every=run.eval_every if evaluating else None,
        checkpoint_every=run.checkpoint_every,
        keep_checkpoints=run.keep_checkpoints,
        keep_pool_batches=run.keep_pool_batches,
        patience=run.patience,
    )


class _Observed:
    """Passes rows on, adds the engine's and the graders' work of a batch to its row of the rollout side, and looks at
    the process's memory at each. The work of an evaluation goes into no row.
    """

    def __init__(self, sink: MetricSink, record: RunRecord, work: Callable[[], Mapping[str, float]]) -> None:
        self._sink, self._record, self._work = sink, record, work
        self._before = self._counted()

    def _counted(self) -> dict[str, float]:
        found = self._work()
        return {name: found[name] for name in ROLLOUT_WORK if name in found}

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._record.observe()
        is_evaluation = row_kind(values) is RowKind.EVAL
        if is_evaluation or "sample_s" in values:
            before, self._before = self._before, self._counted()
            if not is_evaluation:
                values = {**values, **{name: now - before.get(name, 0.0) for name, now in self._before.items()}}
        self._sink.write(step, values)

    def close(self) -> None:
        """Nothing: the sinks have an owner."""


@contextmanager
def _sinks(cfg: RunConfig, run_dir: Path, serial: int) -> Iterator[FanOut]:
    """The metric sinks of a run, closed together; rows after `serial` are of batches that are trained again."""
    monitor, run = cfg.monitor, cfg.run
    jsonl = JsonlSink(run_dir / METRICS_FILE)
    jsonl.truncate_after(serial)
    view = ProgressView(
        run.max_steps, first_step=serial, deadline_s=None if run.max_minutes is None else 60 * run.max_minutes
    )
    alarms = Alarms(AlarmRules(batches=monitor.alarm_after), on_alarm=view.alarm)
    alarms.replay(read_rows(run_dir / METRICS_FILE).rows)
    sinks: list[MetricSink] = [jsonl, alarms]
    if monitor.progress:
        sinks.append(view)
    if monitor.tensorboard:
        sinks.append(TensorBoardSink(run_dir / "tb", first_step=serial or None, note=view.note))
    fan = FanOut(sinks, report=view.note)
    try:
        yield fan
    finally:
        fan.close()
        view.close()
