"""Grammar and handlers of `tithe plan` and `tithe compare`. The planner is imported inside the handlers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

_WHOLE = (
    ("--lora-r", 32, "R", "rank of the adapter (default 32)"),
    ("--context", None, "TOKENS", "longest sequence (default prompt and new together, else 4096)"),
    ("--prompt", 0, "TOKENS", "of a prompt (default an eighth of the context, at most 1024)"),
    ("--new", 0, "TOKENS", "mean of a completion (default half of what the context leaves)"),
    ("--sequences", 64, "N", "live at once, over all GPUs (default 64)"),
    ("--batch", 256, "N", "rollouts of one optimizer step (default 256)"),
    ("--steps", 100, "N", "optimizer steps of the run (default 100)"),
    ("--tp", 0, "N", "GPUs that divide every matrix (default: experts are divided; dense models: those of a node)"),
    ("--live-versions", 2, "N", "published adapters held at once (default 2)"),
    ("--micro-batch-tokens", 0, "N", "tokens of a micro-batch on one rank (default one sequence)"),
    ("--logits-rows", 1024, "N", "rows of logits held at once (default 1024)"),
    ("--gpu-bytes", 0, "N", "budget of one GPU (default its memory)"),
    ("--host-bytes-per-node", 2_000_000_000_000, "N", "memory of one machine (default 2 TB)"),
    ("--reward-workers", 64, "N", "rewards computed at once (default 64)"),
)
_CHOICES = (
    ("--base", "published", "FORMAT", "published (default), bf16, fp8, int4, int4-linears, mxfp4 or nvfp4"),
    ("--phase", "rl", "PHASE", "rl (default), rollout or train"),
    ("--layout", "shared", "LAYOUT", "shared (default), separate or full"),
    ("--attention", "auto", "HOW", "dp: whole on every GPU, or tp: divided (default dp for mixtures)"),
    ("--lora-targets", "all-linear", "NAMES", "all-linear (default), attention, mlp, experts, or names, with commas"),
    ("--lora-experts", "per_expert", "HOW", "per_expert (default) or shared_outer"),
    ("--optimizer-device", "auto", "WHERE", "auto (default), gpu, host or nvme"),
    ("--kv-dtype", "bf16", "DTYPE", "bf16 (default) or fp8"),
    ("--reward-model", "", "MODEL", "a reward model beside the base"),
    ("--critic", "none", "KIND", "none (default), head or full"),
)
_FLAGS = (
    ("--no-recompute", "keep the activations of all layers"),
    ("--no-reference", "score no reference policy"),
    ("--windowed-kv", "layers with a window cache no more than it"),
    ("--router-replay", "keep the experts that the sampler took"),
)


def add_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add both commands with `add(name, text, dry_run=False)`."""
    plan = add("plan", "say what fits, how long a step takes and what it costs, before a GPU is rented", dry_run=False)
    plan.add_argument("model", metavar="MODEL", help="known name, config.json, checkpoint directory or GGUF file")
    plan.add_argument("--calibrate", default="", metavar="RUN_DIR", help="take lengths, times and rates of a run")
    plan.add_argument("--tok-per-s", type=float, default=0.0, metavar="X", help="a measured rate of sampling")
    compare = add("compare", "compare an adapter on one low-bit base with training every parameter", dry_run=False)
    compare.add_argument("models", metavar="MODEL", nargs="+", help="as for plan; several with --markdown")
    compare.add_argument("--against", default="", metavar="HARDWARE", help="of the full-parameter side")
    compare.add_argument("--fewest", action="store_true", help="A too on the fewest cards of its kind on which it fits")
    compare.add_argument("--markdown", action="store_true", help="one row a model, as in README.md")
    compare.epilog = "Defaults of compare: --base int4 --lora-targets attention, the smallest plan A."
    for command in (plan, compare):
        command.add_argument("--html", default="", metavar="FILE", help="also write one page with charts")
        command.add_argument("--hardware", default="8xB200", metavar="HARDWARE", help="such as 8xB200 (the default)")
        _options(command)
    compare.set_defaults(base="int4", lora_targets="attention")


def _options(command: argparse.ArgumentParser) -> None:
    for name, default, metavar, text in _WHOLE:
        command.add_argument(name, type=int, default=default, metavar=metavar, help=text)
    for name, default, metavar, text in _CHOICES:
        command.add_argument(name, default=default, metavar=metavar, help=text)
    command.add_argument("--reward-s", type=float, default=0.0, metavar="X", help="seconds of one reward (default 0)")
    for name, text in _FLAGS:
        command.add_argument(name, action="store_true", help=text)


def plan(args: argparse.Namespace) -> Mapping[str, object]:
    """`tithe plan MODEL --hardware 8xB200 …`."""
    from tithe.planner.command import plan as plan_model

    return plan_model(
        args.model, args.hardware, calibrate=args.calibrate, html=args.html, tok_per_s=args.tok_per_s, **_given(args)
    )


def compare(args: argparse.Namespace) -> Mapping[str, object]:
    """`tithe compare MODEL --hardware 8xB200 …`."""
    from tithe.planner.command import compare as compare_models

    return compare_models(
        args.models,
        args.hardware,
        args.against,
        html=args.html,
        as_markdown=args.markdown,
        with_fewest=args.fewest,
        **_given(args),
    )


def _given(args: argparse.Namespace) -> dict[str, object]:
    """The options that both commands share, by the names of `PlanRequest`."""
    names = [name[2:].replace("-", "_") for name, *_ in (*_WHOLE, *_CHOICES)]
    given: dict[str, object] = {name: getattr(args, name) for name in names}
    given["lora_targets"] = tuple(part.strip() for part in args.lora_targets.split(",") if part.strip())
    return given | {
        "reward_s": args.reward_s,
        "recompute": not args.no_recompute,
        "reference": not args.no_reference,
        "windowed_kv": args.windowed_kv,
        "router_replay": args.router_replay,
    }
