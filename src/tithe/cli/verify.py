"""`tithe verify`: grade a file, measure a grader, or screen a task. Free of torch."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tithe.rewards.verifying import Judged, Row

YAML = (".yaml", ".yml")


def run(args: argparse.Namespace) -> Mapping[str, object]:
    """Choose by the target and the options; see `tithe verify --help`. Raises `UserError`."""
    from tithe.errors import UserError

    if args.target.endswith(YAML):
        if args.tools or args.code or args.lab:
            raise UserError("a run file is screened; --tools, --code and --lab take a file of JSON lines")
        return _screen(args)
    if args.overrides:
        raise UserError(f"{args.overrides[0]} changes a run file, and {args.target} is none")
    if not args.timeout > 0 or args.workers < 1:
        raise UserError(f"--timeout {args.timeout:g} --workers {args.workers}: both must be more than 0")
    from tithe.rewards import verifying

    def judge(rows: Sequence[Row]) -> list[Judged]:
        if args.code:
            return verifying.judge_code(rows, workers=args.workers, timeout_s=args.timeout)
        if args.tools:
            return verifying.judge_tools(rows, workers=args.workers, timeout_s=args.timeout)
        return verifying.judge_answers(rows, args.grader, workers=args.workers, timeout_s=args.timeout)

    rows = verifying.read_rows(Path(args.target))
    if args.lab:
        return verifying.measure(rows, judge, check_golds=not (args.code or args.tools))
    return verifying.summary(judge(rows))


def _screen(args: argparse.Namespace) -> Mapping[str, object]:
    """The rows as they are, before a task would leave any out."""
    from tithe.config import load_config
    from tithe.envs.rows import Columns
    from tithe.envs.sources import read_source
    from tithe.envs.splitting import hold_out
    from tithe.rewards import judge
    from tithe.rewards.screening import report, screen

    cfg = load_config(args.target, args.overrides)
    task = cfg.task
    columns = Columns(task.prompt_column, task.answer_column, needs_answer=False, instruction="")
    options = {"seed": task.seed, "eval_size": task.eval_size}
    read = read_source(task.source, columns, key="task.source", **options)
    train, held, broken = read.items, (), read.broken
    if task.eval_source is not None and task.eval_source != task.source:
        other = read_source(task.eval_source, columns, key="task.eval_source", **options)
        held, broken = other.items, (*broken, *other.broken)
    else:
        split = hold_out(train, task.eval_size, task.seed)
        train, held = split.train, split.eval
    compare = judge if cfg.reward.function == "math" else None
    return report(screen(train, held, compare), broken, len(train), len(held))
