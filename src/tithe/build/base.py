"""Opening the base: checkpoint, numeric mode, decoder, renderer and lane, as a configuration asks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tithe.arch import (
    ArchSpec,
    Checkpoint,
    TensorFormat,
    base_bytes,
    combine_digests,
    find_demo_model,
    read_checkpoint,
)
from tithe.build.crew import Crew, threads_of
from tithe.config import RunConfig
from tithe.engines import Here
from tithe.errors import ConfigError
from tithe.models import Decoder, Lane, ModelOptions, Ranks, Tuning, choose, load_model, on_ranks
from tithe.quant import set_threads
from tithe.renderers import ChatRenderer, load_renderer
from tithe.utils.memory import release_unused

EIGHT_BITS = 1.1
"""Bytes a weight up to which a checkpoint counts as "8 bits or fewer already"."""

TRAINABLE = (TensorFormat.BF16, TensorFormat.F32)
"""Formats whose every parameter can be trained."""


@dataclass(frozen=True, eq=False)
class Base:
    """What a run computes on. `cfg` is the configuration with `compute` and `compute_dtype` settled.

    `held` is the one frozen base in memory, None where every parameter is trained: `options` then say how the engine
    holds its copies, and `path` is the directory they begin from.
    """

    cfg: RunConfig
    path: Path
    spec: ArchSpec
    options: ModelOptions
    checksum: str
    n_tokens: int
    """Ids below this can be sampled."""
    file_bytes: int
    numeric_mode: str
    held: Decoder | None
    renderer: ChatRenderer
    lane: Lane
    tuning_s: dict[str, float]
    crew: Crew

    @property
    def decoder(self) -> Decoder:
        """The frozen base."""
        assert self.held is not None, "a run that trains every parameter holds no frozen base"
        return self.held

    @property
    def max_context(self) -> int:
        """Positions that may be used."""
        return min(self.options.max_context, self.spec.max_position_embeddings)


def open_base(cfg: RunConfig, say: Callable[[str], None], crew: Crew, adapter: Path | None = None) -> Base:
    """Load the base, on several ranks each its share. Raises `ConfigError` or `ModelError` for what does not fit
    together. `adapter` is what the policy starts from, which the other ranks are told."""
    if cfg.run.device != "cpu":
        raise ConfigError(
            f"run.device = {cfg.run.device!r}: the fused kernels of this version run on processors only; set it to cpu",
            key="run.device",
        )
    path = Path(cfg.model.path) if cfg.model.path is not None else find_demo_model()
    checkpoint = read_checkpoint(path)
    if cfg.model.train == "full":
        check_full(cfg, checkpoint)
    if 0 < checkpoint.spec.n_experts < crew.size:
        raise ConfigError(
            f"run.ranks = {crew.size}: the model has {checkpoint.spec.n_experts} experts, so some rank would hold none;"
            " lower it",
            key="run.ranks",
        )
    options = _options(cfg, checkpoint)
    crew.meet()
    threads = threads_of(cfg)
    if crew.ranks.rank > 0:
        set_threads(threads)  # this thread carries out orders: it is the lane
    lane = Lane(threads=threads).start() if crew.ranks.rank == 0 else Here()
    try:
        tuning = lane.call(choose, checkpoint, cfg.model.compute, cfg.model.compute_dtype, options)
        settled = {"compute": tuning.options.compute, "compute_dtype": tuning.options.compute_dtype}
        cfg = cfg.model_copy(update={"model": cfg.model.model_copy(update=settled)})
        lane.call(crew.begin, cfg, adapter)
        return _load(cfg, path, checkpoint, tuning, lane, crew, say)
    except BaseException:
        lane.close()
        raise


def _load(
    cfg: RunConfig,
    path: Path,
    checkpoint: Checkpoint,
    tuning: Tuning,
    lane: Lane,
    crew: Crew,
    say: Callable[[str], None],
) -> Base:
    if tuning.seconds:
        timed = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in tuning.seconds.items())
        say(f"model.compute: {tuning.options.compute}, {tuning.options.compute_dtype} operands (measured: {timed})")
    full = cfg.model.train == "full"
    held = None if full else lane.call(_held, checkpoint, tuning.options, crew.ranks)
    mode = tuning.options.numeric_mode
    base = Base(
        cfg=cfg,
        path=path,
        spec=checkpoint.spec,
        options=tuning.options,
        checksum=lane.call(_checksum, checkpoint, crew.ranks) if held is None else held.checksum,
        n_tokens=checkpoint.padded_vocab.start,
        file_bytes=base_bytes(checkpoint) if held is None else held.file_bytes,
        numeric_mode=f"full={cfg.model.base_dtype};copy={tuning.options.quantize};{mode}" if full else mode,
        held=held,
        renderer=load_renderer(path),
        lane=lane,
        tuning_s=tuning.seconds,
        crew=crew,
    )
    del checkpoint
    release_unused()
    resident = "every parameter is trained" if held is None else f"{held.resident_bytes() / 1e6:.0f} MB resident"
    in_file = f"{base.file_bytes / 1e6:.0f} MB of tensors in the file"
    where = f" on each of {crew.size} ranks" if crew.size > 1 else ""
    say(f"base: {path.name}, {base.spec.n_layers} layers, {resident} ({in_file}){where}")
    return base


def other_storage(base: Base) -> Decoder:
    """The base held the other way, packed or dequantized: a second copy, on several ranks this one's share."""
    options = replace(base.options, compute=other_compute(base))
    checkpoint, ranks = read_checkpoint(base.path), base.crew.ranks
    if ranks.size == 1:
        return load_model(checkpoint, options)
    return on_ranks(load_model(checkpoint, options, ranks.shard), ranks)


