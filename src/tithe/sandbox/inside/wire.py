"""Plain values as JSON, exactly: what crosses between a program and whoever judges it. Decoding makes plain values of
built-in types and nothing else, whatever was sent."""

from __future__ import annotations

import importlib
import json
import math
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

MAX_MESSAGE_BYTES: Final = 8 << 20
MAX_DEPTH: Final = 100
_NUMBERS: Final = {"Fraction": "fractions", "Decimal": "decimal"}
"""Classes of modules that are imported when they are met, because most programs do without."""

_BIG: Final = 1 << 62
_LENGTH: Final = struct.Struct("!I")

Reference = Callable[[Any], dict[str, Any]]
"""What stands for a value that is not plain."""


class NotPlainError(TypeError):
    """A value that is none of None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, Fraction,
    Decimal; or one nested too deeply."""


def encode(value: Any, reference: Reference | None = None, depth: int = 0) -> Any:
    """A value for JSON. Subclasses become their base; what is not plain is asked of `reference`, or refused."""
    if depth > MAX_DEPTH:
        raise NotPlainError(f"a value nested more than {MAX_DEPTH} deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__int__(value)
        return number if -_BIG < number < _BIG else {"int": hex(number)}
    if isinstance(value, float):
        number = float.__float__(value)
        return number if math.isfinite(number) else {"float": repr(number)}
    return _encode_rest(value, reference, depth + 1)


def _encode_rest(value: Any, reference: Reference | None, depth: int) -> Any:
    if isinstance(value, list):
        return [encode(item, reference, depth) for item in list.__iter__(value)]
    kind: Any
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item, reference, depth) for item in kind.__iter__(value)]}
    if isinstance(value, dict):
        pairs = dict.items(value)
        return {"dict": [[encode(key, reference, depth), encode(item, reference, depth)] for key, item in pairs]}
    if isinstance(value, bytes | bytearray):
        return {type(value).__name__ if type(value) is bytearray else "bytes": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [encode(value.real), encode(value.imag)]}
    for name, module in _NUMBERS.items():
        if module in sys.modules and isinstance(value, getattr(sys.modules[module], name)):
            return {name: str(value)}
    if reference is not None:
        return reference(value)
    raise NotPlainError(f"{type(value).__name__} is no plain value")


def decode(value: Any, resolve: Callable[[Mapping[str, Any]], Any] | None = None) -> Any:
    """The inverse of `encode`; `resolve` gives what a reference stands for. Raises `ValueError` for anything else."""
    if isinstance(value, list):
        return [decode(item, resolve) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((kind, body),) = value.items()
        if kind in _DECODERS:
            try:
                return _DECODERS[kind](body, resolve)
            except (TypeError, ArithmeticError) as error:
                raise ValueError(f"no {kind}: {error}") from error
    if resolve is not None:
        return resolve(value)
    raise ValueError("an unknown kind of value")


def _items(body: Any, resolve: Callable[[Mapping[str, Any]], Any] | None) -> Any:
    return [decode(item, resolve) for item in body]


def _number(name: str, body: Any) -> Any:
    return getattr(importlib.import_module(_NUMBERS[name]), name)(body)


_DECODERS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "int": lambda body, _: int(body, 16),
    "float": lambda body, _: float(body),
    "tuple": lambda body, resolve: tuple(_items(body, resolve)),
    "set": lambda body, resolve: set(_items(body, resolve)),
    "frozenset": lambda body, resolve: frozenset(_items(body, resolve)),
    "dict": lambda body, resolve: {decode(key, resolve): decode(item, resolve) for key, item in body},
    "bytes": lambda body, _: bytes.fromhex(body),
    "bytearray": lambda body, _: bytearray.fromhex(body),
    "complex": lambda body, _: complex(decode(body[0]), decode(body[1])),
    "Fraction": lambda body, _: _number("Fraction", body),
    "Decimal": lambda body, _: _number("Decimal", body),
}


def send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """One message. Raises `NotPlainError` for one that is too long, `OSError` when nobody listens."""
    body = json.dumps(message).encode("ascii")
    if len(body) > MAX_MESSAGE_BYTES:
        raise NotPlainError(f"a value of {len(body)} bytes")
    connection.sendall(_LENGTH.pack(len(body)) + body)


def receive(connection: socket.socket) -> dict[str, Any]:
    """One message. Raises `EOFError` when the other side is gone, `ValueError` when it sends no message."""
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    if length > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message claims {length} bytes")
    message = json.loads(_read(connection, length))
    if not isinstance(message, dict):
        raise ValueError("a message is no object")  # noqa: TRY004  the sender's fault, not the caller's
    return message


def _read(connection: socket.socket, n_bytes: int) -> bytes:
    pieces = bytearray()
    while len(pieces) < n_bytes:
        piece = connection.recv(min(n_bytes - len(pieces), 1 << 20))
        if not piece:
            raise EOFError("the connection was closed")
        pieces += piece
    return bytes(pieces)
