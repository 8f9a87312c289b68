"""The program's own process: reads its job, runs it, and ends. Everything here is in the program's hands once its code
runs; nothing here decides a verdict."""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

from tithe.sandbox.inside import remote, wire
from tithe.sandbox.inside.attempt import Attempt

JOB: Final = 3
"""Descriptor that the job is read from."""

CHANNEL: Final = 4
"""Descriptor of results, or of the connection to the other process."""

RESULTS: Final = 5
"""Descriptor that a checker writes its results to."""

MODULE: Final = "solution"


def main() -> NoReturn:
    """Run the job: `script` with standard input and output, `calls` of its functions, `serve` or `check` asserts."""
    job = _read_job()
    sys.argv[:] = [f"{MODULE}.py"]
    attempt = Attempt(_BODIES[job["kind"]], job)
    _finish(attempt.value if attempt.error is None else _exit_code(attempt.error))


def _read_job() -> dict[str, Any]:
    with os.fdopen(JOB, "rb") as file:
        return json.loads(file.read())


def _exit_code(error: BaseException) -> int:
    """What the interpreter does with what a script raised."""
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    if isinstance(error.code, int):
        return error.code
    if error.code is not None:
        print(error.code, file=sys.stderr)
    return int(error.code is not None)


def _finish(code: int) -> NoReturn:
    """What an interpreter does at its end, as far as programs notice."""
    try:
        wait = getattr(threading, "_shutdown", None)
        if wait is not None:
            wait()
        getattr(atexit, "_run_exitfuncs")()  # noqa: B009  the public way is to return from main
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF)


def load(code: str, name: str) -> types.ModuleType:
    """The program as a module called `name`; raises what its top level raises."""
    module = types.ModuleType(name)
    module.__dict__["__builtins__"] = __builtins__
    sys.modules[name] = module
    exec(compile(code, f"{MODULE}.py", "exec"), module.__dict__)  # noqa: S102  this is the place for it
    return module


def _script(job: Mapping[str, Any]) -> int:
    load(job["code"], "__main__")
    return 0


def _calls(job: Mapping[str, Any]) -> int:
    """Call each function and write each result as one line; the right ones are not known here."""
    with os.fdopen(CHANNEL, "w", encoding="ascii") as results:
        module = load(job["code"], MODULE)
        for call in job["calls"]:
            print(json.dumps(_one_call(module, call)), file=results, flush=True)
    return 0


def _one_call(module: types.ModuleType, call: Mapping[str, Any]) -> dict[str, Any]:
    def value() -> Any:
        return wire.encode(find_function(module, call["name"])(*call["args"], **call["kwargs"]))

    attempt = Attempt(value)
    return {"value": attempt.value} if attempt.error is None else {"error": attempt.text()}


def find_function(module: types.ModuleType, name: str) -> Callable[..., Any]:
    """`name` in the module, `Class.method` on a new instance, or a method of a class called Solution."""
    first, _, rest = name.partition(".")
    owner = getattr(module, first, None)
    if owner is None and not rest and hasattr(module, "Solution"):
        owner, rest = module.Solution, first
    if owner is None:
        raise NameError(f"the program defines no {name!r}")
    if not rest:
        return owner
    return getattr(owner() if isinstance(owner, type) else owner, rest)


def _serve(job: Mapping[str, Any]) -> int:
    remote.serve(load(job["code"], MODULE), CHANNEL)
    return 0


def _check(job: Mapping[str, Any]) -> int:
    from tithe.sandbox.inside import checker  # noqa: PLC0415  imports this module

    checker.check(job, CHANNEL, RESULTS)
    return 0


_BODIES: Final[dict[str, Callable[[Mapping[str, Any]], int]]] = {
    "script": _script,
    "calls": _calls,
    "serve": _serve,
    "check": _check,
}
