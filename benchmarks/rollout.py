"""Sampling speed: 64 distinct prompts of about 60 tokens, 64 new tokens each, prefill included.

Tithe samples at T = 1 with log-probs and a LoRA adapter (r 32, seven linears), end-of-sequence ignored, in its fixed
configuration and with the base stored the other way; Hugging Face `generate` samples at T = 1 in BF16, no adapter.

    python -m benchmarks.rollout --json

Keys: `tok_per_s` (generated tokens over total time), `decode_tok_per_s` (prefill left out), `packed_tok_per_s` and
`dequantized_tok_per_s` (one of them is `tok_per_s` again), `hf_generate_tok_per_s`, `ratio` (`tok_per_s` over the
peer's), the numeric mode and the commit.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from typing import Any

from benchmarks.output import emit, numeric_mode, parse_options, rates
from benchmarks.peer_env import ALLOCATOR, PEERS, PeerEnvironment, ensure_peer_environment
from benchmarks.sides import Side

OTHER_STORAGE = {"packed": "dequantized", "dequantized": "packed"}
Answers = dict[str, list[dict[str, Any]]]


def start_sides(stack: ExitStack, peers: PeerEnvironment, threads: int) -> dict[str, Side]:
    """Start every side, one after the other: Tithe's fixed configuration, its other storage, Hugging Face."""

    def tithe(name: str, compute: str) -> Side:
        command = [sys.executable, "-m", "benchmarks.tithe_side", "rollout", peers.workload, threads, compute]
        return stack.enter_context(Side(name, [str(part) for part in command]))

    sides = {"tithe": tithe("tithe", "fixed")}
    other = OTHER_STORAGE[sides["tithe"].facts["compute"]]
    sides[other] = tithe(f"tithe-{other}", other)
    hf_command = [peers.python, PEERS / "hf_generate.py", peers.model_dir, peers.workload, str(threads)]
    sides["hf-generate"] = stack.enter_context(Side("hf-generate", hf_command, ALLOCATOR))
    return sides


def measure(options: argparse.Namespace) -> tuple[Answers, dict[str, Any]]:
    """A warm-up of every side, then interleaved rounds; returns the answers by side and Tithe's facts."""
    peers = ensure_peer_environment()
    with ExitStack() as stack:
        sides = start_sides(stack, peers, options.threads)
        for side in sides.values():
            side.measure(new_tokens=options.new_tokens, timed=False)
        answers: Answers = {name: [] for name in sides}
        for _ in range(options.rounds):
            for name, side in sides.items():
                answers[name].append(side.measure(new_tokens=options.new_tokens))
        return answers, sides["tithe"].facts


def main() -> None:
    """Measure and print."""
    options = parse_options(__doc__ or "", rounds=5)
    answers, facts = measure(options)
    tithe, peer = rates(answers["tithe"]), rates(answers["hf-generate"])
    other = OTHER_STORAGE[facts["compute"]]
    by_storage = {facts["compute"]: tithe, other: rates(answers[other])}
    result = {
        "tok_per_s": tithe,
        "decode_tok_per_s": rates(answers["tithe"], "decode_tokens", "decode_seconds"),
        "packed_tok_per_s": by_storage["packed"],
        "dequantized_tok_per_s": by_storage["dequantized"],
        "hf_generate_tok_per_s": peer,
        "ratio": tithe / peer,
        **numeric_mode(facts),
        "prompts": facts["prompts"],
        "new_tokens": options.new_tokens,
        "rounds": options.rounds,
    }
    emit(result, as_json=options.json)


if __name__ == "__main__":
    main()
