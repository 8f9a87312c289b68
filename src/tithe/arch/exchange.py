"""What ranks send each other in a mixture layer, at most: one source for the exchange and for who plans its memory."""

from __future__ import annotations

from typing import Final

EXCHANGE_PAIRS: Final = 8192
"""Pairs that a rank receives in one round at most (one row each of as many ranks as there are, where that is more)."""


def exchange_rows(per_token: int, ranks: int) -> int:
    """Rows that a rank sends in one round."""
    return max(1, EXCHANGE_PAIRS // (per_token * ranks))


def exchange_bytes(hidden: int, per_token: int, ranks: int, operand_bytes: int, *, training: bool) -> int:
    """The most that a round holds on one rank beside an expert block's workspace; in training the larger of a forward's
    and a backward's round.

    Its own pairs lie picked and then side by side; those that came also in the order of their adapters; answers come
    once as they are computed, once in the order of pairs, and once more to the rank that asked.
    """
    own = exchange_rows(per_token, ranks) * per_token
    received = own * ranks
    sent, answer = hidden * operand_bytes + 8, 4 * hidden
    forward = own * (2 * sent + answer) + received * 2 * (sent + answer)
    if not training:
        return forward
    sent, answer = 2 * hidden * operand_bytes + 8, 4 * (hidden + 1)
    return max(forward, own * 2 * (sent + answer) + received * (sent + answer))
