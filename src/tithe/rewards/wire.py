"""Messages between the main process and a reward worker: a length of four bytes (big-endian), then JSON."""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any, Final

MAX_MESSAGE_BYTES: Final = 256 * 2**20

_LENGTH: Final = struct.Struct("!I")


def pack(message: dict[str, Any]) -> bytes:
    """The bytes of one message. Raises `TypeError` or `ValueError` for values that JSON does not have."""
    body = json.dumps(message, allow_nan=False).encode()
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(body)} bytes is longer than {MAX_MESSAGE_BYTES}")
    return _LENGTH.pack(len(body)) + body


def send(connection: socket.socket, data: bytes, deadline_s: float | None = None) -> None:
    """Send packed bytes. Raises `TimeoutError` at `deadline_s` (monotonic clock), `OSError` when nobody listens."""
    connection.settimeout(_remaining(deadline_s))
    connection.sendall(data)


def receive(connection: socket.socket, deadline_s: float | None = None) -> dict[str, Any]:
    """Read one message. Raises `TimeoutError` at `deadline_s`, `EOFError` when the other side is gone."""
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size, deadline_s))
    if length > MAX_MESSAGE_BYTES:
        raise EOFError(f"a message claims {length} bytes")
    return json.loads(_read(connection, length, deadline_s))


def _read(connection: socket.socket, n_bytes: int, deadline_s: float | None) -> bytes:
    pieces: list[bytes] = []
    while n_bytes:
        connection.settimeout(_remaining(deadline_s))
        piece = connection.recv(min(n_bytes, 1 << 20))
        if not piece:
            raise EOFError("the connection was closed")
        pieces.append(piece)
        n_bytes -= len(piece)
    return b"".join(pieces)


def _remaining(deadline_s: float | None) -> float | None:
    if deadline_s is None:
        return None
    remaining_s = deadline_s - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError("timed out")
    return remaining_s
