"""The grammar of the command line. Standard library only: `--help` must not wait for anything."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from tithe.cli.planning import add_commands

OVERRIDES_HELP = "configuration overrides such as optimizer.lr=1e-4; all keys are in docs/configuration.md"
OVERRIDES: dict[str, Any] = {"nargs": "*", "default": [], "metavar": "key=value", "help": OVERRIDES_HELP}
"""With a default of its own, argparse does not count it among the required arguments."""


class UsageError(Exception):
    """The arguments do not form a command; the message ends with the usage."""


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that `--json` is answered by one line in every case."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}\n{self.format_usage().strip()}")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Arguments → namespace with `command`, `json`, `overrides` and the command's own. Raises `UsageError`.

    Overrides may stand before and after options, which argparse alone does not allow.
    """
    parser = build_parser()
    parsed, rest = parser.parse_known_args(arguments)
    if parsed.version:
        raise UsageError(f"--version stands alone\n{parser.format_usage().strip()}")
    if parsed.command is None:
        raise UsageError(f"no command given\n{parser.format_help().strip()}")
    stray = [text for text in rest if text.startswith("-") or "=" not in text]
    if stray or (rest and not hasattr(parsed, "overrides")):
        raise UsageError(f"unknown argument {(stray or rest)[0]!r}; see tithe {parsed.command} --help")
    if rest:
        parsed.overrides = [*parsed.overrides, *rest]
    return parsed


def build_parser() -> argparse.ArgumentParser:
    """The whole grammar."""
    parser = _Parser(
        prog="tithe",
        allow_abbrev=False,
        description="Reinforcement-learning post-training of large language models on one frozen low-bit base.",
        epilog="Exit codes: 0 success, 1 the run failed, 2 bad input. Every command takes --json.",
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)

    def add(name: str, text: str, *, dry_run: bool = True) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False)
        command.add_argument(
            "--json", action="store_true", help="standard output gets one line of JSON and nothing else"
        )
        if dry_run:
            command.add_argument("--dry-run", action="store_true", help="print the resolved configuration and stop")
        return command

    def overrides(command: argparse.ArgumentParser) -> None:
        command.add_argument("overrides", **OVERRIDES)

    train = add("train", "train an adapter as a run file says")
    train.add_argument("run_file", metavar="RUN.yaml", help="run file; every key has a default")
    check = add("check", "do one step on the small model with your data and reward, and show everything")
    check.add_argument("run_file", metavar="RUN.yaml", help="run file")
    resume = add("resume", "continue a run from its last checkpoint")
    resume.add_argument("run_dir", metavar="RUN_DIR", help="directory of the run")
    evaluate = add("eval", "evaluate a run's adapter, or a run file's bare base, on the held-out questions")
    evaluate.add_argument("target", metavar="RUN_DIR|RUN.yaml", help="directory of a run, or a run file")
    sample = add("sample", "answer one prompt with a run's adapter")
    sample.add_argument("run_dir", metavar="RUN_DIR", help="directory of the run")
    sample.add_argument("prompt", metavar="PROMPT", help="what to ask")
    parity = add("parity", "compare the trainer's log-probabilities with the sampler's, token by token")
    parity.add_argument("target", metavar="RUN.yaml|RUN_DIR", help="run file, or directory of a run")
    report = add("report", "write report.html of a run", dry_run=False)
    report.add_argument("run_dir", metavar="RUN_DIR", help="directory of the run")
    inspect = add("inspect", "show what a model's base weighs, by tensor group and by rank", dry_run=False)
    inspect.add_argument("target", metavar="MODEL", help="config.json, checkpoint directory, GGUF file, or known name")
    formats = "published (default), bf16, fp8, int4, int4-linears, mxfp4 or nvfp4"
    inspect.add_argument("--base", default="published", metavar="FORMAT", help=formats)
    inspect.add_argument("--ranks", type=int, default=1, metavar="N", help="ranks that share the experts (default 1)")
    capacity = add("capacity", "compare adapters of several ranks with training every parameter, from one start")
    capacity.add_argument("run_file", metavar="RUN.yaml", help="run file on a base of BF16 or F32 safetensors")
    capacity.add_argument("--ranks", default="4,32", metavar="R1,R2", help="LoRA ranks of the adapters (default 4,32)")
    capacity.add_argument("--steps", type=int, metavar="N", help="batches of each run (default run.max_steps)")
    capacity.add_argument(
        "--full-lr", type=float, metavar="LR", help="learning rate of the full run (default a tenth of optimizer.lr)"
    )
    copy_help = "add the largest rank on an int4 base, and full training with rollouts from int4 copies"
    capacity.add_argument("--copy", choices=("int4",), help=copy_help)
    reward_model = _add_reward_model(add)
    simulate = _add_simulate(add)
    add_commands(add)
    verify = _add_verify(add)
    demo = add("demo", "train a real 4-bit model on a task that a program can check, in minutes")
    for command in (train, check, resume, evaluate, sample, parity, capacity, reward_model, simulate, verify, demo):
        overrides(command)
    return parser


