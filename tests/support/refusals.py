"""What a call gives, or what it says when it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tithe.errors import UserError


def answer_or_refusal(call: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """(answer, "") or (None, the message of a `UserError`); any other exception passes through."""
    try:
        return call(*arguments), ""
    except UserError as error:
        return None, str(error)
