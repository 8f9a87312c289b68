"""A reward model on the run's own base, on disk: a PEFT adapter, the head, and a manifest that says which base it
judges with and how well. Written whole or not at all, and never changed.

The manifest's probe is a few replies with their scores: whoever loads the directory scores them again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file

from tithe.errors import ModelError, UserError
from tithe.lora import TENSOR_FILE, LoraSpec, load_adapter, save_tensors, write_adapter_files
from tithe.lora.peft_io import CONFIG_FILE
from tithe.models import Decoder, Passes, TrainAdapter
from tithe.scorers.decoder_scorer import DecoderScorer, Scorer
from tithe.scorers.replies import Reply
from tithe.scorers.score_head import ScoreHead
from tithe.utils.durable import complete_directory, explain, sha256_file, write_text

MANIFEST_FILE = "reward_model.json"
HEAD_FILE = "score_head.safetensors"
FORMAT = 1


@dataclass(frozen=True)
class RewardModelManifest:
    """`accuracy` is the share of held-out pairs ranked right, with the ends of its 95 % interval over prompts, and
    `loss` their mean −log σ(difference). `pairs` were trained on, `held_out_pairs` not; `pairs_sha256` is of the file.
    `probe` are replies and `probe_scores` what they were given when this was written. `files` are SHA-256 by name."""

    base_checksum: str
    numeric_mode: str
    accuracy: float
    accuracy_lo: float
    accuracy_hi: float
    loss: float
    pairs: int
    held_out_pairs: int
    pairs_sha256: str
    probe: tuple[Reply, ...]
    probe_scores: tuple[float, ...]
    files: Mapping[str, str]

    @property
    def version(self) -> str:
        """Eight digits that change with the adapter, the head or the base: kept with every reward it gave."""
        parts = [self.base_checksum, *(f"{name} {self.files[name]}" for name in sorted(self.files))]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


def save_reward_model(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    spec: LoraSpec,
    head: ScoreHead,
    facts: Mapping[str, Any],
) -> RewardModelManifest:
    """Write the directory and return its manifest; `facts` are the manifest's fields but `files`.

    Raises `UserError` when the disk refuses or the directory exists and is not empty.
    """
    try:
        with complete_directory(directory) as hidden:
            write_adapter_files(hidden, tensors, spec)
            save_tensors({"weight": head.weight.contiguous(), "bias": head.bias.contiguous()}, hidden / HEAD_FILE)
            files = {path.name: sha256_file(path) for path in sorted(hidden.iterdir())}
            manifest = RewardModelManifest(**facts, files=files)
            write_text(hidden / MANIFEST_FILE, json.dumps({"format": FORMAT, **asdict(manifest)}, indent=1))
    except OSError as error:
        raise UserError(f"cannot write the reward model {directory}: {explain(error)}") from error
    return manifest


def read_manifest(directory: Path) -> RewardModelManifest:
    """Read and check a directory's manifest and its files' digests. Raises `ModelError`."""
    path = directory / MANIFEST_FILE
    try:
        content: dict[str, Any] = dict(json.loads(path.read_text(encoding="utf-8")))
        version = content.pop("format")
        probe = tuple(Reply(tuple(one["prompt_ids"]), tuple(one["reply_ids"])) for one in content["probe"])
        content |= {"probe": probe, "probe_scores": tuple(float(score) for score in content["probe_scores"])}
        manifest = RewardModelManifest(**content)
        files = {name: str(manifest.files[name]) for name in (HEAD_FILE, CONFIG_FILE, TENSOR_FILE)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: no complete manifest of a reward model ({error!r}); train it again") from error
    if version != FORMAT:
        raise ModelError(f"{path}: format is {version}, and this program reads {FORMAT}")
    for name, digest in files.items():
        file = directory / name
        if not file.is_file() or sha256_file(file) != digest:
            raise ModelError(f"{file} is not the file that {MANIFEST_FILE} names; copy the whole directory again")
    return manifest


def load_reward_model(
    directory: Path, manifest: RewardModelManifest, passes: Passes, *, batch_tokens: int
) -> DecoderScorer:
    """The scorer on the base of `passes`. Raises `ModelError` for another base, `AdapterError` for an adapter that does
    not fit it. On the lane."""
    decoder = passes.decoder
    if manifest.base_checksum != decoder.checksum:
        raise ModelError(
            f"{directory} was trained on another base: its scores would mean nothing here. Set model.path (and "
            "model.quantize) to that base, or train one on this base with `tithe reward-model`"
        )
    tensors, spec = load_adapter(directory, decoder.linear_shapes())
    adapter = TrainAdapter.for_scoring(decoder, tensors, spec)
    return DecoderScorer(passes, adapter, _read_head(directory, decoder), batch_tokens=batch_tokens)


def _read_head(directory: Path, decoder: Decoder) -> ScoreHead:
    try:
        head = load_file(directory / HEAD_FILE)
    except (OSError, safetensors.SafetensorError) as error:
        raise ModelError(f"{directory / HEAD_FILE}: not a complete safetensors file ({error})") from error
    shapes = {name: tuple(t.shape) for name, t in head.items()}
    wanted = {"weight": (decoder.spec.hidden_size,), "bias": (1,)}
    if shapes != wanted or not all(bool(torch.isfinite(t).all()) for t in head.values()):
        raise ModelError(f"{directory / HEAD_FILE} holds {shapes}; a head of this base is {wanted}, in finite numbers")
    return ScoreHead(head["weight"].float(), head["bias"].float())


def probe_gap(scorer: Scorer, probe: Sequence[Reply], scores: Sequence[float]) -> float:
    """The largest difference from what the probe's replies were given before. On the lane."""
    found = scorer.score(list(probe))
    return max((abs(a - b) for a, b in zip(found, scores, strict=True)), default=0.0)
