"""What an answer that runs into the length limit costs (DAPO, arXiv 2503.14476 §3.4)."""

from __future__ import annotations


def soft_punishment(length: int, limit: int, buffer: int) -> float:
    """DAPO's eq. 13: 0 up to `limit` - `buffer` tokens, then falling in a straight line to -1 at `limit`, -1 beyond.

    `limit` is `rollout.max_new_tokens`. Raises `ValueError` unless 0 < buffer < limit.

    >>> [soft_punishment(n, limit=20, buffer=4) for n in (16, 17, 18, 20, 25)]
    [0.0, -0.25, -0.5, -1.0, -1.0]
    """
    if not 0 < buffer < limit:
        raise ValueError(f"the buffer lies between 0 and the limit of {limit} tokens, not at {buffer}")
    return -min(max(length - (limit - buffer), 0) / buffer, 1.0)
