"""The line protocol between a benchmark and the sides it measures. Standard library only: it runs in both environments.

A side prints one JSON object when it is ready, then reads one JSON request a line and answers each with one JSON
object. Between an answer and the next request it does nothing.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any


class Channel:
    """A side's end of the protocol.

    Takes standard output for the protocol and sends whatever libraries print there to standard error.
    """

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def send(self, **values: Any) -> None:
        """Send one object: the facts of a side that is ready, or an answer."""
        self._out.write(json.dumps(values) + "\n")

    def requests(self) -> Iterator[dict[str, Any]]:
        """Requests in order; ends when the benchmark closes the pipe. Blocks while there is none."""
        for line in sys.stdin:
            yield json.loads(line)
