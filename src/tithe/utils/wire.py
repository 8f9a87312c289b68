"""Messages between processes: dataclasses as JSON, their arrays as bytes behind it. Nothing in a message is ever run.

    length of the JSON (8 bytes, little endian) · JSON (UTF-8) · arrays, each at a multiple of 8 bytes

A reader builds only the kinds it was given; anything else in a message is an error.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

import numpy as np

_NUMBERS = "biuf"
"""Kinds of numpy dtypes that may travel."""


class _Arrays:
    """The arrays of one message, each at a multiple of 8 bytes."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self._at = 0

    def add(self, value: np.ndarray) -> list[Any]:
        """Dtype, shape and place."""
        if value.dtype.kind not in _NUMBERS:
            raise TypeError(f"an array of {value.dtype} cannot travel between ranks")
        data = value.tobytes()
        begin, padding = self._at, -len(data) % 8
        self.pieces += [data, b"\0" * padding]
        self._at += len(data) + padding
        return [value.dtype.str, list(value.shape), begin]


def _read_array(content: Any, arrays: memoryview) -> np.ndarray:
    name, shape, begin = content
    dtype = np.dtype(name)
    if dtype.kind not in _NUMBERS:
        raise TypeError(f"an array of {dtype}")
    return np.frombuffer(arrays, dtype, math.prod(shape), begin).reshape(shape)


def kinds_in(kind: type) -> list[type]:
    """A dataclass or enum and those that its fields may hold, as annotated; each once."""
    found: list[type] = []
    waiting: list[Any] = [kind]
    while waiting:
        one = waiting.pop(0)
        waiting += get_args(one)
        if isinstance(one, type) and one not in found and (is_dataclass(one) or issubclass(one, enum.Enum)):
            found.append(one)
            waiting += get_type_hints(one).values() if is_dataclass(one) else []
    return found


class Wire:
    """`encode` and `decode` messages of named dataclasses and enums, which hold each other, arrays, lists, frozen sets,
    mappings with text as keys, numbers and text.

    Tuples come back as tuples, sequences of other kinds as lists, floats as the same bits.

    >>> from tithe.types import PolicyVersion
    >>> wire = Wire(PolicyVersion)
    >>> wire.decode(wire.encode([PolicyVersion(0, 3), (1.5, None)]))
    [PolicyVersion(lineage=0, serial=3), (1.5, None)]
    """

    def __init__(self, *kinds: type) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}
        if len(self._kinds) < len(kinds):
            raise ValueError("two kinds of messages have one name")

    def encode(self, message: Any) -> bytes:
        """Raises `TypeError` for what cannot travel."""
        arrays = _Arrays()
        head = json.dumps(self._plain(message, arrays)).encode()
        return b"".join([len(head).to_bytes(8, "little"), head, b"\0" * (-len(head) % 8), *arrays.pieces])

    def decode(self, data: bytes) -> Any:
        """Arrays are fresh and may be written to. Raises `ValueError` for bytes that are no message of these kinds."""
        whole = bytearray(data)
        length = int.from_bytes(whole[:8], "little")
        try:
            head = json.loads(whole[8 : 8 + length])
            return self._built(head, memoryview(whole)[8 + length + -length % 8 :])
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"no message of the kinds {', '.join(sorted(self._kinds))}: {error!r}") from error

    # ------------------------------------------------------------------ one value

    def _plain(self, value: Any, arrays: _Arrays) -> Any:
        if isinstance(value, enum.Enum):
            return {"enum": [self._name(value), value.value]}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, np.ndarray):
            return {"array": arrays.add(value)}
        if isinstance(value, Mapping):
            if not all(isinstance(key, str) for key in value):
                raise TypeError(f"a mapping that travels has text as keys: {list(value)[:3]}")
            return {"map": {key: self._plain(item, arrays) for key, item in value.items()}}
        if is_dataclass(value):
            content = {field.name: self._plain(getattr(value, field.name), arrays) for field in fields(value)}
            return {"kind": [self._name(value), content]}
        if isinstance(value, frozenset):
            return {"set": [self._plain(item, arrays) for item in sorted(value)]}
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            items = [self._plain(item, arrays) for item in value]
            return {"tuple": items} if isinstance(value, tuple) else items
        raise TypeError(f"{type(value).__name__} cannot travel between ranks")

    def _name(self, value: Any) -> str:
        name = type(value).__name__
        if self._kinds.get(name) is not type(value):
            raise TypeError(f"{name} is none of the kinds {', '.join(sorted(self._kinds))}")
        return name

    def _built(self, value: Any, arrays: memoryview) -> Any:
        if isinstance(value, list):
            return [self._built(item, arrays) for item in value]
        if not isinstance(value, dict):
            return value
        ((what, content),) = value.items()
        if what == "array":
            return _read_array(content, arrays)
        if what == "tuple":
            return tuple(self._built(item, arrays) for item in content)
        if what == "set":
            return frozenset(self._built(item, arrays) for item in content)
        if what == "map":
            return {key: self._built(item, arrays) for key, item in content.items()}
        name, inner = content
        if what == "enum":
            return self._kinds[name](inner)
        if what != "kind":
            raise KeyError(what)
        return self._kinds[name](**{key: self._built(item, arrays) for key, item in inner.items()})
