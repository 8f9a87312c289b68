"""Waking whoever waits for a change."""

from __future__ import annotations

import simpy


class Signal:
    """A condition without memory: `wait` is for the next `fire`. A process looks at the state, then waits at once;
    nothing can happen between the two, because simulated processes take turns.
    """

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._event = env.event()

    def wait(self) -> simpy.Event:
        """An event to yield."""
        return self._event

    def fire(self) -> None:
        """Wake all that wait now."""
        event, self._event = self._event, self._env.event()
        event.succeed()
