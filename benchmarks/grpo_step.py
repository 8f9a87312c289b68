"""One GRPO step, sampling included: 8 prompts x 8 completions of exactly 64 tokens, no KL term, LoRA r 32.

Tithe samples, scores, trains and publishes in its fixed configuration; TRL's GRPOTrainer does the same at its best
measured setting (`benchmarks/peers/trl_grpo.py`). Peak memory is the PSS of each side's whole process tree.

    python -m benchmarks.grpo_step --json

Keys: `seconds`, `trl_seconds`, `ratio` (seconds per completion token, TRL over Tithe), `peak_pss_bytes`,
`trl_peak_pss_bytes`, the numeric mode and the commit.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from statistics import median
from typing import Any

from benchmarks.output import emit, numeric_mode, parse_options
from benchmarks.peer_env import ALLOCATOR, PEERS, ensure_peer_environment
from benchmarks.sides import Side

WARM_UP_STEPS = 2


def seconds_per_token(answers: list[dict[str, Any]]) -> float:
    """Median seconds of a step per completion token."""
    return median(answer["seconds"] / answer["tokens"] for answer in answers)


def main() -> None:
    """Measure and print."""
    options = parse_options(__doc__ or "", rounds=3)
    peers = ensure_peer_environment()
    arguments = [str(peers.workload), str(options.threads)]
    with ExitStack() as stack:
        tithe_command = [sys.executable, "-m", "benchmarks.tithe_side", "step", *arguments, "fixed"]
        trl_command = [peers.python, PEERS / "trl_grpo.py", peers.model_dir, *arguments, str(options.new_tokens)]
        sides = {
            "tithe": stack.enter_context(Side("tithe-step", tithe_command)),
            "trl": stack.enter_context(Side("trl", trl_command, ALLOCATOR)),
        }
        for _ in range(WARM_UP_STEPS):
            for side in sides.values():
                side.measure(new_tokens=options.new_tokens, timed=False)
        answers: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        for _ in range(options.rounds):
            for name, side in sides.items():
                answers[name].append(side.measure(new_tokens=options.new_tokens))
        result = {
            "seconds": median(answer["seconds"] for answer in answers["tithe"]),
            "trl_seconds": median(answer["seconds"] for answer in answers["trl"]),
            "ratio": seconds_per_token(answers["trl"]) / seconds_per_token(answers["tithe"]),
            "peak_pss_bytes": sides["tithe"].peak_pss_bytes,
            "trl_peak_pss_bytes": sides["trl"].peak_pss_bytes,
            **numeric_mode(sides["tithe"].facts),
            "completion_tokens": answers["tithe"][-1]["tokens"],
            "trl_completion_tokens": answers["trl"][-1]["tokens"],
            "rounds": options.rounds,
        }
    emit(result, as_json=options.json)


if __name__ == "__main__":
    main()
