"""Typed access to an untrusted Hugging Face config, with messages that name the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from tithe.arch.files import quote
from tithe.errors import ModelError

MAX_SIZE: Final = 2**31


class ConfigReader:
    """Reads single values. Every method raises `ModelError` naming the key and what is needed."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def get(self, key: str, default: Any) -> Any:
        """The value, or `default` when it is absent or null; a default of `None` means that it must be there."""
        value = self.config.get(key)
        if value is None:
            if default is None:
                raise ModelError(f"config: {key} is missing; a complete config.json is needed")
            return default
        return value

    def size(self, key: str, default: int | None = None, *, limit: int = MAX_SIZE) -> int:
        """A whole number from 1 to `limit`."""
        value = self.get(key, default)
        if type(value) is not int or not 1 <= value <= limit:
            raise ModelError(f"config: {key} is {quote(str(value))}; a whole number from 1 to {limit} is needed")
        return value

    def count(self, key: str, default: int = 0, *, limit: int = MAX_SIZE) -> int:
        """A whole number from 0 to `limit`."""
        value = self.get(key, default)
        if type(value) is not int or not 0 <= value <= limit:
            raise ModelError(f"config: {key} is {quote(str(value))}; a whole number from 0 to {limit} is needed")
        return value

    def optional_size(self, key: str) -> int | None:
        """As `size`, or `None` when the key is absent or null."""
        return None if self.config.get(key) is None else self.size(key)

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise ModelError(f"config: {key} is {quote(str(value))}; a finite number above 0 is needed")
        return float(value)

    def flag(self, key: str, *, default: bool = False) -> bool:
        """True or false."""
        value = self.get(key, default=default)
        if type(value) is not bool:
            raise ModelError(f"config: {key} is {quote(str(value))}; true or false is needed")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self.get(key, default)
        if not isinstance(value, str):
            raise ModelError(f"config: {key} is {quote(str(value))}; a text is needed")
        return value

    def texts(self, key: str) -> tuple[str, ...] | None:
        """A list of strings, or `None` when the key is absent or null."""
        value = self.config.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ModelError(f"config: {key} is {quote(str(value))}; a list of texts is needed")
        return tuple(value)

    def sub(self, key: str) -> ConfigReader:
        """The object under `key`; an empty one when it is absent or null."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise ModelError(f"config: {key} is {quote(str(value))}; an object is needed")
        return ConfigReader(value)
