"""A sequence classifier of a Hugging Face directory: its blocks run by our decoder where its architecture is one that
we build (then it may be packed to 4 bits), else by transformers. Only safetensors are read, and no code of it runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor

from tithe.arch import ARCHITECTURES, read_classifier
from tithe.arch.files import read_json
from tithe.errors import ModelError
from tithe.models import ModelOptions, Passes, load_model
from tithe.quant.reference import dequantize
from tithe.scorers.decoder_scorer import DecoderScorer, Scorer
from tithe.scorers.replies import Reply
from tithe.scorers.score_head import ScoreHead
from tithe.utils.durable import sha256_file


def load_classifier(path: Path, options: ModelOptions, *, batch_tokens: int) -> tuple[Scorer, str]:
    """The scorer, and eight digits of a SHA-256 that change with anything it computes from.

    Raises `ModelError` for pickles, for heads that do not give one number, for `options.quantize` where transformers
    runs the blocks, and for whatever cannot be loaded.
    """
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} holds no reward model: neither reward_model.json nor a classifier's config.json")
    if read_json(path / "config.json").get("model_type") in {str(name) for name in ARCHITECTURES}:
        return _ours(path, options, batch_tokens)
    if options.quantize != "none":
        raise ModelError(
            f"{path}: transformers runs this architecture, and holds it unpacked: set reward.model_quantize to none"
        )
    return _theirs(path, torch.bfloat16 if options.rounded else torch.float32)


def _ours(path: Path, options: ModelOptions, batch_tokens: int) -> tuple[DecoderScorer, str]:
    checkpoint, stored = read_classifier(path)
    if stored.shape != (1, checkpoint.spec.hidden_size):
        raise ModelError(
            f"{path}: score.weight has shape {stored.shape}; a reward model gives one number a reply, and its head has "
            f"shape (1, {checkpoint.spec.hidden_size})"
        )
    weight = torch.from_numpy(dequantize(stored.array(), stored.format())).float().reshape(-1).clone()
    decoder = load_model(checkpoint, options)
    passes = Passes(decoder, {}, checkpointing=True, dropout=0.0)
    head = ScoreHead(weight, torch.zeros(1))
    scorer = DecoderScorer(passes, None, head, batch_tokens=batch_tokens, own_bytes=decoder.resident_bytes())
    packed = "" if options.quantize == "none" else f"-{options.quantize}"
    digest = _short(decoder.checksum.encode(), weight.numpy().tobytes())
    return scorer, f"{digest}{packed}"


def _short(*parts: bytes) -> str:
    return hashlib.sha256(b"\n".join(parts)).hexdigest()[:8]


class TransformersScorer:
    """transformers' own classifier, one reply at a time, so that no score depends on another's length."""

    def __init__(self, model: torch.nn.Module, max_tokens: int) -> None:
        self._model, self.max_tokens = model, max_tokens

    def score(self, replies: Sequence[Reply]) -> list[float]:
        """As `Scorer.score`."""
        with torch.inference_mode():
            return [self._one(reply) for reply in replies]

    def _one(self, reply: Reply) -> float:
        ids = torch.tensor([(*reply.prompt_ids, *reply.reply_ids)])
        logits = cast("Any", self._model)(input_ids=ids, use_cache=False).logits
        return float(logits[0, 0])

    def memory_bytes(self) -> int:
        """Of the parameters."""
        return sum(p.numel() * p.element_size() for p in self._model.parameters())


def _theirs(path: Path, dtype: torch.dtype) -> tuple[TransformersScorer, str]:
    from transformers import AutoConfig, AutoModelForSequenceClassification  # noqa: PLC0415  seconds to import

    state, digest = _read_weights(path)
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        model = cast("Any", AutoModelForSequenceClassification.from_config(config, dtype=dtype))
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{path}: transformers has no classifier for it: {error}") from error
    if config.num_labels != 1:
        raise ModelError(f"{path}: it has {config.num_labels} labels, and a reward model gives one number")
    try:
        found = model.load_state_dict({name: t.to(dtype) for name, t in state.items()}, strict=False)
    except RuntimeError as error:
        raise ModelError(f"{path}: its tensors do not fit its config: {error}") from error
    if found.missing_keys or found.unexpected_keys:
        odd = [*found.missing_keys, *found.unexpected_keys]
        raise ModelError(f"{path}: tensors that are missing or that its class does not have: {', '.join(odd[:8])}")
    model.eval().requires_grad_(requires_grad=False)
    return TransformersScorer(model, getattr(config, "max_position_embeddings", 0) or 1 << 30), digest


def _read_weights(path: Path) -> tuple[dict[str, Tensor], str]:
    """All tensors of a directory's safetensors files, and a short digest of the files."""
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{path} has no safetensors file; pickled weights can run code and are never read")
    state: dict[str, Tensor] = {}
    try:
        for file in files:
            state |= load_file(file)
    except (OSError, safetensors.SafetensorError) as error:
        raise ModelError(f"{path}: not complete safetensors files ({error})") from error
    return state, _short(*(sha256_file(file).encode() for file in files))
