"""transformers' own model as a policy: loaded from a directory, run over a micro-batch, written to a directory.

Right and simple first: every rollout is a row of its own, its prompt repeated, padded on the right. Attention is
causal, so what stands behind a row's end changes nothing before it, and no mask is needed.

Shape legend: _Q rollouts of a micro-batch, _W longest row, _N targets, _H hidden, _V vocabulary.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tithe.errors import ModelError
from tithe.lora import disk_errors
from tithe.packing import MicroBatch
from tithe.packing.layout import NO_PREFIX

HEAD_ROWS = 192
"""Rows of logits held at once; the backward computes them again, so that they are never kept."""

_BESIDE = ("generation_config.json", "chat_template.jinja", "special_tokens_map.json", "vocab.json", "merges.txt")
"""Files that belong to a checkpoint's tokenizer and settings, with `tokenizer*` and `added_tokens.json`."""


class FullPolicy(nn.Module):
    """A causal language model that answers with log-probs and entropies of given tokens."""

    def __init__(self, model: nn.Module, n_tokens: int) -> None:
        super().__init__()
        self.model = model
        self.n_tokens = n_tokens
        kept = model.state_dict().keys()
        self.kept_buffers = tuple(name for name, _ in model.named_buffers() if name in kept)
        """What a checkpoint holds beside parameters, such as a router's correction."""

    def forward(self, ids: Tensor, places: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        """(log-softmax(logits / T) of targets, entropy), float32 [N], from ids [Q, W]; see `unpack` for the rest."""
        model = cast("Any", self.model)
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        rows = hidden.flatten(0, 1)[places]
        head = model.lm_head
        logp: list[Tensor] = []
        entropy: list[Tensor] = []
        for at in range(0, len(places), HEAD_ROWS):
            part = slice(at, at + HEAD_ROWS)
            args = (rows[part], head.weight, head.bias, targets[part], temperature[part], self.n_tokens)
            one = cast("tuple[Tensor, Tensor]", checkpoint(_score, *args, use_reentrant=False))
            logp.append(one[0])
            entropy.append(one[1])
        return torch.cat(logp), torch.cat(entropy)


def _score(
    rows: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: Tensor, n_tokens: int
) -> tuple[Tensor, Tensor]:
    logits = nn.functional.linear(rows, weight, bias)[:, :n_tokens].float()
    full = (logits / temperature[:, None]).log_softmax(-1)
    return full.gather(1, targets[:, None])[:, 0], -(full.exp() * full).sum(-1)


def unpack(micro: MicroBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A packed micro-batch as padded rows: ids [Q, W], and per target [N] its row among the Q·W, id and temperature.

    A temperature of 0 scores at 1, as the greedy sampler does.
    """
    own = (micro.seg_prefix != NO_PREFIX).nonzero()[0]
    rows: list[Tensor] = []
    first: list[int] = []
    for segment in own:
        parts = [_segment(micro, int(micro.seg_prefix[segment])), _segment(micro, int(segment))]
        first.append(len(parts[0]) - 1)
        rows.append(torch.cat(parts))
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    seq = torch.from_numpy(micro.seq_index)
    offset = torch.arange(len(seq)) - torch.searchsorted(seq, seq)
    places = seq * ids.shape[1] + torch.tensor(first)[seq] + offset
    temperature = torch.from_numpy(micro.temperature)
    return ids, places, torch.from_numpy(micro.target_ids), temperature.masked_fill(temperature <= 0, 1.0)


def _segment(micro: MicroBatch, segment: int) -> Tensor:
    start, length = int(micro.seg_start[segment]), int(micro.seg_len[segment])
    return torch.from_numpy(micro.input_ids[start : start + length])


def load_full(directory: Path, n_tokens: int, *, checkpointing: bool) -> FullPolicy:
    """A directory's model in float32, every weight with a gradient. Raises `ModelError` for what transformers refuses.

    `checkpointing` keeps only each layer's input for the backward.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  seconds that adapters need not wait

    with _explained(directory), _no_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(
            directory, config=_config(directory), dtype=torch.float32, local_files_only=True
        )
    return _prepared(model, n_tokens, checkpointing=checkpointing)


def empty_full(directory: Path, n_tokens: int, *, checkpointing: bool) -> FullPolicy:
    """As `load_full`, without a byte of its weights: parameters, and what else a checkpoint holds, are on torch's meta
    device; what is computed from the config is there."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    with _explained(directory):
        config = _config(directory)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    policy = _prepared(model, n_tokens, checkpointing=checkpointing)
    _compute_buffers(policy, directory)
    return policy


def _config(directory: Path) -> Any:
    from transformers import AutoConfig  # noqa: PLC0415

    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    if getattr(config, "attention_dropout", 0.0):
        config.attention_dropout = 0.0  # the policy that is trained must be the one that sampled
    return config


@contextmanager
def _explained(directory: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise ModelError(f"{directory}: transformers cannot load it for full-parameter training: {error}") from error


def _prepared(model: Any, n_tokens: int, *, checkpointing: bool) -> FullPolicy:
    if checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        model.train()  # transformers checkpoints in this mode only
    else:
        model.eval()
    model.requires_grad_(requires_grad=True)
    return FullPolicy(model, n_tokens)


def _compute_buffers(policy: FullPolicy, directory: Path) -> None:
    """Give memory to buffers that no checkpoint holds (rotary tables), and have transformers compute them again."""
    model = cast("Any", policy.model)
    found: list[tuple[str, Tensor]] = []
    for path, module in model.named_modules():
        names = [name for name, _ in module.named_buffers(prefix=path, recurse=False)]
        names = [name.rpartition(".")[2] for name in names if name not in policy.kept_buffers]
        for name in names:
            like = module.get_buffer(name)
            setattr(module, name, torch.full(like.shape, torch.nan, dtype=like.dtype, device="cpu"))
        if names:
            model._init_weights(module)  # noqa: SLF001  what `from_pretrained` calls for what it did not find
            found += [(f"{path}.{name}", module.get_buffer(name)) for name in names]
    unknown = [name for name, buffer in found if not buffer.isfinite().all()]
    if unknown:
        raise ModelError(f"{directory}: transformers does not say how {unknown[0]} is computed; train on one rank")


def write_full(policy: FullPolicy, folder: Path, source: Path, weights: dict[str, Tensor] | None = None) -> None:
    """Fill a folder with a complete Hugging Face directory: one safetensors file, the source's config and tokenizer.

    `weights` (by parameter name, without the policy's prefix) take the place of the module's own. Equal weights give
    equal bytes. Raises `OSError` when the disk refuses.
    """
    model = cast("Any", policy.model)
    buffers = {name: model.get_buffer(name) for name in policy.kept_buffers}
    state = dict(model.state_dict()) if weights is None else weights | buffers
    dtype = str(next(iter(state.values())).dtype).removeprefix("torch.")
    with _no_progress_bars(), disk_errors(folder):
        model.save_pretrained(folder, state_dict=state, max_shard_size="100TB")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config = {key: value for key, value in config.items() if key not in ("torch_dtype", "dtype")} | {"dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    beside = [source / name for name in (*_BESIDE, "added_tokens.json")]
    for path in (*beside, *source.glob("tokenizer*")):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """transformers' own, which would stand between the lines of a run's progress."""
    from transformers.utils import logging  # noqa: PLC0415

    shows = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shows:
            logging.enable_progress_bar()
