"""Rows of a model's parameters, read from a checkpoint's own tensors: those that a rank keeps, and no others.

transformers names parameters as checkpoints do, but for two things: it calls a mixture's block `mlp` everywhere, and
stacks its experts: gate and up one below the other, ``mlp.experts.gate_up_proj`` [E, 2·I, H], and ``down_proj``
[E, H, I]. A published checkpoint has a matrix for each expert, unless it lies stacked there too (`tithe.arch.tensors`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from tithe.arch import Checkpoint, TensorEntry, TensorFamily, TensorFormat, TensorGroup, tensor_families
from tithe.errors import ModelError

BLOCK_BYTES: Final = 8 << 20
"""Bytes of a file that are copied at a time, and held only meanwhile."""

_DTYPES: Final[Mapping[TensorFormat, torch.dtype]] = {
    TensorFormat.BF16: torch.bfloat16,
    TensorFormat.F16: torch.float16,
    TensorFormat.F32: torch.float32,
}


class Weights:
    """A checkpoint's tensors by transformers' names of parameters."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._stacks: dict[str, tuple[int, list[TensorFamily]]] = {}
        spec = checkpoint.spec
        routed = [f for f in tensor_families(spec) if f.group is TensorGroup.ROUTED_EXPERTS and f.is_per_expert]
        for layer in spec.moe_layers if routed else ():
            *gate_up, down = routed
            block = f"model.layers.{layer}.mlp.experts"
            self._stacks |= {f"{block}.gate_up_proj": (layer, gate_up), f"{block}.down_proj": (layer, [down])}

    def fill(self, name: str, rows: range, out: Tensor) -> None:
        """out [len(rows), …] ← entries `rows` of a parameter's first dimension, in out's dtype.

        `ModelError` when the checkpoint has no such tensor, another shape, or numbers that nobody trains.
        """
        if name not in self._stacks:
            self._copy(self._entry(name), rows, out)
            return
        layer, families = self._stacks[name]
        for expert, rows_out in zip(rows, out, strict=True):
            parts = [self._entry(family.member(layer, expert).name) for family in families]
            pieces = rows_out.split([part.shape[0] for part in parts])
            for part, piece in zip(parts, pieces, strict=True):
                self._copy(part, range(part.shape[0]), piece)

    def _entry(self, name: str) -> TensorEntry:
        tensors = self._checkpoint.tensors
        found = tensors.get(name) or tensors.get(name.replace(".mlp.", ".block_sparse_moe."))
        if found is None:
            raise ModelError(
                f"{self._checkpoint.path}: it has no tensor for {name}, which transformers' model wants; "
                "config and weights do not belong together"
            )
        return found

    def _copy(self, entry: TensorEntry, rows: range, out: Tensor) -> None:
        dtype = _DTYPES.get(entry.format)
        if dtype is None:
            raise ModelError(
                f"{self._checkpoint.path}: {entry.name} holds {entry.format} numbers, which cannot be trained; give "
                "model.path a directory with BF16 or F32 weights, or train an adapter (model.train = lora)"
            )
        if tuple(out.shape) != (len(rows), *entry.shape[1:]) or rows.stop > entry.shape[0]:
            raise ModelError(
                f"{self._checkpoint.path}: {entry.name} has shape {entry.shape}, transformers wants {tuple(out.shape)} "
                f"for {len(rows)} of its entries; config and weights do not belong together"
            )
        size = entry.n_bytes // entry.shape[0]
        step = max(1, BLOCK_BYTES // size)
        for begin in range(rows.start, rows.stop, step):
            end = min(begin + step, rows.stop)
            stored = torch.from_numpy(entry.read_slice(begin, end)).view(dtype)
            out[begin - rows.start : end - rows.start] = stored.view(end - begin, *entry.shape[1:])
            entry.file.release(entry.offset + begin * size, (end - begin) * size)
