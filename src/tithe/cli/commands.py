"""One thin handler per command: read the configuration, warn, call one function of `tithe.build` (or of `tithe.arch`).

    command   call                                         arguments
    ───────   ──────────────────────────────────────────   ───────────────────────────────────────────────────────
    train     build.train(cfg, run_dir)                    RunConfig, Path of a free or empty directory (= cfg.run.dir)
    check     build.check(cfg)                             RunConfig
    resume    build.resume(run_dir, overrides)             Path, list of texts that a resume may change (checked here)
    eval      build.evaluate(target, overrides)            Path of a run directory or a run file, list of texts
    sample    build.sample(run_dir, prompt, overrides)     Path, text, list of texts
    parity    build.parity(cfg_or_run_dir)                 RunConfig of a run file, or Path of a run directory
    report    build.report(run_dir)                        Path
    inspect   arch.inspect(target, base, n_ranks)          text, text, int; free of torch
    plan      planner.plan(model, hardware, …)             texts and numbers; free of torch (`cli.planning`)
    compare   planner.compare(models, hardware, …)         as plan
    capacity  build.capacity(cfg, run_dir, ranks, …)       RunConfig, Path, list of int, --steps, --full-lr, --copy
    simulate  simulator.simulate_target(target, …)         text, list of texts, Options; free of torch
    reward-   build.train_reward_model(pairs, source,      list of envs.pairs.Pair, Path, RunConfig, Path, PairOptions
    model         cfg, out, options)
    verify    rewards.verifying, rewards.screening         see `cli.verify`; free of torch
    demo      build.demo(overrides)                        list of texts, for config.demo_config, choose_run_dir

Each returns a `dict[str, object]` of JSON's types, paths and numpy scalars. `"text"` in it, when present, is what
people read on standard output; all other keys are what `--json` prints. A call raises `UserError` for bad input (exit
code 2) and `RunError` for a failed run (exit code 1); it shows progress on standard error only.

`--dry-run` stops before `tithe.build` is imported. The configuration and `tithe.build` are imported inside the handlers
because pydantic and torch must not delay `--help`.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tithe.cli.planning import compare, plan

if TYPE_CHECKING:
    from tithe.config import RunConfig
    from tithe.errors import UserError

Result = Mapping[str, object]


def train(args: argparse.Namespace) -> Result:
    """`tithe train RUN.yaml key=value …`."""
    if _follows():
        return _follow()
    from tithe.config import choose_run_dir, load_config

    cfg = choose_run_dir(load_config(args.run_file, args.overrides))
    if args.dry_run:
        return _resolved(cfg)
    _warn(cfg)
    from tithe.build import train as build_train

    return build_train(cfg, Path(cfg.run.dir))


def check(args: argparse.Namespace) -> Result:
    """`tithe check RUN.yaml key=value …`."""
    from tithe.config import load_config

    cfg = load_config(args.run_file, args.overrides)
    if args.dry_run:
        return _resolved(cfg)
    _warn(cfg)
    from tithe.build import check as build_check

    return build_check(cfg)


def resume(args: argparse.Namespace) -> Result:
    """`tithe resume RUN_DIR key=value …`."""
    if _follows():
        return _follow()
    from tithe.config import load_resumed

    cfg = load_resumed(args.run_dir, args.overrides)
    if args.dry_run:
        return _resolved(cfg)
    _warn(cfg)
    from tithe.build import resume as build_resume

    return build_resume(Path(args.run_dir), args.overrides)


def evaluate(args: argparse.Namespace) -> Result:
    """`tithe eval RUN_DIR|RUN.yaml key=value …`."""
    cfg = _load_target(args)
    if args.dry_run:
        return _resolved(cfg)
    from tithe.build import evaluate as build_evaluate

    return build_evaluate(Path(args.target), args.overrides)


def sample(args: argparse.Namespace) -> Result:
    """`tithe sample RUN_DIR PROMPT key=value …`."""
    from tithe.config import load_run

    cfg = load_run(args.run_dir, args.overrides)
    if args.dry_run:
        return _resolved(cfg)
    from tithe.build import sample as build_sample

    return build_sample(Path(args.run_dir), args.prompt, args.overrides)


def parity(args: argparse.Namespace) -> Result:
    """`tithe parity RUN.yaml key=value …` or `tithe parity RUN_DIR`."""
    from tithe.errors import ConfigError

    is_run = Path(args.target).is_dir()
    if is_run and args.overrides:
        raise ConfigError("parity of a run directory is that of its own configuration; give a run file to change keys")
    cfg = _load_target(args)
    if args.dry_run:
        return _resolved(cfg)
    from tithe.build import parity as build_parity

    return build_parity(Path(args.target) if is_run else cfg)


def report(args: argparse.Namespace) -> Result:
    """`tithe report RUN_DIR`."""
    from tithe.config import load_run

    load_run(args.run_dir)  # refuses what is no run directory before anything heavy is imported
    from tithe.build import report as build_report

    return build_report(Path(args.run_dir))


def inspect(args: argparse.Namespace) -> Result:
    """`tithe inspect MODEL --base FORMAT --ranks N`."""
    from tithe.arch.inspection import inspect as inspect_model

    return inspect_model(args.target, args.base, args.ranks)


def capacity(args: argparse.Namespace) -> Result:
    """`tithe capacity RUN.yaml --ranks R1,R2 --steps N --full-lr LR --copy int4 key=value …`."""
    from tithe.config import choose_run_dir, load_config

    ranks = _ranks(args.ranks)
    for name, value in (("--steps", args.steps), ("--full-lr", args.full_lr)):
        if value is not None and value <= 0:
            raise _usage(f"{name} = {value} must be more than 0")
    cfg = choose_run_dir(load_config(args.run_file, args.overrides))
    if args.dry_run:
        return _resolved(cfg)
    _warn(cfg)
    from tithe.build import capacity as build_capacity

    return build_capacity(cfg, Path(cfg.run.dir), ranks, args.steps, args.full_lr, args.copy)


def simulate(args: argparse.Namespace) -> Result:
    """`tithe simulate RUN_DIR|RUN.yaml --sweep lag=0,1,4 … key=value …`."""
    from tithe.simulator import DISTRIBUTIONS, Options, simulate_target

    options = Options(
        steps=args.steps,
        seed=args.seed,
        split=args.split,
        costs=args.costs,
        hardware=args.hardware,
        model=args.model,
        base=args.base,
        distributions={name: getattr(args, name) for name in DISTRIBUTIONS},
        prompts=args.prompts,
        sweep=args.sweep,
        failure_rate=args.failure_rate,
        crash_hours=args.crash_hours,
        restart_s=args.restart_s,
    )
    found = simulate_target(args.target, args.overrides, options)
    if args.html is None:
        return {**found.record(), "text": found.text()}
    from tithe.monitoring.simulation import simulation_page
    from tithe.utils.durable import write_text

    write_text(Path(args.html), simulation_page(found))
    return {**found.record(), "page": args.html, "text": f"{found.text()}\n\npage: {args.html}"}


def demo(args: argparse.Namespace) -> Result:
    """`tithe demo key=value …`."""
    from tithe.config import choose_run_dir, demo_config

    cfg = choose_run_dir(demo_config(args.overrides))
    if args.dry_run:
        return _resolved(cfg)
    _warn(cfg)
    from tithe.build import demo as build_demo

    return build_demo(args.overrides)


def reward_model(args: argparse.Namespace) -> Result:
    """`tithe reward-model PAIRS.jsonl --out DIR --epochs N --batch N --held-out P --centre X key=value …`."""
    from tithe.config import load_config
    from tithe.envs.pairs import read_pairs

    for name, value in (("--epochs", args.epochs), ("--batch", args.batch)):
        if value < 1:
            raise _usage(f"{name} = {value} must be 1 or more")
    if not 0 < args.held_out < 1:
        raise _usage(f"--held-out = {args.held_out:g} must be more than 0 and less than 1")
    if not 0 <= args.centre < math.inf:
        raise _usage(f"--centre = {args.centre:g} must be a number of 0 or more")
    cfg = load_config(None, args.overrides)
    if args.dry_run:
        return _resolved(cfg)
    source = Path(args.pairs)
    pairs = read_pairs(source, cfg.task.prompt_column, cfg.task.instruction)
    from tithe.build import PairOptions, train_reward_model

    options = PairOptions(args.epochs, args.batch, args.held_out, args.centre)
    return train_reward_model(pairs, source, cfg, Path(args.out), options)


def verify(args: argparse.Namespace) -> Result:
    """`tithe verify ROWS.jsonl [--tools | --code] [--lab]`, or `tithe verify RUN.yaml key=value …`."""
    from tithe.cli.verify import run

    return run(args)


HANDLERS: dict[str, Callable[[argparse.Namespace], Result]] = {
    "train": train,
    "check": check,
    "resume": resume,
    "eval": evaluate,
    "sample": sample,
    "parity": parity,
    "report": report,
    "inspect": inspect,
    "plan": plan,
    "compare": compare,
    "capacity": capacity,
    "reward-model": reward_model,
    "simulate": simulate,
    "verify": verify,
    "demo": demo,
}


def _follows() -> bool:
    """Whether a launcher such as torchrun has started this process as another rank than 0: it reads no run file."""
    return os.environ.get("RANK", "0") != "0" and {"WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def _follow() -> Result:
    from tithe.build import follow_launched

    follow_launched()
    return {"rank": int(os.environ["RANK"]), "text": f"rank {os.environ['RANK']} has ended"}


def _ranks(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= 4096 for part in parts) or len(set(parts)) < len(parts):
        raise _usage(f"--ranks = {text!r}: give different whole numbers from 1 to 4096, such as 4,32")
    return [int(part) for part in parts]


def _usage(message: str) -> UserError:
    from tithe.errors import UserError

    return UserError(message)


def _load_target(args: argparse.Namespace) -> RunConfig:
    from tithe.config import load_config, load_run

    load = load_run if Path(args.target).is_dir() else load_config
    return load(args.target, args.overrides)


def _resolved(cfg: RunConfig) -> Result:
    """The answer of `--dry-run`: YAML that a run file may hold, or the same values as JSON."""
    from tithe.config import config_warnings, dump_resolved

    _warn(cfg)
    return {
        "text": dump_resolved(cfg).rstrip("\n"),
        "config": cfg.model_dump(mode="json"),
        "warnings": config_warnings(cfg),
    }


def _warn(cfg: RunConfig) -> None:
    from tithe.config import config_warnings

    for warning in config_warnings(cfg):
        print(f"tithe: warning: {warning}", file=sys.stderr)
