"""Opening the base: checkpoint, numeric mode, decoder, renderer and lane, as a configuration asks."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tithe.arch import Checkpoint, find_demo_model, read_checkpoint
from tithe.config import RunConfig
from tithe.errors import ConfigError
from tithe.models import Decoder, Lane, ModelOptions, choose, load_model
from tithe.renderers import ChatRenderer, load_renderer
from tithe.utils.memory import release_unused

EIGHT_BITS = 1.1
"""Bytes a weight up to which a checkpoint counts as "8 bits or fewer already"."""


@dataclass(frozen=True, eq=False)
class Base:
    """One frozen base in memory. `cfg` is the configuration with `compute` and `compute_dtype` settled."""

    cfg: RunConfig
    path: Path
    decoder: Decoder
    renderer: ChatRenderer
    lane: Lane
    tuning_s: dict[str, float]


def open_base(cfg: RunConfig, say: Callable[[str], None]) -> Base:
    """Load the base. Raises `ConfigError` or `ModelError` for what does not fit together."""
    if cfg.run.device != "cpu":
        raise ConfigError(
            f"run.device = {cfg.run.device!r}: the fused kernels of this version run on processors only; set it to cpu",
            key="run.device",
        )
    torch.set_num_threads(1)  # in this thread; the lane alone computes with more (see `quant.set_threads`)
    path = Path(cfg.model.path) if cfg.model.path is not None else find_demo_model()
    checkpoint = read_checkpoint(path)
    options = _options(cfg, checkpoint)
    lane = Lane(threads=cfg.run.threads or len(os.sched_getaffinity(0))).start()
    try:
        return _load(cfg, path, checkpoint, options, lane, say)
    except BaseException:
        lane.close()
        raise


def _load(
    cfg: RunConfig,
    path: Path,
    checkpoint: Checkpoint,
    options: ModelOptions,
    lane: Lane,
    say: Callable[[str], None],
) -> Base:
    tuning = lane.call(choose, checkpoint, cfg.model.compute, cfg.model.compute_dtype, options)
    settled = {"compute": tuning.options.compute, "compute_dtype": tuning.options.compute_dtype}
    cfg = cfg.model_copy(update={"model": cfg.model.model_copy(update=settled)})
    if tuning.seconds:
        timed = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in tuning.seconds.items())
        say(f"model.compute: {tuning.options.compute}, {tuning.options.compute_dtype} operands (measured: {timed})")
    decoder = lane.call(load_model, checkpoint, tuning.options)
    renderer = load_renderer(path)
    del checkpoint
    release_unused()
    say(
        f"base: {path.name}, {decoder.spec.n_layers} layers, {decoder.resident_bytes() / 1e6:.0f} MB resident "
        f"({decoder.file_bytes / 1e6:.0f} MB of tensors in the file)"
    )
    return Base(cfg, path, decoder, renderer, lane, tuning.seconds)


def _options(cfg: RunConfig, checkpoint: Checkpoint) -> ModelOptions:
    m = cfg.model
    q_proj = checkpoint.tensors["model.layers.0.self_attn.q_proj.weight"]
    stored = q_proj.format.bytes_per_weight
    for key, wanted in (("model.load_in_8bit", m.load_in_8bit), ("model.quantize", m.quantize != "none")):
        if wanted and stored <= EIGHT_BITS:
            raise ConfigError(
                f"{key}: the linears of {checkpoint.path.name} are stored as {q_proj.format} already; leave it off",
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
