"""The few names of pytest that function tests use: `raises`, `approx`, `mark.parametrize`. Any other is an error that
makes the harness abstain, because a test that was not run says nothing."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn


class UnsupportedError(BaseException):
    """The tests ask for something that this sandbox does not offer."""


class raises:  # noqa: N801  pytest's own name
    """As `pytest.raises`, as a context manager or with a callable."""

    def __new__(cls, expected: Any, *args: Any, match: str | None = None, **kwargs: Any) -> Any:
        """With a callable, call it at once."""
        self = super().__new__(cls)
        self.expected, self.match, self.value = expected, match, None
        if args:
            with self:
                args[0](*args[1:], **kwargs)
        return self

    expected: Any
    match: str | None
    value: BaseException | None

    def __enter__(self) -> raises:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if error is None:
            raise AssertionError(f"did not raise {self.expected}")
        if not isinstance(error, self.expected):
            return False
        if self.match is not None and re.search(self.match, str(error)) is None:
            raise AssertionError(f"{self.match!r} is not in {str(error)!r:.100}")
        self.value = error
        return True


class approx:  # noqa: N801, PLW1641  pytest's own name, and it has no hash there either
    """As `pytest.approx`, for numbers, and lists, tuples and mappings of them."""

    def __init__(self, expected: Any, rel: float = 1e-6, abs: float = 1e-12) -> None:  # noqa: A002  pytest's own name
        self._expected, self._rel, self._abs = expected, rel, abs

    def __eq__(self, other: object) -> bool:
        return self._same(self._expected, other)

    def __repr__(self) -> str:
        return f"approx({self._expected!r})"

    def _same(self, wanted: Any, got: Any) -> bool:
        if isinstance(wanted, Mapping):
            return (
                isinstance(got, dict)
                and wanted.keys() == got.keys()
                and all(self._same(wanted[k], got[k]) for k in got)
            )
        if isinstance(wanted, list | tuple):
            alike = isinstance(got, list | tuple) and len(got) == len(wanted)
            return alike and all(map(self._same, wanted, got))
        if isinstance(wanted, int | float) and isinstance(got, int | float):
            return math.isclose(wanted, got, rel_tol=self._rel, abs_tol=self._abs)
        return bool(wanted == got)


class _Mark:
    """`pytest.mark`."""

    def parametrize(self, names: str | Iterable[str], values: Iterable[Any], **_: Any) -> Callable[..., Any]:
        """Remember the rows at the function; several decorators multiply."""
        listed = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        rows = [dict(zip(listed, [value] if len(listed) == 1 else value, strict=True)) for value in values]

        def decorate(function: Any) -> Any:
            function.rows = [{**old, **new} for old in getattr(function, "rows", [{}]) for new in rows]
            return function

        return decorate

    def __getattr__(self, name: str) -> NoReturn:
        raise UnsupportedError(f"pytest.mark.{name}")


def module() -> types.ModuleType:
    """What `import pytest` gives in a test."""
    made = types.ModuleType("pytest")

    def unknown(name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedError(f"pytest.{name}")

    def main(*_: Any, **__: Any) -> NoReturn:
        # May be imported by name: its plain calls are left out before the tests run.
        raise UnsupportedError("pytest.main where its result is used")

    made.__dict__.update(raises=raises, approx=approx, mark=_Mark(), main=main, __getattr__=unknown)
    return made
