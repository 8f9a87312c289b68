"""`train` and `resume`: wires the two loops, runs them, and leaves a complete run directory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tithe.build.certificate import certify
from tithe.build.loops import METRICS_FILE, train_and_roll
from tithe.build.origin import write_origin
from tithe.build.record import RunRecord
from tithe.build.session import Session, open_session, say
from tithe.checkpoint import load_checkpoint, select_checkpoint
from tithe.config import CONFIG_FILE, RunConfig, dump_resolved, load_resumed
from tithe.errors import ResumeError, UserError
from tithe.lora import save_adapter
from tithe.metrics import read_rows
from tithe.monitoring import build_report, summary_table
from tithe.orchestration import StopReason, TrainOutcome
from tithe.pool import Checkpoint, Pool, PromptSource
from tithe.utils.durable import remove_directory, write_text

POOL_FILE = "pool.sqlite"


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
    """Go on from the newest complete checkpoint of a run directory."""
    return run(load_resumed(run_dir, overrides), run_dir, resuming=True).result


def run(
    cfg: RunConfig, run_dir: Path, *, resuming: bool = False, evaluating: bool = True, report: bool = True
) -> Finished:
    """Train or resume, and finish the directory: adapter, certificate, report."""
    with ExitStack() as stack:
        session = stack.enter_context(open_session(cfg))
        cfg = session.cfg
        _check_enough(session)
        run_dir.mkdir(parents=True, exist_ok=True)
        write_text(run_dir / CONFIG_FILE, dump_resolved(cfg))
        pool = stack.enter_context(_open_pool(run_dir, cfg, resuming=resuming))
        pool.bind_prompts(PromptSource(list(session.items()), cfg.run.seed))
        start = _rewind(session, run_dir, pool) if resuming else None
        record = RunRecord(run_dir, session)
        try:
            outcome = train_and_roll(session, run_dir, pool, start, record, evaluating=evaluating)
        except BaseException as error:
            record.finish("failed", f"{type(error).__name__}: {error}")
            raise
        return _finish(session, run_dir, pool, outcome, record, report=report)


def _check_enough(session: Session) -> None:
    questions, items = session.questions(), session.items()
    if not items:
        raise UserError("no training prompt is left: give more rows, or lower task.eval_size")
    if not questions:
        raise UserError("no held-out question is left: set task.eval_source, or give more rows")


def _open_pool(run_dir: Path, cfg: RunConfig, *, resuming: bool) -> Pool:
    path = run_dir / POOL_FILE
    return Pool.open(path) if resuming else Pool.create(path, cfg.run.name)


def _rewind(session: Session, run_dir: Path, pool: Pool) -> Checkpoint | None:
    """Rewind the pool to the newest complete checkpoint it records and load the trainer's state from it."""
    root = run_dir / "checkpoints"
    recorded = {c.serial for c in pool.checkpoints()}
    if not recorded:
        pool.rewind_to_checkpoint()
        say("resume: no checkpoint was recorded yet; the run begins again with the rollouts it has")
        return None
    chosen, warnings = select_checkpoint(root)
    for warning in warnings:
        say(f"warning: {warning}")
    if chosen.step not in recorded:
        usable = sorted(recorded & {int(p.name.removeprefix("step_")) for p in root.glob("step_*")})
        if not usable:
            raise ResumeError(f"{root} holds none of the checkpoints that the pool records: {sorted(recorded)}")
        chosen, _ = select_checkpoint(root, usable[-1])
    rewind = pool.rewind_to_checkpoint(chosen.step)
    loaded = load_checkpoint(chosen.path)
    checksum = loaded.state.get("base_checksum")
    if checksum not in (None, session.base.decoder.checksum):
        raise ResumeError("model.path is another base than the one this run was trained on")
    session.trainer.load_state(loaded.tensors, loaded.state["trainer"])
    say(f"resume: from batch {rewind.serial}; {rewind.replayed} trained groups wait again")
    return rewind.checkpoint


def _finish(
    session: Session, run_dir: Path, pool: Pool, outcome: TrainOutcome, record: RunRecord, *, report: bool
) -> Finished:
    cfg, trainer = session.cfg, session.trainer
    _save_final_adapter(session, run_dir)
    before, after = _evaluations(run_dir)
    certificate = certify(session, run_dir) if outcome.reason is not StopReason.SIGNAL else None
    record.finish("finished", str(outcome.reason), steps=outcome.serial, disk_bytes=pool.disk_bytes())
    page = None
    if report and cfg.monitor.report:
        texts = {item.id: item.text or str(item.messages[-1]["content"]) for item in session.items().values()}
        page = build_report(run_dir, texts)
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
    if outcome.reason is StopReason.SIGNAL:
        lines.append(f"stopped by a signal after batch {outcome.serial}; go on with: tithe resume {run_dir}")
    result["text"] = "\n".join(lines)
    return Finished(outcome, before, after, result)


def _save_final_adapter(session: Session, run_dir: Path) -> None:
    target = run_dir / "adapter"
    if target.exists():
        remove_directory(target)
    save_adapter(target, session.trainer.adapter_tensors(), session.trainer.spec)
    write_origin(target, session.base.decoder)


def _evaluations(run_dir: Path) -> tuple[Mapping[str, float] | None, Mapping[str, float] | None]:
    rows = [dict(row) for row in read_rows(run_dir / METRICS_FILE).rows if "eval_sampled" in row]
    if not rows:
        return None, None
    return rows[0], rows[-1] if len(rows) > 1 else None
