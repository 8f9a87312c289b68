"""What every section shares: strict, frozen, documented fields, and the few field types that need a rule of their
own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    """A frozen group of keys. Strict: text is never turned into a number or a boolean, and unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        hide_input_in_errors=True,
    )


def derived(factory: Callable[[dict[str, Any]], Any], text: str, **constraints: Any) -> Any:
    """A field whose default follows from keys declared above it in the same section; `text` says how, for the docs."""
    return Field(default_factory=factory, json_schema_extra={"default_text": text}, **constraints)


def absolute_path(path: str) -> str:
    """`path` with ``~`` expanded, absolute against the current directory, so that a resume from anywhere finds it.
    Raises `ValueError` for the home of an unknown user.

    >>> absolute_path("/data/rows.jsonl")
    '/data/rows.jsonl'
    """
    try:
        return str(Path(path).expanduser().absolute())
    except RuntimeError as error:
        raise ValueError(f"begins with a home folder that is not known ({error})") from error


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _no_empty_text(values: tuple[str, ...]) -> tuple[str, ...]:
    if any(not value for value in values):
        raise ValueError("holds an empty text")
    if len(set(values)) != len(values):
        raise ValueError("names one entry twice")
    return values


def _compiled(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from error
    return pattern


LocalPath = Annotated[str, Field(min_length=1, json_schema_extra={"allowed": "a path"}), AfterValidator(absolute_path)]
"""A file or folder of this machine, kept absolute."""

TextTuple = Annotated[tuple[str, ...], BeforeValidator(_as_tuple), AfterValidator(_no_empty_text)]
"""A YAML list of distinct, non-empty texts."""

RegexText = Annotated[str, Field(min_length=1), AfterValidator(_compiled)]
"""A Python regular expression."""

as_tuple = BeforeValidator(_as_tuple)
