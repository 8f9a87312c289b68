"""Tiny random reward models on disk and in memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support.checkpoints import build_hf
from support.decoders import random_ids
from tithe.scorers import Reply

LENGTHS = ((21, 5), (21, 40), (16, 17), (3, 1), (21, 16))
"""Prompt and reply tokens: across, on and below the borders of pages; three share a prompt."""


def build_classifier(path: Path, architecture: str = "llama", *, labels: int = 1, **build: Any) -> Path:
    """A directory as transformers saves a `…ForSequenceClassification`: no token head, a `score` head."""
    build_hf(path, architecture, **build)
    weights = load_file(path / "model.safetensors")
    weights.pop("lm_head.weight", None)
    width = weights["model.norm.weight"].shape[0]
    draw = torch.Generator().manual_seed(11)
    weights["score.weight"] = torch.randn(labels, width, generator=draw).to(weights["model.norm.weight"].dtype)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["architectures"] = [config["architectures"][0].replace("CausalLM", "SequenceClassification")]
    config |= {"id2label": {str(i): f"LABEL_{i}" for i in range(labels)}, "label2id": {}}
    (path / "config.json").write_text(json.dumps(config))
    return path


def some_replies(lengths: Sequence[tuple[int, int]] = LENGTHS, seed: int = 0) -> list[Reply]:
    """Replies of random ids; equal prompt lengths mean equal prompts."""
    return [
        Reply(tuple(random_ids(p, seed + p).tolist()), tuple(random_ids(n, 1000 + seed + i).tolist()))
        for i, (p, n) in enumerate(lengths)
    ]


def transformers_scores(path: Path, replies: Sequence[Reply]) -> list[float]:
    """transformers' own classifier in float32, one unpadded row at a time: slow and plain."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return [float(model(torch.tensor([r.prompt_ids + r.reply_ids])).logits[0, 0]) for r in replies]
