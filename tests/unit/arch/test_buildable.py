"""What `tithe.models` can run: a Mistral is the blocks of Llama, with and without a window."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from support.decoders import FP32, Walk, random_ids, transformers_twin
from tithe.arch import build_obstacles, known_config, known_names, read_checkpoint
from tithe.arch.described import DESCRIBED
from tithe.models.loader import load_model


def mistral(directory: Path, window: int | None) -> Path:
    config = transformers.MistralConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=128,
        max_position_embeddings=512,
        sliding_window=window,
    )
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(config)
    torch.nn.init.normal_(model.lm_head.weight, std=0.3)
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("window", [None, 16])
def test_mistral_means_what_transformers_means(tmp_path: Path, window: int | None) -> None:
    decoder = load_model(read_checkpoint(mistral(tmp_path / "m", window)), FP32)
    ids = random_ids(37)
    walk = Walk(decoder)
    mine = walk.logits(walk.prefill(0, ids))
    with torch.no_grad():
        theirs = transformers_twin(tmp_path / "m")(torch.from_numpy(ids).long()[None]).logits[0]
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)
    assert mine.std() > 0.1


def test_known_models_can_be_run() -> None:
    """None has an obstacle, packed or not, but those that are described for plans only."""
    for config in map(known_config, known_names()):
        if config["model_type"] in DESCRIBED:
            continue
        name = config["model_type"]
        assert list(build_obstacles(config)) == [], name
