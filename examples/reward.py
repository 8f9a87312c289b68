"""A reward of one's own, named in a run file as `reward.function: examples/reward.py:score`."""

from __future__ import annotations

import re

from tithe.types import PromptItem


def score(item: PromptItem, text: str, finish: str) -> dict[str, float] | None:
    """Pay for the right number, for its unit, and for coming to an end; the parts are added and recorded one by one.

    `item` is the row: `answer`, and every other column in `extra`. `finish` is "stop", or "length" for an answer that
    was cut off; it is passed because it is asked for (and so could `token_ids` be). None abstains: that answer is not
    trained.
    """
    unit = item.extra.get("unit")
    if item.answer is None or unit is None:
        return None
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text)
    return {
        "number": 1.0 if numbers and float(numbers[-1]) == float(item.answer) else 0.0,
        "unit": 0.2 if str(unit) in text.lower() else 0.0,
        "ended": 0.0 if finish == "stop" else -0.2,
    }
