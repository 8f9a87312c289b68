"""One exception tree for the whole house.

    TitheError                     anything Tithe raises on purpose
    ├── UserError                  bad input: the command line prints it and exits with 2
    │   ├── ConfigError            a configuration key is wrong; `.key` names it
    │   ├── DataError              a dataset row or file is wrong; `.where` names it
    │   ├── ModelError             a checkpoint cannot be used; says which tensor and why
    │   ├── AdapterError           an adapter cannot be loaded; says which names do not match
    │   └── ResumeError            a run directory cannot be resumed; says what is missing
    └── RunError                   the run itself failed: exit code 1
        ├── PublishRefused         the probe did not match; the old version keeps serving
        ├── NonFiniteError         three non-finite steps in a row
        ├── PoolError              a pool contract was broken (lease, version, state)
        ├── EngineError            the engine could not serve a request
        ├── RanksLost              another rank has ended or is silent
        └── RolloutFailure         one rollout failed; data, never the end of a run

`boundary()` turns any exception inside a rollout, a reward or a tool into a `Failure` with exactly one cause.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class TitheError(Exception):
    """Base of everything Tithe raises on purpose."""


class UserError(TitheError):
    """Bad input; the message names the key or file and the remedy. Exit code 2."""


class ConfigError(UserError):
    """A configuration value is wrong. `key` is its dotted name, e.g. ``rl.clip_range``."""

    def __init__(self, message: str, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


class DataError(UserError):
    """A dataset cannot be used. `where` is ``path:line`` when known."""

    def __init__(self, message: str, where: str | None = None) -> None:
        super().__init__(f"{where}: {message}" if where else message)
        self.where = where


class ModelError(UserError):
    """A checkpoint cannot be used as a base."""


class AdapterError(UserError):
    """An adapter cannot be loaded or exported."""


class ResumeError(UserError):
    """A run directory cannot be resumed."""


class RunError(TitheError):
    """The run failed. Exit code 1."""


class PublishRefused(RunError):
    """An engine's answer to the probe does not match what the trainer proved; nothing was switched."""


class NonFiniteError(RunError):
    """Three non-finite losses or gradients in a row."""


class PoolError(RunError):
    """A contract of the experience pool was broken."""


class EngineError(RunError):
    """The rollout engine could not serve a request."""


class RanksLost(RunError):
    """Another rank of this run has ended, or has been silent for too long."""


class RolloutFailure(RunError):
    """Raised inside a rollout to end it with a given cause."""

    def __init__(self, cause: FailureCause, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class FailureCause(enum.StrEnum):
    """Why one rollout ended without a usable result."""

    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    ENGINE = "engine"
    REWARD = "reward"
    ENVIRONMENT = "environment"


@dataclass(frozen=True)
class Failure:
    """One failed rollout, as data.

    >>> Failure(FailureCause.REWARD, "ZeroDivisionError: division by zero")
    Failure(cause=<FailureCause.REWARD: 'reward'>, message='ZeroDivisionError: division by zero')
    """

    cause: FailureCause
    message: str


class FailureSlot:
    """Filled by `boundary` when its block fails; `None` otherwise."""

    def __init__(self) -> None:
        self.failure: Failure | None = None


@contextmanager
def boundary(cause: FailureCause) -> Iterator[FailureSlot]:
    """Run a block of untrusted work; an exception becomes ``slot.failure`` with one cause.

    This is the only place of the house, metric sinks aside, that catches `Exception`. Cancellation and interpreter
    exits pass through, because they belong to the run and not to the rollout; so does a `UserError` (a reward function
    that returns the wrong type, say), because only the user can mend it.
    """
    slot = FailureSlot()
    try:
        yield slot
    except RolloutFailure as error:
        slot.failure = Failure(error.cause, str(error))
    except TimeoutError as error:
        slot.failure = Failure(FailureCause.TIMEOUT, str(error) or "timed out")
    except (asyncio.CancelledError, UserError):
        raise
    except Exception as error:
        slot.failure = Failure(cause, f"{type(error).__name__}: {error}")
