r"""Pairs of replies for `tithe reward-model`: small sums, the right answer against a wrong one that is near.

python examples/reward_pairs.py > pairs.jsonl
tithe reward-model pairs.jsonl --out models/judge --batch 16 --epochs 4 --held-out 0.25 \
    optimizer.lr=1e-3 optimizer.lr_scheduler=linear optimizer.warmup_steps=5 rollout.system_prompt=Add.
"""

from __future__ import annotations

import json
import random

LARGEST = 12
PER_PROMPT = 4


def main() -> None:
    """One JSON object a line on standard output, the same ones every time."""
    draw = random.Random(0)
    for a in range(LARGEST + 1):
        for b in range(LARGEST + 1):
            for gap in draw.sample((-2, -1, 1, 2), PER_PROMPT):
                print(json.dumps({"prompt": f"{a} + {b} =", "chosen": f"{a + b}", "rejected": f"{a + b + gap}"}))


if __name__ == "__main__":
    main()
