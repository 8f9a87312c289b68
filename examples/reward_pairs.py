"""Pairs of replies for `tithe reward-model`: small sums, the right answer against a wrong one that is near.

python examples/reward_pairs.py > pairs.jsonl
tithe reward-model pairs.jsonl --out models/judge --epochs 3 --batch 8 --held-out 0.25 optimizer.lr=5e-4
"""

from __future__ import annotations

import json
import random

LARGEST = 9
PER_PROMPT = 2


def main() -> None:
    """One JSON object a line on standard output, the same ones every time."""
    draw = random.Random(0)
    for a in range(LARGEST + 1):
        for b in range(LARGEST + 1):
            for gap in draw.sample((-2, -1, 1, 2), PER_PROMPT):
                print(json.dumps({"prompt": f"{a} + {b} =", "chosen": f"{a + b}", "rejected": f"{a + b + gap}"}))


if __name__ == "__main__":
    main()
