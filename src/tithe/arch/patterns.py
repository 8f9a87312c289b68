"""Lists of module names that a quantized checkpoint left alone, in the four dialects in use."""

from __future__ import annotations

import enum
import fnmatch
import re
from functools import cached_property
from typing import Final

from tithe.arch.files import quote
from tithe.errors import ModelError

_NEVER: Final = re.compile(r"(?!)")


class Dialect(enum.Enum):
    """How a list's entries are matched against a module's full name, e.g. ``model.layers.3.mlp.gate``."""

    COMPRESSED_TENSORS = "compressed-tensors"
    """``re:`` and a pattern that matches from the start, or the whole name."""
    TRANSFORMERS = "transformers"
    """A prefix up to a dot or a pattern of one, or a suffix (`should_convert_module`)."""
    GLOB = "glob"
    """The whole name, with ``*`` for anything (TensorRT ModelOpt)."""
    PART = "part"
    """Any part of the name (AutoAWQ)."""


class ModuleList:
    """Names and patterns as one regular expression. `ModelError` for an entry that is no valid pattern.

    >>> ModuleList(["lm_head", "re:.*self_attn.*"], Dialect.COMPRESSED_TENSORS).has("model.layers.0.self_attn.o_proj")
    True
    """

    def __init__(self, entries: tuple[str, ...] | list[str], dialect: Dialect) -> None:
        self.entries = tuple(entries)
        self.dialect = dialect
        for entry in self.entries:
            try:
                re.compile(self._pattern(entry))
            except re.error as error:
                raise ModelError(
                    f"config: quantization_config: {quote(entry)} is no valid pattern ({error})"
                ) from error

    def has(self, module: str) -> bool:
        """True when some entry matches the module."""
        return self._expression.match(module) is not None

    @property
    def is_number_blind(self) -> bool:
        """True when names that differ only in digits, with as many of them, always get one answer.

        Without digits, character sets and references to groups or named characters, a pattern meets a digit only
        where it takes them all: as any character, any digit, any word character.
        """
        text = "".join(self.entries)
        return not re.search(r"[0-9\[]|\(\?P=|\\N", text)

    @cached_property
    def _expression(self) -> re.Pattern[str]:
        return re.compile("|".join(f"(?:{self._pattern(entry)})" for entry in self.entries)) if self.entries else _NEVER

    def _pattern(self, entry: str) -> str:
        """A pattern for `re.match`."""
        match self.dialect:
            case Dialect.COMPRESSED_TENSORS:
                return entry[3:] if entry.startswith("re:") else rf"{re.escape(entry)}\Z"
            case Dialect.TRANSFORMERS:
                return rf"(?:{entry})(?:(?<=\.)|(?=\.|$))|.*{re.escape(entry)}\Z"
            case Dialect.GLOB:
                return fnmatch.translate(entry)
            case Dialect.PART:
                return f".*{re.escape(entry)}"
