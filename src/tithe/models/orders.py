"""Rank 0 says what all ranks do next, and all do it: collectives can never cross.

rank 0    `give`, on its lane, one order after the other
others    `follow`: wait for an order, carry it out, until `Stop`

An order is a message (`tithe.utils.wire`); its handler is the same on every rank, and each rank knows its own part.
With one rank an order is a call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from tithe.errors import RanksLost
from tithe.models.ranks import Agreed, Ranks
from tithe.utils.wire import Wire

M = TypeVar("M")


@dataclass(frozen=True)
class Stop:
    """The last order."""


class Orders:
    """The stream of one run's orders. Belongs to the lane."""

    def __init__(self, ranks: Ranks, wire: Wire) -> None:
        self.ranks, self.wire = ranks, wire
        self._handlers: dict[type, Callable[[Any], Any]] = {Stop: lambda _: None}
        self._broken: BaseException | None = None

    @property
    def is_broken(self) -> bool:
        """Whether an order has failed on this rank: ranks may be out of step, and no other can be given."""
        return self._broken is not None

    def handle(self, kind: type[M], handler: Callable[[M], Any]) -> None:
        """Carry out orders of a kind with `handler`. Its errors end the run, except those that ranks agree on
        (`Ranks.agree`)."""
        self._handlers[kind] = handler

    def give(self, order: Any) -> Any:
        """Have all ranks carry out an order; what rank 0's own part gave. Raises what all ranks agreed on; any other
        error is the end of the stream."""
        if self.ranks.size == 1:
            return self._handlers[type(order)](order)
        if isinstance(self._broken, RanksLost):
            raise RanksLost(str(self._broken)) from self._broken
        if self._broken is not None:
            raise RanksLost(f"ranks are no longer in step: {self._broken}") from self._broken
        handler = self._handlers[type(order)]
        try:
            self.ranks.broadcast(self.wire.encode(order), patiently=True)
            with self.ranks.watched():
                return handler(order)
        except Agreed as agreed:
            raise agreed.error from agreed
        except BaseException as error:
            self._broken = error
            raise

    def hear(self) -> Any:
        """The next order, however long it takes; raises `RanksLost` when rank 0 has ended."""
        return self.wire.decode(self.ranks.broadcast(patiently=True))

    def follow(self) -> None:
        """Carry out orders until the last."""
        while True:
            order = self.hear()
            try:
                with self.ranks.watched():
                    self._handlers[type(order)](order)
            except Agreed:
                continue  # rank 0 says so
            if isinstance(order, Stop):
                return
