"""Peer of the rollout benchmark: Hugging Face `generate`, BF16, no adapter, all prompts in one batch.

usage: hf_generate.py MODEL_DIR WORKLOAD THREADS
request: {"new_tokens": n}; answer: {"seconds": s, "tokens": n}
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from protocol import Channel
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Load, then answer requests."""
    channel = Channel()
    model_dir, workload, threads = sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), int(sys.argv[3])
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()
    batch = tokenizer.pad({"input_ids": workload["rollout_prompt_ids"]}, return_tensors="pt")
    n_prompts, n_prompt_tokens = batch["input_ids"].shape
    channel.send(prompts=n_prompts, prompt_tokens=n_prompt_tokens)
    for request in channel.requests():
        new_tokens = int(request["new_tokens"])
        start = time.perf_counter()
        with torch.inference_mode():
            # top_k=0: the library's default of 50 would sample from another distribution than Tithe does.
            out = model.generate(
                **batch,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                pad_token_id=tokenizer.pad_token_id,
            )
        seconds = time.perf_counter() - start
        channel.send(seconds=seconds, tokens=(out.shape[1] - n_prompt_tokens) * n_prompts)


if __name__ == "__main__":
    main()
