"""Standard output belongs to the answer.

With `--json` it carries exactly one line, whatever happens: file descriptor 1 itself points to standard error while the
command works, so that neither a reward function's `print` nor a C library can add a second one.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack, redirect_stdout
from pathlib import PurePath
from types import TracebackType
from typing import Self

TEXT_KEY = "text"
"""Key of a result that holds its human form; JSON leaves it out."""


class Answer:
    """One command's answer. Use as a context manager around the whole command; `give` or `fail` at most once.

    Leaving without either, as an unexpected exception does, still prints the one line under `--json`.
    """

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._answered = False
        self._saved_fd = -1
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if self._as_json:
            sys.stdout.flush()
            self._saved_fd = os.dup(1)
            os.dup2(2, 1)
            self._stack.enter_context(redirect_stdout(sys.stderr))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._as_json:
            if not self._answered:
                self._print_line({"error": str(error), "kind": kind.__name__ if kind else "NoAnswer"})
            self._stack.close()
            sys.stderr.flush()
            os.dup2(self._saved_fd, 1)
            os.close(self._saved_fd)

    def give(self, result: Mapping[str, object]) -> bool:
        """Print a result: one line of JSON, or its text for people. False when the reader has gone."""
        self._answered = True
        try:
            if self._as_json:
                self._print_line({key: value for key, value in result.items() if key != TEXT_KEY})
            else:
                text = result.get(TEXT_KEY)
                print(text if isinstance(text, str) else _as_lines(result), flush=True)
        except BrokenPipeError:
            # Python flushes standard output once more at exit and would complain then.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return False
        return True

    def fail(self, error: BaseException, message: str | None = None) -> None:
        """Say what went wrong on standard error, and under `--json` on the one line too."""
        message = message or str(error) or type(error).__name__
        print(f"tithe: {message}", file=sys.stderr)
        if self._as_json:
            key = getattr(error, "key", None)
            self._print_line({"error": message, "kind": type(error).__name__, **({"key": key} if key else {})})
        self._answered = True

    def _print_line(self, result: Mapping[str, object]) -> None:
        line = json.dumps(to_plain(result), ensure_ascii=False, allow_nan=False)
        os.write(self._saved_fd, f"{line}\n".encode(errors="backslashreplace"))


def to_plain(value: object) -> object:
    """`value` in JSON's own types: numpy scalars become numbers, paths text, NaN and infinities null.

    Raises TypeError for anything else, which is a fault of the command and not of its input.
    """
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, PurePath):
        return str(value)
    item = getattr(value, "item", None)
    if callable(item):
        return to_plain(item())
    raise TypeError(f"a result cannot hold {type(value).__name__}: {value!r}")


def _as_lines(result: Mapping[str, object]) -> str:
    width = max((len(key) for key in result), default=0)
    return "\n".join(f"{key:<{width}}  {value}" for key, value in result.items())
