"""Runs somebody else's code and keeps what it raises, whatever it is: the sandbox's own boundary, for processes that
are too small to import the house's."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, Final

MAX_TEXT: Final = 500


class Attempt:
    """Calls `function` at once. `value` is what it returned, or `error` what it raised, `SystemExit` included."""

    def __init__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self.value: Any = None
        self.error: BaseException | None = None
        try:
            self.value = function(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001  the code is not ours
            self.error = error

    def text(self) -> str:
        """The error on one line."""
        assert self.error is not None
        try:
            return "".join(traceback.format_exception_only(self.error)).strip()[:MAX_TEXT]
        except BaseException:  # noqa: BLE001  even its text is not ours
            return type(self.error).__name__
