"""Peer of the step benchmark: TRL's GRPOTrainer at its best measured setting on CPU.

BF16, 8 prompts x 8 completions, micro-batches of 8 with 8 accumulations, LoRA r 32 on seven linears, no KL term, the
allocator settings of `benchmarks.peer_env.ALLOCATOR`. The end-of-sequence token is suppressed, so that every
completion has exactly the asked number of tokens.

usage: trl_grpo.py MODEL_DIR WORKLOAD THREADS NEW_TOKENS
request: {}; answer: {"seconds": s, "generate_seconds": s, "tokens": n}, one optimizer step each
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from protocol import Channel
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SAMPLES_PER_PROMPT = 8
MICRO_BATCH = 8


class Clock:
    """Times of the step in progress."""

    def __init__(self) -> None:
        self.start = 0.0
        self.generate_s = 0.0
        self.tokens = 0


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer that notes how long sampling took and how many completion tokens it gave."""

    clock: Clock

    def _generate(self, *args, **kwargs):
        start = time.perf_counter()
        out = super()._generate(*args, **kwargs)
        self.clock.generate_s += time.perf_counter() - start
        self.clock.tokens += sum(len(ids) for ids in out[1])
        return out


class OneStepPerRequest(TrainerCallback):
    """Waits for a request before each step and answers after it."""

    def __init__(self, channel: Channel, clock: Clock) -> None:
        self.channel, self.clock = channel, clock
        self.requests = channel.requests()

    def on_step_begin(self, args, state, control, **kwargs):
        """Block until the benchmark asks for a step; end the process when it is done."""
        if next(self.requests, None) is None:
            sys.stderr.flush()
            os._exit(0)
        self.clock.generate_s, self.clock.tokens = 0.0, 0
        self.clock.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        """Answer with this step's times."""
        seconds = time.perf_counter() - self.clock.start
        self.channel.send(seconds=seconds, generate_seconds=self.clock.generate_s, tokens=self.clock.tokens)


def reward(completions, **kwargs):
    """A reward that varies inside every group, as on Tithe's side: no side may skip a group for being all equal."""
    return [float(len(completion[0]["content"]) % 2) for completion in completions]


def build_trainer(model_dir: str, workload: dict, new_tokens: int, out: str, clock: Clock) -> TimedTrainer:
    """The trainer at the setting to beat."""
    rows = [{"prompt": [{"role": "user", "content": question}]} for question in workload["step_questions"]]
    batch = workload["step_prompts"] * SAMPLES_PER_PROMPT
    config = GRPOConfig(
        output_dir=out,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=batch // MICRO_BATCH,
        num_generations=SAMPLES_PER_PROMPT,
        max_completion_length=new_tokens,
        generation_kwargs={"min_new_tokens": new_tokens},
        max_steps=len(rows) // workload["step_prompts"],
        shuffle_dataset=False,
        learning_rate=1e-4,
        temperature=1.0,
        beta=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        optim="adamw_torch",
        lr_scheduler_type="constant",
        seed=0,
        disable_tqdm=True,
    )
    trainer = TimedTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16),
        processing_class=AutoTokenizer.from_pretrained(model_dir),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        peft_config=LoraConfig(r=32, lora_alpha=64, target_modules=TARGETS, task_type="CAUSAL_LM"),
    )
    trainer.clock = clock
    return trainer


def main() -> None:
    """Load, then train one step per request."""
    channel, clock = Channel(), Clock()
    model_dir, workload = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    torch.set_num_threads(int(sys.argv[3]))
    with tempfile.TemporaryDirectory() as out:
        trainer = build_trainer(model_dir, workload, int(sys.argv[4]), out, clock)
        trainer.add_callback(OneStepPerRequest(channel, clock))
        channel.send(prompts=workload["step_prompts"], completions=workload["step_prompts"] * SAMPLES_PER_PROMPT)
        trainer.train()


if __name__ == "__main__":
    main()
