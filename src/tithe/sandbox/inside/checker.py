"""Runs asserts against a program that lives in another process, and writes which held to a pipe that only this process
has. The tests' text never reaches the program."""

from __future__ import annotations

import ast
import builtins
import json
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, Final

from tithe.sandbox.inside import pytest_names
from tithe.sandbox.inside.attempt import Attempt
from tithe.sandbox.inside.pytest_names import UnsupportedError
from tithe.sandbox.inside.reading import as_script, holds_asserts, tested_builtin
from tithe.sandbox.inside.remote import Peer
from tithe.sandbox.inside.stand_ins import ProgramGone, ask, stand_in
from tithe.sandbox.inside.wire import NotPlainError

_NO_TEST: Final = (
    *(ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign, ast.AugAssign),
    ast.Pass,  # where the start of a runner stood
)


_UNUSABLE: Final = (UnsupportedError, NotPlainError)
"""What says that the tests cannot be run here, whatever the program is."""


class _Report:
    """One line a test, then how many there were."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self.count = 0

    def test(self, name: str, attempt: Attempt) -> None:
        """What became of a test; what makes the tests themselves unusable goes on up."""
        if isinstance(attempt.error, _UNUSABLE):
            raise attempt.error
        self.count += 1
        detail = "" if attempt.error is None else attempt.text()
        self.line(test=name, passed=attempt.error is None, detail=detail)

    def line(self, **fields: Any) -> None:
        """One object."""
        print(json.dumps(fields), file=self._file, flush=True)


def check(job: Mapping[str, Any], channel: int, results: int) -> None:
    """Run the job's `tests` over the connection `channel`; what happened goes to `results`."""
    with open(results, "w", encoding="ascii") as file:
        report = _Report(file)
        parsed = Attempt(lambda: as_script(ast.parse(job["tests"], "tests.py")))
        attempt = parsed if parsed.error is not None else Attempt(_check, job, parsed.value, channel, report)
        if parsed.error is not None or isinstance(attempt.error, _UNUSABLE):
            report.line(unusable=attempt.text())
            return
        if attempt.error is not None:  # a program that is gone, or does not speak as it should
            report.test("program", attempt)
        report.line(done=report.count)


def _check(job: Mapping[str, Any], tree: ast.Module, channel: int, report: _Report) -> None:
    peer = Peer(channel, {"call": lambda _, of, args, kwargs: of(*args, **kwargs)}, stand_in, callable)
    if not holds_asserts(tree):
        raise UnsupportedError("they hold no assert")
    named = _public(ask(peer, "names"))
    entry = job.get("entry_point")
    tested = tested_builtin(tree, job["module"], entry, set(named))
    if tested is not None and tested not in named:  # else Python's own would be judged in its place
        raise ProgramGone(f"the program defines no {tested!r}")
    # No other built-in name: the program may try to put its own `all` under the tests.
    defined = {name: value for name, value in named.items() if name == tested or not hasattr(builtins, name)}
    _offer_modules(peer, job["module"], defined)
    # A test that was told its function takes nothing else from the program.
    offered = {name: value for name, value in defined.items() if not entry or name == entry}
    scope = {"__name__": "tests", **offered}
    for number, statement in enumerate(tree.body, start=1):
        _run_statement(statement, number, scope, report)
    if entry and isinstance(function := scope.get("check"), types.FunctionType):
        if entry not in named:
            raise ProgramGone(f"the program defines no {entry!r}")
        report.test("check", Attempt(function, named[entry]))
    for name, function in list(scope.items()):
        for case, call in _functions(name, function, tree):
            report.test(case, Attempt(call))
    ask(peer, "names")  # a program that is gone by now has not passed, whatever the tests made of it


def _public(names: Any) -> dict[str, Any]:
    """A program's own names: it answers for itself, and may try to put its own `__builtins__` under the tests."""
    if not isinstance(names, dict):
        raise ProgramGone("the program's process answered with no names")
    return {
        name: value
        for name, value in names.items()
        if isinstance(name, str) and name.isidentifier() and not name.startswith("_")
    }


def _run_statement(statement: ast.stmt, number: int, scope: dict[str, Any], report: _Report) -> None:
    code = compile(ast.Module([statement], []), "tests.py", "exec", optimize=0)
    attempt = Attempt(exec, code, scope)
    if isinstance(statement, ast.Import | ast.ImportFrom) and isinstance(attempt.error, ModuleNotFoundError):
        raise UnsupportedError(f"the tests import what is not here: {attempt.error}")
    if attempt.error is not None or not isinstance(statement, _NO_TEST):
        report.test(f"statement {number}", attempt)


def _offer_modules(peer: Peer, name: str, defined: Mapping[str, Any]) -> None:
    """Make the program importable under its name, and the few names of pytest."""
    program = types.ModuleType(name)
    program.__dict__.update(defined, __all__=sorted(defined))
    program.__dict__["__getattr__"] = lambda attribute: ask(peer, "global", name=attribute)
    sys.modules[name] = program
    sys.modules["pytest"] = pytest_names.module()


def _functions(name: str, value: Any, tree: ast.Module) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The calls that pytest would collect from one global of the tests. A function with parameters that nothing gives
    is a helper where the tests call it themselves; else it wants fixtures, which are not here."""
    if isinstance(value, types.FunctionType) and name.startswith("test"):
        rows = getattr(value, "rows", [{}])
        if missing := _not_given(value, rows):
            if any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(tree)):
                return
            raise UnsupportedError(f"{name} wants {missing[0]!r}, and no fixtures are here")
        for number, row in enumerate(rows):
            yield f"{name}[{number}]" if row else name, lambda row=row: value(**row)
    elif (unittest := sys.modules.get("unittest")) and isinstance(value, type) and issubclass(value, unittest.TestCase):
        for method in unittest.defaultTestLoader.getTestCaseNames(value):
            yield f"{name}.{method}", lambda method=method: value(method).debug()
    elif isinstance(value, type) and name.startswith("Test"):
        for method in [m for m in vars(value) if m.startswith("test")]:
            function = vars(value)[method]
            rows = getattr(function, "rows", [{}])
            if missing := _not_given(function, rows)[1:]:
                raise UnsupportedError(f"{name}.{method} wants {missing[0]!r}, and no fixtures are here")
            for row in rows:
                yield f"{name}.{method}", lambda method=method, row=row: getattr(value(), method)(**row)


def _not_given(function: Any, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Parameters without a default that no row of `parametrize` gives."""
    if not isinstance(function, types.FunctionType):
        return []
    code, n_defaults = function.__code__, len(function.__defaults__ or ())
    by_keyword = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    needed = [
        *code.co_varnames[: code.co_argcount - n_defaults],
        *(name for name in by_keyword if name not in (function.__kwdefaults__ or {})),
    ]
    return [name for name in needed if not rows or name not in rows[0]]
