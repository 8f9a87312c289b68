"""The six protocols. Everything else is concrete and final."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from tithe.types.carriers import Completion, GenerateRequest, PolicyVersion, PromptItem, Rollout

GenerateFn = Callable[[GenerateRequest], Awaitable[Completion]]
"""Draw one completion. Rollout code depends on this callable and never on an engine. Raises `EngineError`."""

RewardFn = Callable[..., "float | Mapping[str, float] | None | Awaitable[float | Mapping[str, float] | None]"]
"""`reward(item: PromptItem, text: str, **info)` → a number, named parts, or None to abstain. Sync or async.
`info` carries `finish` (str), `token_ids` (list of int) and is passed only when the function accepts it."""


class Env(Protocol):
    """Turns one prompt into one rollout."""

    async def rollout(self, item: PromptItem, request: GenerateRequest, generate: GenerateFn) -> Rollout:
        """Play one episode; `request` carries the prompt's ids, sampling parameters and the adapter's name.

        Never raises for what happens inside the episode: that becomes `Rollout.failure`.
        """
        ...


class RolloutEngine(Protocol):
    """Token in, token out. Reached only by messages that can be serialised."""

    def submit(self, request: GenerateRequest) -> Future[Completion]:
        """Queue a request; never blocks. The future fails with `EngineError`."""
        ...

    def load_adapter(self, directory: Path) -> str:
        """Load and prove a published adapter, then serve it; returns its name. Blocks until done.

        Raises `PublishRefused` (probe) or `AdapterError` (names, files); the served version is then unchanged.
        """
        ...

    def drop_adapter(self, name: str) -> None:
        """Forget a version once its last request has ended."""
        ...

    def cancel(self, group: int) -> None:
        """End all requests of a group with FinishReason.CANCELLED."""
        ...

    def drain(self, timeout_s: float) -> bool:
        """Wait until no request is running; False on timeout."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Counters and gauges: tokens, running, waiting, kv pages, seconds."""
        ...


class WeightChannel(Protocol):
    """Moves named tensors with a version from the trainer to the engines."""

    def publish(self, version: PolicyVersion, tensors: Mapping[str, Any], manifest: Mapping[str, Any]) -> Path:
        """Make a complete, checksummed, immutable version visible; returns where it lies. Atomic."""
        ...

    def list_versions(self) -> Sequence[Path]:
        """Complete versions, oldest first; half-written ones are never listed."""
        ...


class MetricSink(Protocol):
    """Receives one row of named numbers per event."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record; must not raise into the loop."""
        ...

    def close(self) -> None:
        """Flush and release."""
        ...