def other_compute(base: Base) -> Literal["packed", "dequantized"]:
    """How `other_storage` computes."""
    return "dequantized" if base.options.compute == "packed" else "packed"


def _held(checkpoint: Checkpoint, options: ModelOptions, ranks: Ranks) -> Decoder:
    """The frozen base, or this rank's share of it, with the checksum of the whole."""
    if ranks.size == 1:
        return load_model(checkpoint, options)
    decoder = on_ranks(load_model(checkpoint, options, ranks.shard), ranks)
    return replace(decoder, checksum=_checksum(checkpoint, ranks))


def _checksum(checkpoint: Checkpoint, ranks: Ranks) -> str:
    """That of the whole; ranks share a mixture's experts."""
    if ranks.size == 1:
        return checkpoint.checksum()
    own = json.dumps(checkpoint.digests(ranks.shard)).encode()
    ranks.wait_for_all()
    digests: dict[str, str] = {}
    for told in ranks.gather(own):
        digests |= json.loads(told)
    return combine_digests(digests)


def _options(cfg: RunConfig, checkpoint: Checkpoint) -> ModelOptions:
    m = cfg.model
    o_proj = checkpoint.tensors["model.layers.0.self_attn.o_proj.weight"]  # every architecture has one
    stored = o_proj.format.bytes_per_weight
    for key, wanted in (("model.load_in_8bit", m.load_in_8bit), ("model.quantize", m.quantize != "none")):
        if wanted and stored <= EIGHT_BITS:
            raise ConfigError(
                f"{key}: the linears of {checkpoint.path.name} are stored as {o_proj.format} already; leave it off",
                key=key,
            )
    if m.max_context > checkpoint.spec.max_position_embeddings:
        raise ConfigError(
            f"model.max_context = {m.max_context}: the model was trained on "
            f"{checkpoint.spec.max_position_embeddings} positions; lower it",
            key="model.max_context",
        )
    quantize = "int8" if m.load_in_8bit else m.quantize
    return ModelOptions(base_dtype=m.base_dtype, quantize=quantize, max_context=m.max_context)


def check_full(cfg: RunConfig, checkpoint: Checkpoint) -> None:
    """Raise `ConfigError` for a base whose parameters cannot all be trained."""
    if not checkpoint.path.is_dir():
        raise ConfigError(
            f"model.train = full: {checkpoint.path.name} is no directory of safetensors; give model.path a Hugging Face"
            " directory with BF16 or F32 weights, or train an adapter (model.train = lora)",
            key="model.path",
        )
    packed = sorted({str(t.format) for t in checkpoint.tensors.values() if t.format not in TRAINABLE})
    if packed:
        raise ConfigError(
            f"model.train = full: {checkpoint.path.name} holds {', '.join(packed)} weights, which cannot be trained; "
            "give model.path a directory with BF16 or F32 weights, or train an adapter (model.train = lora)",
            key="model.path",
        )
    if checkpoint.spec.mixture.layers and cfg.rl.router_replay:
        raise ConfigError(
            "rl.router_replay = true: with model.train = full transformers routes by itself; set it to false",
            key="rl.router_replay",
        )
