"""Every parameter over ranks: what publishing and checkpoints ask of a model that no rank holds whole.

    FullShare       every rank's own `FullTrainer` and what an order asks of it
    LeadingModel    rank 0's face: log-probs of a probe, a directory, a state

Batches and steps are those of `tithe.trainer.leading`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from tithe.models import Orders
from tithe.trainer.full import FullTrainer


@dataclass(frozen=True)
class AskModel:
    """The model's log-probs of a probe."""

    prompt: tuple[int, ...]
    target: tuple[int, ...]


@dataclass(frozen=True)
class WriteModel:
    """Put the model together; rank 0 writes it to a folder."""

    folder: str


@dataclass(frozen=True)
class GiveState:
    """Put everything that a resume needs together, on rank 0."""


MODEL_ORDERS = (AskModel, WriteModel, GiveState)
"""Orders of a model over ranks."""


class FullShare:
    """One rank's part of every order. On the lane."""

    def __init__(self, trainer: FullTrainer, orders: Orders) -> None:
        self._trainer, self._is_first = trainer, orders.ranks.rank == 0
        orders.handle(AskModel, lambda order: trainer.probe(order.prompt, order.target))
        orders.handle(WriteModel, lambda order: trainer.write(Path(order.folder)))
        orders.handle(GiveState, lambda _: self._give_state())

    def _give_state(self) -> dict[str, Tensor]:
        """The whole state on rank 0; others let each tensor go when it was put together."""
        return {name: tensor for name, tensor in self._trainer.each_tensor() if self._is_first}


class LeadingModel:
    """On rank 0: what is asked of a model beside training it, done by all ranks. On the lane."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders

    def probe(self, prompt: Sequence[int], target: Sequence[int]) -> list[float]:
        """As `FullTrainer.probe`."""
        return self._orders.give(AskModel(tuple(prompt), tuple(target)))

    def write(self, folder: Path) -> None:
        """As `FullTrainer.write`."""
        self._orders.give(WriteModel(str(folder)))

    def state_tensors(self) -> dict[str, Tensor]:
        """As `FullTrainer.state_tensors`: whole, and only here."""
        return self._orders.give(GiveState())
