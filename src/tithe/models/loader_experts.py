"""A mixture layer's expert block from a checkpoint: router, shared expert, and the routed experts that a rank keeps.

Names, stacking and which tensors belong together come from `tithe.arch.tensor_families`, so that every published
naming is read alike. Experts go into their bank one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tithe.arch import ArchSpec, Checkpoint, Shard, TensorFamily, TensorGroup, tensor_families
from tithe.errors import ModelError
from tithe.models.expert_adapter import EXPERT, expert_sites
from tithe.models.expert_bank import SILU, Activation, ExpertBank, ExpertBlock
from tithe.models.loader_pack import Packer
from tithe.models.loader_rows import Piece, Rows, can_stack
from tithe.models.routing import Router
from tithe.quant import PackedMatrix
from tithe.quant.grouped import GroupTable
from tithe.quant.reference import dequantize


def load_experts(checkpoint: Checkpoint, layer: int, packer: Packer, shard: Shard | None = None) -> ExpertBlock:
    """The expert block of one mixture layer, with all routed experts or those that a rank keeps.

    `ModelError` for damage, for what cannot be packed, and when there are more ranks than experts.
    """
    spec = checkpoint.spec
    mine = range(spec.n_experts) if shard is None else shard.experts(spec.n_experts)
    if not mine:
        raise ModelError(f"{checkpoint.path}: {spec.n_experts} experts; use at most that many ranks")
    loader = _BlockLoader(checkpoint, layer, packer)
    gate, bias, correction = loader.router()
    return ExpertBlock(
        router=Router.of(spec),
        gate=gate,
        routed=loader.bank(TensorGroup.ROUTED_EXPERTS, mine),
        shared=loader.bank(TensorGroup.SHARED_EXPERT, range(1)) if spec.mixture.n_shared else None,
        gate_bias=bias,
        correction=correction,
    )


def vector(checkpoint: Checkpoint, name: str, entries: range | None = None) -> Tensor:
    """A norm weight or bias as float32; of a stack [E, n] some entries' (n,) each."""
    entry = checkpoint.tensors[name]
    raw = entry.read() if entries is None else entry.read_slice(entries.start, entries.stop)
    values = torch.from_numpy(dequantize(raw, entry.format)).clone()
    return values.reshape(-1) if entries is None else values


@dataclass(frozen=True)
class _BlockLoader:
    checkpoint: Checkpoint
    layer: int
    packer: Packer

    def router(self) -> tuple[PackedMatrix, Tensor | None, Tensor | None]:
        """(matrix, bias of the logits, correction of the choice)."""
        found: dict[str, TensorFamily] = {}
        for family in self._families(TensorGroup.ROUTER):
            found[family.name.rpartition(".")[2]] = family
        weight = Rows((Piece(self.checkpoint.tensors[self._name(found["weight"])]),))
        bias, correction = (
            vector(self.checkpoint, self._name(found[part])) if part in found else None
            for part in ("bias", "e_score_correction_bias")
        )
        return self.packer.matrix(weight, is_linear=False), bias, correction

    def bank(self, group: TensorGroup, experts: range) -> ExpertBank:
        """The bank of routed experts, or of the shared one."""
        families = self._families(group)
        *first, down = (f for f in families if f.is_linear)
        gate_up_bias, down_bias = self._biases([f for f in families if not f.is_linear], experts)
        module = self._module(down)
        return ExpertBank(
            gate_up=self._table([self._pieces(first, e) for e in experts]),
            down=self._table([self._pieces([down], e) for e in experts]),
            sites=expert_sites(
                module.rpartition(".")[0],
                down.one_expert[1],
                down.one_expert[0],
                tuple(self._module(f).rpartition(".")[2] for f in (*first, down)),
            ),
            activation=_activation(self.checkpoint.spec, is_fused=len(first) == 1),
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            first=experts.start,
        )

    def _families(self, group: TensorGroup) -> list[TensorFamily]:
        families = tensor_families(self.checkpoint.spec)
        return [f for f in families if f.group is group and self.layer in f.layers]

    def _name(self, family: TensorFamily, expert: int | None = None) -> str:
        return family.member(self.layer, expert).name

    def _module(self, family: TensorFamily) -> str:
        """Path of a linear with the expert's number left open, as adapters name it."""
        module = family.member(self.layer).module
        if family.is_stacked:
            block, _, part = module.rpartition(".")
            return f"{block}.{EXPERT}.{part}"
        return module

    def _pieces(self, families: Sequence[TensorFamily], expert: int) -> tuple[Piece, ...]:
        tensors = self.checkpoint.tensors
        if families[0].is_stacked:
            return tuple(Piece(tensors[self._name(f)], expert, f.is_transposed) for f in families)
        number = expert if families[0].is_per_expert else None
        return tuple(Piece(tensors[self._name(f, number)]) for f in families)

    def _table(self, experts: Sequence[tuple[Piece, ...]]) -> GroupTable:
        """One bank where all experts have one format and their parts can be stacked, else a matrix each."""
        kinds = {(pieces[0].stored, can_stack(pieces)) for pieces in experts}
        if len(kinds) == 1 and can_stack(experts[0]):
            return GroupTable.of_bank(self.packer.bank([Rows(pieces) for pieces in experts]))
        return GroupTable.of_matrices([self._matrix(pieces) for pieces in experts])

    def _matrix(self, pieces: tuple[Piece, ...]) -> PackedMatrix:
        if can_stack(pieces):
            return self.packer.matrix(Rows(pieces))
        return self.packer.dense([self.packer.matrix(Rows((piece,))) for piece in pieces])

    def _biases(self, families: Sequence[TensorFamily], experts: range) -> tuple[Tensor | None, Tensor | None]:
        """float32 [E, 2I] and [E, H], which lie stacked in every model that has them."""
        if not families:
            return None, None
        *first, down = (vector(self.checkpoint, self._name(f), experts) for f in families)
        return torch.cat(first, dim=1), down


def _activation(spec: ArchSpec, *, is_fused: bool) -> Activation:
    """The gated unit; gate and up take turns where they are one tensor."""
    gate = spec.clamped_gate
    if gate is None:
        return SILU
    return Activation(alpha=gate.alpha, limit=gate.limit, offset=1.0, interleaved=is_fused)
