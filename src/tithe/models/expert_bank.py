"""A mixture layer's expert block as it lies in memory: router, packed experts, shared expert, and an adapter on them.

The shared expert is a bank of one expert that every row takes with weight 1; it is added before the routed ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from tithe.models.expert_adapter import ExpertAdapter, ExpertSite
from tithe.models.ranks import ALONE, Ranks
from tithe.models.routing import Router
from tithe.quant import PackedMatrix
from tithe.quant.grouped import GroupTable


@dataclass(frozen=True)
class Activation:
    """(up + offset)·gate·sigmoid(alpha·gate), gate ≤ limit, |up| ≤ limit; `interleaved`: gate and up take turns in the
    columns of gate_up, instead of gate first."""

    alpha: float = 1.0
    limit: float = math.inf
    offset: float = 0.0
    interleaved: bool = False

    def arguments(self) -> list[int | float]:
        """As kernels take them."""
        return [int(self.interleaved), float(self.alpha), float(self.limit), float(self.offset)]


SILU = Activation()
GPT_OSS = Activation(alpha=1.702, limit=7.0, offset=1.0, interleaved=True)


@dataclass(frozen=True, eq=False)
class ExpertBank:
    """E experts: gate_up [2I, H] and down [H, I] each; biases are float32 [E, 2I] and [E, H]. `sites` are the linears
    that can carry an adapter."""

    gate_up: GroupTable
    down: GroupTable
    sites: tuple[ExpertSite, ...]
    activation: Activation = SILU
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    first: int = 0
    """The model's number of the bank's first expert: a rank keeps a run of them."""

    @property
    def hidden(self) -> int:
        """H."""
        return self.down.rows

    @property
    def width(self) -> int:
        """I."""
        return self.down.columns

    def __len__(self) -> int:
        """E."""
        return len(self.down)

    def storages(self) -> list[Tensor]:
        """The tensors that hold the experts."""
        biases = [b for b in (self.gate_up_bias, self.down_bias) if b is not None]
        return [*self.gate_up.storages(), *self.down.storages(), *biases]


@dataclass(frozen=True, eq=False)
class ExpertBlock:
    """Router matrix [E, H] with what belongs to it (`gate_bias` on the logits, `correction` on the choice), and the
    experts."""

    router: Router
    gate: PackedMatrix
    routed: ExpertBank
    shared: ExpertBank | None = None
    gate_bias: Tensor | None = None
    correction: Tensor | None = None
    ranks: Ranks = ALONE
    """Who holds the other experts; `routed` are this rank's."""

    def banks(self) -> list[ExpertBank]:
        """Shared, then routed: the order in which they are added."""
        return [bank for bank in (self.shared, self.routed) if bank is not None]

    def storages(self) -> list[Tensor]:
        """The tensors that hold the block."""
        small = [t for t in (self.gate_bias, self.correction) if t is not None]
        return [*self.gate.storages(), *small, *(t for bank in self.banks() for t in bank.storages())]


@dataclass(frozen=True, eq=False)
class BlockAdapter:
    """An adapter version on one block."""

    routed: ExpertAdapter | None = None
    shared: ExpertAdapter | None = None

    @property
    def is_empty(self) -> bool:
        """True when no expert is adapted."""
        return self.routed is None and self.shared is None

    def parts(self) -> list[ExpertAdapter]:
        """Those that exist."""
        return [part for part in (self.routed, self.shared) if part is not None]

    def of(self, bank: ExpertBank, block: ExpertBlock) -> ExpertAdapter | None:
        """The part on one of the block's banks."""
        return self.shared if bank is block.shared else self.routed
