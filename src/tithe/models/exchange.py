"""Pairs travel to the ranks that hold their experts, and answers come back in the order in which they were sent.

A pair is a row and one of its experts. Every rank sends, by rank that holds the expert and then in row order, so that
what a rank receives lies by sender, then by row. Rows travel as stored bits: an expert computes what it would have
computed at home. One exchange is three messages: how many, the pairs, the answers.

A layer exchanges in rounds of `exchange_rows` rows, so that no rank receives more than a bound at once, wherever pairs
want to go: memory does not grow with the batch (`tithe.arch.exchange_bytes`). Ranks make as many rounds as the one with
most rows needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tithe.arch import Shard, exchange_rows
from tithe.errors import RunError
from tithe.models.ranks import Ranks


@dataclass(frozen=True, eq=False)
class Traffic:
    """One round: `order` int64 [P] is which pair (row · k + slot) is sent as number 0, 1, …; `send` and `receive`
    are pairs by rank.

    Example: rows choosing experts [0, 3] and [2, 3] of 4 on 2 ranks send pair 0 to rank 0, and 1, 2, 3 to rank 1.
    """

    ranks: Ranks
    order: Tensor
    send: list[int]
    receive: list[int]

    @staticmethod
    def rounds(ranks: Ranks, n_experts: int, ids: Tensor, n_adapters: int) -> Iterator[tuple[slice, Traffic]]:
        """Rows of ids int32 [n, k] and their round, one after the other: the caller ends one before it asks for the
        next. Every rank takes part, with rows or without. `RunError` as `begin`."""
        size = exchange_rows(ids.shape[1], ranks.size)
        own = max(1, -(-len(ids) // size))
        number, most = 0, own
        while number < most:
            rows = slice(min(number * size, len(ids)), min((number + 1) * size, len(ids)))
            traffic, told = Traffic.begin(ranks, n_experts, ids[rows], n_adapters, own)
            most = max(told)
            yield rows, traffic
            number += 1

    @staticmethod
    def begin(ranks: Ranks, n_experts: int, ids: Tensor, n_adapters: int, word: int = 0) -> tuple[Traffic, list[int]]:
        """Tell the others how many pairs of ids int32 [n, k] they get, and a number; also what all have told. Every
        rank takes part, with rows or without.

        `RunError` when ranks do not serve the same number of adapters, because pairs name theirs by its place.
        """
        bounds = torch.tensor([Shard(r, ranks.size).experts(n_experts).stop for r in range(ranks.size)])
        owner = torch.bucketize(ids.reshape(-1), bounds, right=True)
        order = owner.argsort(stable=True)
        same = torch.tensor([n_adapters, word]).expand(ranks.size, 2)
        told = torch.cat([torch.bincount(owner, minlength=ranks.size)[:, None], same], dim=1)
        heard = ranks.all_to_all(told, [1] * ranks.size, [1] * ranks.size)
        if (heard[:, 1] != n_adapters).any():
            raise RunError(f"ranks serve {heard[:, 1].tolist()} adapters; all must serve the same ones in one order")
        return Traffic(ranks, order, told[:, 0].tolist(), heard[:, 0].tolist()), heard[:, 2].tolist()

    def inverse(self) -> Tensor:
        """int32 [P]: the place in `order` of pair 0, 1, …"""
        places = torch.empty(len(self.order), dtype=torch.int32)
        places[self.order] = torch.arange(len(self.order), dtype=torch.int32)
        return places

    def go(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Send [P, w] parts side by side; what came, part by part (views of one buffer), [Σ receive, w] each.

        Parts of 4-byte elements come before those of 2, whose widths are even.
        """
        rows = torch.cat([p.contiguous().view(torch.uint8) for p in parts], dim=1)
        got = self.ranks.all_to_all(rows, self.send, self.receive)
        out: list[Tensor] = []
        at = 0
        for p in parts:
            size = p.element_size()
            out.append(got.view(p.dtype)[:, at // size : at // size + p.shape[1]])
            at += p.shape[1] * size
        return out

    def back(self, answers: Tensor) -> Tensor:
        """Send [Σ receive, w] answers to where the pairs came from; those to one's own pairs [P, w], as sent."""
        return self.ranks.all_to_all(answers, self.receive, self.send)


def by_adapter(which: Tensor) -> tuple[Tensor | None, list[tuple[int, int, int]]]:
    """(order, (start, stop, adapter) ranges): pairs put side by side by adapter, int32 [n]; those below 0 have none.

    The order is None where they lie so already, which with one adapter they always do.

    >>> by_adapter(torch.tensor([1, -1, 1], dtype=torch.int32))
    (tensor([1, 0, 2]), [(1, 3, 1)])
    """
    falls = bool((which[1:] < which[:-1]).any())
    order = which.argsort(stable=True) if falls else None
    found, counts = torch.unique_consecutive(which if order is None else which[order], return_counts=True)
    ranges: list[tuple[int, int, int]] = []
    start = 0
    for adapter, n in zip(found.tolist(), counts.tolist(), strict=True):
        if adapter >= 0:
            ranges.append((start, start + n, adapter))
        start += n
    return order, ranges
