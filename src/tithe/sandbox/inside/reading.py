"""What the tests' own text says before any of it is run: which statements are tests, and which built-in name is itself
the function under test. The program is not asked: whatever it defines, the answer is the same."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from typing import Final

from tithe.sandbox.inside.pytest_names import UnsupportedError

_RUNNERS: Final = ("unittest", "pytest")
_BY_TEXT: Final = frozenset({"eval", "exec", "compile", "globals", "locals", "vars", "__import__"})
"""What reaches a program's names without naming them."""
_EXITS: Final = ("exit", "quit", "sys.exit")


def as_script(tree: ast.Module) -> ast.Module:
    """The tests with what stands under `if __name__ == "__main__":`, less the start of a runner, which is here."""
    body: list[ast.stmt] = []
    for statement in tree.body:
        is_main = isinstance(statement, ast.If) and ast.unparse(statement.test).replace("'", "").replace(" ", "")
        if is_main in ("__name__==__main__", "__main__==__name__"):
            assert isinstance(statement, ast.If)
            body += statement.body
        else:
            body.append(statement)
    return _NoRunners(tree).visit(ast.Module(body, []))


class _NoRunners(ast.NodeTransformer):
    """Puts `pass` for a statement that calls `unittest.main` or `pytest.main`, under whatever name these were imported,
    and for an exit with what such a call gives. A `main` of the tests' own is no runner."""

    def __init__(self, tree: ast.Module) -> None:
        self._runners: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                known = [name for name in node.names if name.name in _RUNNERS]
                self._runners |= {f"{name.asname or name.name}.main" for name in known}
            elif isinstance(node, ast.ImportFrom) and node.module in _RUNNERS:
                self._runners |= {name.asname or name.name for name in node.names if name.name == "main"}
                self._runners |= {"main" for name in node.names if name.name == "*"}
        own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        self._runners -= own

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        """A statement that is one expression."""
        call = node.value
        if isinstance(call, ast.Call) and ast.unparse(call.func) in _EXITS and len(call.args) == 1:
            call = call.args[0]
        is_runner = isinstance(call, ast.Call) and ast.unparse(call.func) in self._runners
        return ast.copy_location(ast.Pass(), node) if is_runner else node


def holds_asserts(tree: ast.Module) -> bool:
    """Whether anything in the tests can fail by itself: an assert, a raise, unittest's and numpy's `assert…`."""
    return any(
        isinstance(node, ast.Assert | ast.Raise)
        or (isinstance(node, ast.Attribute) and node.attr.startswith(("assert", "fail", "raises")))
        or (isinstance(node, ast.Name) and node.id.startswith(("assert", "raises")))
        for node in ast.walk(tree)
    )


def tested_builtin(tree: ast.Module, module: str, entry: str | None, defined: set[str]) -> str | None:
    """The built-in name that the tests take from the program, because it is the very function they test; else None.

    With an entry point it is that one (unless a `check` is handed it). Without, the tests have to name nothing at all
    of a program's but built-in names, and to call one of these, and one alone, as `assert sum(10, 15) == 6` does: with
    plain values, on the side that is asked. Beside any other function of a program's a built-in name is a tool, and a
    program that could change it would judge itself. Raises `UnsupportedError` where the text leaves it open whether a
    name in `defined` (what the program defines) is meant.
    """
    own = set(_own_names(tree, module))
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)} - own
    built_in = {name for name in loaded if hasattr(builtins, name)}
    if entry:
        if not hasattr(builtins, entry) or entry in own:
            return None
        if "check" not in own:
            return entry
        if entry in loaded:
            raise UnsupportedError(f"{entry!r} in them may be Python's own or the program's")
        return None
    if loaded - built_in or _imports_program(tree, module):
        return None
    asked = {name for node in ast.walk(tree) if isinstance(node, ast.Assert) for name in _asked(node.test)} & built_in
    by_text = built_in & _BY_TEXT
    if len(asked) == 1 and not by_text:
        return asked.pop()
    if unclear := sorted((by_text or built_in) & defined):
        raise UnsupportedError(f"{unclear[0]!r} in them may be Python's own or the program's; give an entry_point")
    return None


def _own_names(tree: ast.Module, module: str) -> Iterator[str]:
    """What the tests define or import themselves, in whatever scope; what comes from the program is not theirs."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.name
        elif isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and node.module != module):
            yield from ((name.asname or name.name).partition(".")[0] for name in node.names)


def _imports_program(tree: ast.Module, module: str) -> bool:
    """Whether the tests take names of the program by an import: all that they leave to chance is then Python's own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and module in (name.name for name in node.names):
            return True
        if isinstance(node, ast.ImportFrom) and node.module == module and node.names[0].name != "*":
            return True
    return False


def _asked(test: ast.expr) -> Iterator[str]:
    """Names called with plain values where an assert asks for what comes out."""
    if isinstance(test, ast.BoolOp):
        for part in test.values:
            yield from _asked(part)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _asked(test.operand)
    elif isinstance(test, ast.Compare):
        yield from _asked(test.comparators[0] if _is_plain(test.left) else test.left)
    elif isinstance(test, ast.Call) and isinstance(test.func, ast.Name):
        given = [*test.args, *(keyword.value for keyword in test.keywords)]
        yield from [test.func.id] if all(map(_is_plain, given)) else []


def _is_plain(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True
