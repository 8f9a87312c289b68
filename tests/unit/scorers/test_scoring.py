"""Scores: against transformers' classifiers, the same in any company, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.classifiers import build_classifier, some_replies, transformers_scores
from support.decoders import BF16, FP32, hang_adapter, random_adapter, transformers_twin
from tithe.errors import ModelError
from tithe.lora import LoraSpec
from tithe.models import Decoder, Passes, TrainAdapter
from tithe.models.options import ModelOptions
from tithe.scorers import DecoderScorer, Reply, ScoreHead, TransformersScorer, load_classifier

SPEC = LoraSpec(r=4, alpha=8)


def own_scorer(decoder: Decoder, tensors: dict[str, torch.Tensor], *, batch_tokens: int = 64) -> DecoderScorer:
    draw = torch.Generator().manual_seed(5)
    head = ScoreHead(torch.randn(decoder.spec.hidden_size, generator=draw), torch.tensor([0.25]))
    passes = Passes(decoder, {}, checkpointing=False, dropout=0.0)
    return DecoderScorer(passes, TrainAdapter.for_scoring(decoder, tensors, SPEC), head, batch_tokens=batch_tokens)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_classifier_gives_the_scores_of_transformers(tmp_path: Path, architecture: str) -> None:
    path = build_classifier(tmp_path / "m", architecture, dtype="float32")
    replies = some_replies()
    scorer, digest = load_classifier(path, FP32, batch_tokens=64)
    assert isinstance(scorer, DecoderScorer)
    assert scorer.score(replies) == pytest.approx(transformers_scores(path, replies), abs=1e-4)
    assert len(digest) == 8
    assert scorer.memory_bytes() > 4 * 128 * 64, "the blocks are its own"


def test_four_bits_give_the_scores_of_the_rounded_weights(tmp_path: Path) -> None:
    """Every linear is replaced in the directory by what four bits keep of it; transformers then agrees."""
    path = build_classifier(tmp_path / "m", "llama", dtype="float32")
    packed, name = load_classifier(path, ModelOptions("packed", "fp32", "fp32", "int4"), batch_tokens=64)
    plain, plain_name = load_classifier(path, FP32, batch_tokens=64)
    replies = some_replies()
    scores = packed.score(replies)
    assert packed.memory_bytes() < plain.memory_bytes()
    assert name.endswith("-int4")
    assert name.startswith(plain_name)
    assert max(abs(a - b) for a, b in zip(scores, plain.score(replies), strict=True)) > 1e-2
    assert isinstance(packed, DecoderScorer)
    decoder = packed._passes.decoder
    weights = load_file(path / "model.safetensors")
    for linear in decoder.linears():
        for site in linear.sites:
            rows = linear.expand(torch.float32)[site.start : site.stop]
            weights[f"{site.module}.weight"] = rows.contiguous()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    assert scores == pytest.approx(transformers_scores(path, replies), abs=1e-4)


def test_an_architecture_that_is_not_ours_runs_in_transformers(tmp_path: Path) -> None:
    path = build_classifier(tmp_path / "m", "llama", dtype="float32")
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "stablelm", "architectures": ["StableLmForSequenceClassification"]}
    (path / "config.json").write_text(json.dumps(config))
    from transformers import AutoConfig, AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(path))
    model.save_pretrained(path)
    scorer, _ = load_classifier(path, FP32, batch_tokens=64)
    assert isinstance(scorer, TransformersScorer)
    replies = some_replies()
    assert scorer.score(replies) == pytest.approx(transformers_scores(path, replies), abs=1e-5)
    with pytest.raises(ModelError, match=r"reward\.model_quantize"):
        load_classifier(path, ModelOptions("packed", "fp32", "fp32", "int4"), batch_tokens=64)


def test_the_base_under_an_adapter_is_what_transformers_computes(exact: Decoder, base_path: Path) -> None:
    tensors = random_adapter(exact, SPEC, 3)
    scorer = own_scorer(exact, tensors)
    twin = transformers_twin(base_path)
    hang_adapter(twin, tensors, SPEC)
    replies = some_replies()
    wanted = []
    for reply in replies:
        hidden = twin.model(torch.tensor([reply.prompt_ids + reply.reply_ids])).last_hidden_state[0, -1]
        wanted.append(float(hidden @ scorer._head.weight + 0.25))
    assert scorer.score(replies) == pytest.approx(wanted, abs=1e-4)
    assert scorer._passes.decoder is exact, "no second copy of a weight"
    assert scorer.memory_bytes() == exact.build_adapter(tensors, SPEC).n_bytes + 4 * (64 + 1)


def test_a_score_does_not_depend_on_its_company(decoder: Decoder) -> None:
    tensors = random_adapter(decoder, SPEC, 3)
    replies = some_replies()
    alone = [own_scorer(decoder, tensors).score([reply])[0] for reply in replies]
    assert len(set(alone)) == len(alone)
    scorer = own_scorer(decoder, tensors, batch_tokens=1000)
    assert scorer.score(replies) == alone
    assert scorer.score(replies[::-1]) == alone[::-1]
    assert own_scorer(decoder, tensors, batch_tokens=30).score(replies) == alone


def test_what_is_no_reward_model_is_refused(tmp_path: Path) -> None:
    def refused(path: Path, match: str, options: ModelOptions = BF16) -> None:
        with pytest.raises(ModelError, match=match):
            load_classifier(path, options, batch_tokens=64)

    refused(tmp_path, "no reward model")
    refused(build_classifier(tmp_path / "two", labels=2), r"shape \(2, 64\)")
    causal = build_classifier(tmp_path / "causal")
    weights = load_file(causal / "model.safetensors")
    head = weights.pop("score.weight")
    save_file(weights, causal / "model.safetensors")
    refused(causal, "no tensor score.weight")
    save_file({"score.weight": head}, causal / "model.safetensors")
    refused(causal, "embedding")
    (causal / "model.safetensors").rename(causal / "pytorch_model.bin")
    refused(causal, "pickle")


def test_transformers_refuses_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.mkdir()

    def refused(match: str, **config: Any) -> None:
        (path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError, match=match):
            load_classifier(path, BF16, batch_tokens=64)

    refused("never read", model_type="gpt2")
    save_file({"score.weight": torch.ones(1, 8)}, path / "model.safetensors")
    small = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 16, "n_positions": 8}
    refused("no classifier", model_type="of-my-own", auto_map={"AutoConfig": "evil.py:Config"})
    refused("2 labels", **small)
    refused("missing", **small, id2label={"0": "LABEL_0"})


def test_an_empty_prompt_is_an_error(decoder: Decoder) -> None:
    from tithe.errors import DataError

    with pytest.raises(DataError, match="no tokens"):
        own_scorer(decoder, random_adapter(decoder, SPEC, 3)).score([Reply((), (5, 6))])
