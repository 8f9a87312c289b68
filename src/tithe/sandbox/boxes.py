"""One program as the host sees it: pipes to feed and read, bounded, and a report at the end."""

from __future__ import annotations

import json
import os
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tithe.sandbox.limits import Limits

GRACE_S: Final = 10.0
"""How long after its own limit a supervisor may take to report before the harness is taken to have failed."""

RESULT_BYTES: Final = 8 << 20
"""Longest results of functions or asserts."""

_PIECE: Final = 65536


class HarnessError(Exception):
    """The sandbox failed, not the program."""


@dataclass(eq=False)
class Reader:
    """What came out of one pipe, up to `bound` bytes; `is_over` when there was more."""

    bound: int
    data: bytearray = field(default_factory=bytearray)
    is_over: bool = False

    def take(self, piece: bytes) -> None:
        """Keep a piece as far as it fits."""
        room = self.bound - len(self.data)
        self.data += piece[:room]
        self.is_over = self.is_over or len(piece) > room

    @property
    def text(self) -> str:
        """As text; bytes that are no UTF-8 become U+FFFD."""
        return self.data.decode(errors="replace")


class Box:
    """A program that runs. `order` sends a zygote its limits and descriptors; everything here is the other ends.

    `report` is the supervisor's: None until the program has ended. Close it in the end; that ends the program too.
    """

    def __init__(
        self,
        order: Callable[[Mapping[str, Any], Sequence[int]], None],
        limits: Limits,
        uid: int,
        job: Mapping[str, Any],
        *,
        stdin: str = "",
        channel: int | None = None,
        has_results: bool = False,
    ) -> None:
        self.report: dict[str, Any] | None = None
        self.stdout, self.stderr = Reader(limits.output_kib << 10), Reader(limits.output_kib << 10)
        self.results = Reader(RESULT_BYTES)
        self.gone_at_s = time.monotonic() + limits.wall_s + GRACE_S
        self._own: list[int] = []
        self.readers: dict[int, Reader] = {}
        self.writers: dict[int, memoryview] = {}
        theirs: list[int] = []
        self.connection, reporting = socket.socketpair()
        try:
            theirs.append(os.dup(reporting.fileno()))
            theirs.append(self._feed(stdin.encode("utf-8", "surrogateescape")))
            theirs += [self._collect(self.stdout), self._collect(self.stderr)]
            theirs.append(self._feed(json.dumps(job).encode()))
            if channel is not None:
                theirs.append(os.dup(channel))
            if has_results:
                theirs.append(self._collect(self.results))
            order({"limits": limits.__dict__, "uid": uid}, theirs)
        except BaseException:
            self.close()
            raise
        finally:
            reporting.close()
            for number in theirs:
                os.close(number)

    def _feed(self, data: bytes) -> int:
        theirs, ours = os.pipe()
        os.set_blocking(ours, False)
        self._own.append(ours)
        self.writers[ours] = memoryview(data)
        return theirs

    def _collect(self, reader: Reader) -> int:
        ours, theirs = os.pipe()
        os.set_blocking(ours, False)
        self._own.append(ours)
        self.readers[ours] = reader
        return theirs

    def drop(self, number: int) -> None:
        """Close one of our ends."""
        self.readers.pop(number, None)
        self.writers.pop(number, None)
        self._own.remove(number)
        os.close(number)

    def stop(self) -> None:
        """Have the supervisor kill the whole tree; it reports as after any other end."""
        try:
            self.connection.shutdown(socket.SHUT_WR)
        except OSError:  # it has reported and is gone
            return

    @property
    def is_over(self) -> bool:
        """Whether it has ended and everything it wrote has been read."""
        return self.report is not None and not self.readers

    def close(self) -> None:
        """Close all descriptors: a supervisor that is still there kills its program."""
        self.connection.close()
        for number in self._own:
            os.close(number)
        self._own.clear()
        self.readers.clear()
        self.writers.clear()


def finish(boxes: Sequence[Box]) -> None:
    """Feed and read until all have ended; the end of the first ends the others. An output over its bound stops its
    program.

    Raises `HarnessError` when a supervisor does not report. Blocks, in `poll`, and never longer than the limits plus
    `GRACE_S`.
    """
    with selectors.DefaultSelector() as selector:
        for box in boxes:
            selector.register(box.connection, selectors.EVENT_READ, box)
            for number in box.readers:
                selector.register(number, selectors.EVENT_READ, box)
            for number in box.writers:
                selector.register(number, selectors.EVENT_WRITE, box)
        while not all(box.is_over for box in boxes):
            left = min(box.gone_at_s for box in boxes if not box.is_over) - time.monotonic()
            if left <= 0:
                raise HarnessError("a program's supervisor did not answer")
            for key, _ in selector.select(left):
                _advance(selector, key)
                if boxes[0].report is not None:
                    for other in boxes[1:]:
                        other.stop()


def _advance(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    box: Box = key.data
    if key.fileobj is box.connection:
        selector.unregister(box.connection)
        box.report = _report(box.connection)
        return
    number = key.fd
    done = _write(number, box.writers) if number in box.writers else _read(number, box)
    if done:
        selector.unregister(number)
        box.drop(number)


def _report(connection: socket.socket) -> dict[str, Any]:
    data = connection.recv(_PIECE)
    if not data:
        raise HarnessError("a program's supervisor ended without a report")
    report = json.loads(data)
    if report["end"] == "setup":
        raise HarnessError(f"a program could not be confined: {report['detail']}")
    return report


def _write(number: int, writers: dict[int, memoryview]) -> bool:
    data = writers[number]
    try:
        written = os.write(number, data[:_PIECE]) if data else 0
    except BlockingIOError:
        return False
    except BrokenPipeError:  # a program need not read its input
        return True
    writers[number] = data[written:]
    return not writers[number]


def _read(number: int, box: Box) -> bool:
    try:
        piece = os.read(number, _PIECE)
    except BlockingIOError:
        return False
    reader = box.readers[number]
    reader.take(piece)
    if reader.is_over:
        box.stop()
    return not piece
