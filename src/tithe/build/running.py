"""`train` and `resume`: wires the two loops, runs them, and leaves a complete run directory."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from tithe.build.certificate import certify
from tithe.build.ended import ended, evaluations, final_policy, question_texts
from tithe.build.full_hooks import save_final_model
from tithe.build.hooks import POOL_FILE
from tithe.build.loops import train_and_roll
from tithe.build.origin import write_origin
from tithe.build.record import RunRecord
from tithe.build.scoring import check_same_models
from tithe.build.session import Session, open_session, say
from tithe.checkpoint import FoundCheckpoint, find_checkpoints
from tithe.config import CONFIG_FILE, RunConfig, dump_resolved, load_resumed, load_run
from tithe.errors import ConfigError, ResumeError, UserError
from tithe.lora import write_adapter_files
from tithe.monitoring import build_report, summary_table
from tithe.orchestration import StopReason, TrainOutcome
from tithe.pool import Checkpoint, Curriculum, Pool, PromptSource
from tithe.trainer import FullTrainer
from tithe.utils.durable import complete_directory, explain, remove_directory, write_text
from tithe.weight_sync import DirectoryChannel, read_manifest


@dataclass(frozen=True)
class Finished:
    """What a run left: how it ended, and the rows of its first and last evaluation."""

    outcome: TrainOutcome
    before: Mapping[str, float] | None
    after: Mapping[str, float] | None
    result: dict[str, object]


def train(cfg: RunConfig, run_dir: Path) -> dict[str, object]:
    """Run a configuration in a free directory. Raises `UserError` before anything is written, `RunError` when it
    fails."""
    return run(cfg, run_dir).result


def resume(run_dir: Path, overrides: list[str]) -> dict[str, object]:
    """Go on from the newest complete checkpoint of a run directory; of a run that has nothing left to do, say so."""
    cfg = load_resumed(run_dir, overrides)
    result = ended(run_dir, cfg, load_run(run_dir))
    if result is not None:
        say("resume: the run is finished")
        return result
    return run(cfg, run_dir, resuming=True).result


def run(
    cfg: RunConfig,
    run_dir: Path,
    *,
    resuming: bool = False,
    evaluating: bool = True,
    report: bool = True,
    cross_check: bool = False,
) -> Finished:
    """Train or resume, and finish the directory: adapter, certificate (see `certify`), report."""
    with ExitStack() as stack:
        session = stack.enter_context(open_session(cfg))
        cfg = session.cfg
        _check_enough(session)
        if resuming:
            pool, start = _reopen(stack, session, run_dir)
        else:
            pool, start = _begin(stack, session, run_dir), None
        record = RunRecord(run_dir, session)
        try:
            outcome = train_and_roll(session, run_dir, pool, start, record, evaluating=evaluating)
        except BaseException as error:
            with suppress(OSError):  # on a full disk, the first error says more than this one would
                record.finish("failed", f"{type(error).__name__}: {error}")
            raise
        return _finish(session, run_dir, pool, outcome, record, report=report, cross_check=cross_check)


def _check_enough(session: Session) -> None:
    questions, items = session.questions(), session.items()
    if not items:
        raise UserError("no training prompt is left: give more rows, or lower task.eval_size")
    if not questions:
        raise UserError("no held-out question is left: set task.eval_source, or give more rows")


def _begin(stack: ExitStack, session: Session, run_dir: Path) -> Pool:
    """Make the directory, with an empty pool and the resolved configuration; nothing of it stays when that fails."""
    cfg = session.cfg
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"run.dir = {str(run_dir)!r} cannot be made: {explain(error)}"
        raise ConfigError(message, key="run.dir") from error
    with ExitStack() as undo:
        undo.callback(_remove_if_empty, run_dir)
        pool = stack.enter_context(Pool.create(run_dir / POOL_FILE, cfg.run.name))
        undo.callback(_remove_pool, run_dir)
        _bind_prompts(pool, session)
        write_text(run_dir / CONFIG_FILE, dump_resolved(cfg))
        undo.pop_all()
    return pool


def _bind_prompts(pool: Pool, session: Session) -> None:
    source = PromptSource(list(session.items()), session.cfg.run.seed)
    pool.bind_prompts(source, curriculum=Curriculum.of(session.cfg.schedule))


def _remove_if_empty(run_dir: Path) -> None:
    with suppress(OSError):  # another run may have begun there meanwhile
        run_dir.rmdir()


def _remove_pool(run_dir: Path) -> None:
    for path in run_dir.glob(f"{POOL_FILE}*"):
        path.unlink()


def _reopen(stack: ExitStack, session: Session, run_dir: Path) -> tuple[Pool, Checkpoint | None]:
    """Take over a run's pool, rewound to its newest complete checkpoint, and keep the configuration it goes on with."""
    pool = stack.enter_context(Pool.open(run_dir / POOL_FILE))
    _check_base(session, run_dir)
    check_same_models(session.reward_models, run_dir / POOL_FILE)
    _bind_prompts(pool, session)
    start = _rewind(session, run_dir, pool)
    write_text(run_dir / CONFIG_FILE, dump_resolved(session.cfg))
    return pool, start