def _add_reward_model(add: Callable[..., argparse.ArgumentParser]) -> argparse.ArgumentParser:
    command = add("reward-model", "train a reward model on a run's base from pairs of replies")
    command.add_argument("pairs", metavar="PAIRS.jsonl", help="rows with prompt, chosen and rejected")
    command.add_argument("--out", required=True, metavar="DIR", help="directory to write: adapter, head, manifest")
    command.add_argument("--epochs", type=int, default=2, metavar="N", help="times over all pairs (default 2)")
    command.add_argument("--batch", type=int, default=32, metavar="N", help="pairs of one step (default 32)")
    held_out = "share of prompts that are only judged (default 0.1)"
    command.add_argument("--held-out", type=float, default=0.1, metavar="P", help=held_out)
    centre = "pull of each pair's scores towards 0 (default 0.01)"
    command.add_argument("--centre", type=float, default=0.01, metavar="X", help=centre)
    return command


def _add_verify(add: Callable[..., argparse.ArgumentParser]) -> argparse.ArgumentParser:
    text = "grade a file of answers, tool calls or programs, or screen the questions of a run file"
    command = add("verify", text, dry_run=False)
    command.add_argument("target", metavar="ROWS.jsonl|RUN.yaml", help="rows with gold and text, or a run file")
    kind = command.add_mutually_exclusive_group()
    kind.add_argument("--tools", action="store_true", help="rows with text, calls or answer, and tools")
    kind.add_argument("--code", action="store_true", help="rows with code and tests, run in the sandbox")
    command.add_argument("--lab", action="store_true", help="rows carry the right verdict: measure the grader on them")
    graders = ("symbolic_math", "math")
    command.add_argument("--grader", choices=graders, default=graders[0], help="how answers are compared")
    command.add_argument("--workers", type=int, default=2, metavar="N", help="processes (default 2)")
    command.add_argument("--timeout", type=float, default=5.0, metavar="S", help="seconds a row may take (default 5)")
    return command


def _add_simulate(add: Callable[..., argparse.ArgumentParser]) -> argparse.ArgumentParser:
    text = "simulate sampling, rewards, training and publishing under other settings, and name the best"
    command = add("simulate", text, dry_run=False)
    command.add_argument("target", metavar="RUN_DIR|RUN.yaml", help="directory of a run, measured; or a run file")
    command.add_argument("--steps", type=int, default=60, metavar="N", help="batches to simulate (default 60)")
    command.add_argument("--seed", type=int, default=0, metavar="N", help="of the simulated rollouts (default 0)")
    values = "AXIS=V,V"
    axes = "lag, sync_every, in_flight or split with values, such as lag=0,1,4 or split=shared,6:2; may be repeated"
    command.add_argument("--sweep", action="append", default=[], metavar=values, help=axes)
    planned = "plan the costs on this hardware, such as 8xB200, instead of measured ones"
    command.add_argument("--hardware", metavar="HARDWARE", help=planned)
    command.add_argument(
        "--model", metavar="MODEL", help="with --hardware: a known name or config (default model.path)"
    )
    command.add_argument("--base", default="published", metavar="FORMAT", help="with --hardware: format of the base")
    split = "separate sides: rollout : train copies of the base, or GPUs with --hardware (default: one shared base)"
    command.add_argument("--split", metavar="R:T", help=split)
    command.add_argument("--costs", metavar="NAME=S,…", help="seconds of work instead of measured ones")
    distribution = "NUMBER, exp:MEAN, lognormal:MEAN,SIGMA or uniform:LOW,HIGH"
    for name, what in (
        ("prompt-tokens", "prompt length"),
        ("new-tokens", "tokens drawn per request"),
        ("turns", "requests per rollout (default 1)"),
        ("tool-s", "seconds of a tool between two turns"),
        ("tool-tokens", "tokens that a tool's answer adds"),
        ("reward-s", "seconds of judging one rollout"),
        ("pass-rate", "with --prompts: share of right answers, over prompts (default as measured)"),
    ):
        command.add_argument(f"--{name}", metavar="DIST", help=f"{what}: {distribution}")
    prompts = "prompts of the task, which then come back with what was measured of them (default: ever new ones)"
    command.add_argument("--prompts", type=int, default=0, metavar="N", help=prompts)
    command.add_argument("--failure-rate", type=float, metavar="P", help="share of rollouts that crash")
    command.add_argument("--crash-hours", type=float, metavar="H", help="mean hours between crashes of the process")
    command.add_argument("--restart-s", type=float, default=60.0, metavar="S", help="seconds to come back (default 60)")
    command.add_argument("--html", metavar="FILE", help="write one page with charts")
    return command
