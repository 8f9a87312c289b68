"""One stream of orders: all ranks carry out the same, refuse together, and notice when one is gone."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.ranks import on_ranks_of, outcomes
from tithe.errors import EngineError, PublishRefused, RanksLost
from tithe.models import ALONE, Orders, Ranks, Stop
from tithe.utils.wire import Wire


@dataclass(frozen=True)
class Say:
    """Each rank notes the word."""

    word: str


@dataclass(frozen=True)
class Refuse:
    """A rank has a problem."""

    rank: int


@dataclass(frozen=True)
class Die:
    """A rank is killed."""

    rank: int


def stream(ranks: Ranks) -> tuple[Orders, list[str]]:
    orders, heard = Orders(ranks, Wire(Say, Refuse, Die, Stop)), []

    def die(order: Die) -> None:
        if ranks.rank == order.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        ranks.barrier()

    orders.handle(Say, lambda order: heard.append(order.word))
    orders.handle(Refuse, lambda o: ranks.agree(PublishRefused("no") if ranks.rank == o.rank else None))
    orders.handle(Die, die)
    return orders, heard


def test_ranks_do_the_same_and_go_on_after_a_refusal(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> list[str]:
        orders, heard = stream(ranks)
        if ranks.rank > 0:
            orders.follow()
            return heard
        orders.give(Say("a" * 100_000))
        for rank, text in ((2, "^rank 2: no$"), (0, "^no$")):
            with pytest.raises(PublishRefused, match=text):
                orders.give(Refuse(rank))
        orders.give(Say("b"))
        orders.give(Stop())
        return heard

    assert on_ranks_of(3, tmp_path, work) == [["a" * 100_000, "b"]] * 3


def test_a_killed_rank_ends_the_others_and_the_stream_stays_broken(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> None:
        orders, _ = stream(ranks)
        ranks.why = lambda: "rank 1 was killed"
        try:
            if ranks.rank > 0:
                orders.follow()
            orders.give(Die(1))
        except RanksLost:
            ranks.close()  # as a process that ends does
            if ranks.rank == 0:
                with pytest.raises(RanksLost, match="lost the others: rank 1 was killed"):
                    orders.give(Say("x"))
            raise

    found = outcomes(3, tmp_path, work)
    assert found[1] == (False, -signal.SIGKILL)
    for rank in (0, 2):
        assert "rank 1 was killed" in found[rank][1], found[rank]
        assert "tithe resume" in found[rank][1]


def test_alone_an_order_is_a_call() -> None:
    orders, heard = stream(ALONE)
    orders.give(Say("a"))
    with pytest.raises(PublishRefused, match=r"^no$"):
        orders.give(Refuse(0))
    orders.give(Say("b"))
    assert heard == ["a", "b"]
    assert not orders.is_broken
    with pytest.raises(EngineError, match=r"^x$"):
        ALONE.agree(EngineError("x"))