def _check_base(session: Session, run_dir: Path) -> None:
    versions = DirectoryChannel(run_dir / "adapters", session.cfg.run.name).list_versions()
    if versions and read_manifest(versions[-1]).base_checksum != session.base.checksum:
        raise ResumeError(f"model.path = {session.base.path} is another base than the one this run was begun with")


def _rewind(session: Session, run_dir: Path, pool: Pool) -> Checkpoint | None:
    """Rewind the pool to the newest complete checkpoint it records, load the trainer's state from it, and remove what
    was written of later batches."""
    root = run_dir / "checkpoints"
    recorded, folders = {c.serial for c in pool.checkpoints()}, find_checkpoints(root)
    if not recorded:
        pool.rewind_to_checkpoint()
        _forget_after(run_dir, folders, 0)
        say("resume: no checkpoint was recorded yet; the run begins again with the rollouts it has")
        return None
    found = [c for c in folders if c.step in recorded]
    for damaged in (c for c in found if not c.ok):
        say(f"warning: {damaged.path} is passed over: {damaged.problem}")
    chosen = next((c for c in reversed(found) if c.ok), None)
    if chosen is None:
        raise ResumeError(f"{root} holds none of the checkpoints that the pool records, complete: {sorted(recorded)}")
    session.base.lane.call(session.learner.take_back, chosen.path)
    rewind = pool.rewind_to_checkpoint(chosen.step)
    _forget_after(run_dir, folders, rewind.serial)
    say(f"resume: from batch {rewind.serial}; {rewind.replayed} trained groups wait again")
    return rewind.checkpoint


def _forget_after(run_dir: Path, folders: Sequence[FoundCheckpoint], serial: int) -> None:
    """Remove complete checkpoints and evaluations of batches that are trained again.

    A checkpoint whose folder was complete when the process died, but which the pool never came to record, would
    otherwise count as the newest one when older ones are pruned.
    """
    for orphan in folders:
        if orphan.ok and orphan.step > serial:
            remove_directory(orphan.path)
    for path in (run_dir / "eval").glob("step_*.json"):
        digits = path.stem.removeprefix("step_")
        if digits.isdecimal() and int(digits) > serial:
            path.unlink()


def _finish(
    session: Session,
    run_dir: Path,
    pool: Pool,
    outcome: TrainOutcome,
    record: RunRecord,
    *,
    report: bool,
    cross_check: bool,
) -> Finished:
    cfg, trainer = session.cfg, session.trainer
    _save_final(session, run_dir)
    before, after = evaluations(run_dir)
    stopped = outcome.reason is StopReason.SIGNAL
    certificate = None if stopped else certify(session, run_dir, cross_check=cross_check)
    if certificate is None and not stopped:
        say("warning: no trained rollout is of one version that is still on disk; there is no parity certificate")
    record.finish("finished", str(outcome.reason), steps=outcome.serial, disk_bytes=pool.disk_bytes())
    page = None
    if report and cfg.monitor.report:
        page = build_report(run_dir, question_texts(session.items().values()))
    result: dict[str, object] = {
        "run_dir": str(run_dir),
        "steps": outcome.serial,
        "reason": str(outcome.reason),
        "optimizer_steps": trainer.optimizer_step,
        "report": None if page is None else str(page),
        "checkpoint": str(outcome.checkpoint),
    }
    if certificate is not None:
        result["max_abs_dlogp"] = certificate["max_abs_dlogp"]
    lines = [summary_table(before, after)] if before is not None else []
    lines.append(f"run directory: {run_dir}")
    if page is not None:
        lines.append(f"report: {page}")
    if stopped:
        result["resume"] = f"tithe resume {shlex.quote(str(run_dir))}"
        lines.append(f"stopped by a signal after batch {outcome.serial}; go on with: {result['resume']}")
    result["text"] = "\n".join(lines)
    return Finished(outcome, before, after, result)


def _save_final(session: Session, run_dir: Path) -> None:
    if isinstance(session.trainer, FullTrainer):
        session.base.lane.call(save_final_model, session.model, run_dir)
        return
    save_final_adapter(session, final_policy(run_dir, session.cfg))


def save_final_adapter(session: Session, target: Path) -> None:
    """The trained adapter as a PEFT folder with its origin, in place of an earlier one: complete, or not at all."""
    try:
        with complete_directory(target, replace=True) as hidden:
            write_adapter_files(hidden, session.published_tensors(), session.adapter_trainer.spec)
            write_origin(hidden, session.base.decoder)
    except OSError as error:
        raise UserError(f"cannot write the adapter {target}: {explain(error)}") from error
