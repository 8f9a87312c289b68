"""Makes what both sides read: BF16 safetensors of the GGUF, and the workload as token ids.

usage: prepare.py GGUF OUT_DIR
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROLLOUT_PROMPTS = 64
STEP_PROMPTS = 8
STEPS = 64
SUBJECTS = ("river", "engine", "library", "harbour", "orchard", "glacier", "market", "observatory")
PLACES = ("in the north", "by the coast", "near the border", "on the plain", "under the hills", "beside the railway")


def rollout_prompt(index: int, rng: random.Random) -> str:
    """One of 64 distinct questions; the chat template brings it to about sixty tokens."""
    subject, place = SUBJECTS[index % len(SUBJECTS)], PLACES[index // len(SUBJECTS) % len(PLACES)]
    return (
        f"Write a short report for visitors about the {subject} {place}. Mention the year {rng.randint(1200, 1999)} "
        f"and the number {index} once."
    )


def step_questions(rng: random.Random) -> list[str]:
    """Questions of the GRPO steps: eight a step, the same on both sides."""
    return [f"Compute {rng.randint(1, 99)}+{rng.randint(1, 99)}. Give the answer." for _ in range(STEP_PROMPTS * STEPS)]


def convert(gguf: Path, out: Path) -> None:
    """Write the dequantized model as BF16 safetensors with its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.bfloat16)
    # The weights are dequantized by now: without this the peers would treat the directory as quantized.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(out)


def write_workload(model_dir: Path, path: Path) -> None:
    """Token ids and questions; both sides read this file and nothing else."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    rng = random.Random(0)

    def ids(text: str) -> list[int]:
        chat = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return tokenizer(rendered, add_special_tokens=False)["input_ids"]

    prompts = [ids(rollout_prompt(i, rng)) for i in range(ROLLOUT_PROMPTS)]
    questions = step_questions(rng)
    workload = {
        "rollout_prompt_ids": prompts,
        "step_prompts": STEP_PROMPTS,
        "step_questions": questions,
        "step_prompt_ids": [ids(question) for question in questions],
    }
    path.write_text(json.dumps(workload))


def main() -> None:
    """Prepare everything under OUT_DIR."""
    gguf, out = Path(sys.argv[1]), Path(sys.argv[2])
    convert(gguf, out / "model")
    write_workload(out / "model", out / "workload.json")


if __name__ == "__main__":
    main()
