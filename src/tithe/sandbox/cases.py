"""Tests as data: reading them from a row, and comparing what a program answered with what is right.

Policies (P). Output: lines are compared without trailing white space, trailing empty lines and carriage returns are
ignored, everything else counts. Results: a tuple equals a list; `True` is not 1; an int equals a float of the same
value; floats are equal within 1e-9 of their size; a mapping's keys are compared as JSON writes them (1 is "1"). A set,
a NaN or an object of the program's own equals nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tithe.errors import DataError


@dataclass(frozen=True)
class StdioTest:
    """What a program reads and what it has to print."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class FunctionTest:
    """A function's name (`f`, or `Class.method`), its arguments and its right result, all of them JSON values."""

    name: str
    args: Sequence[Any]
    expected: Any
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AssertTests:
    """Python with asserts, `test_` functions, unittest classes, or a `check(candidate)` for `entry_point`. The program
    is importable as `module`."""

    source: str
    entry_point: str | None = None
    module: str = "solution"


Tests = Sequence[StdioTest] | Sequence[FunctionTest] | AssertTests


def parse_tests(value: Any) -> Tests:
    """Tests from a row's answer. Accepted, as JSON text or as values:

    - ``[{"stdin": …, "stdout": …}, …]`` (or `input` and `output`);
    - ``[{"name": "add", "args": [2, 3], "expected": 5}, …]``, or a `function` for all:
      ``{"function": "add", "tests": [{"args": …, "expected": …}]}``;
    - ``{"inputs": […], "outputs": […]}``, with `fn_name` for functions and without it for standard input;
    - ``{"asserts": "…", "entry_point": "add"}``, a list of assert lines, or plain Python.

    Raises `DataError` that says what is wrong.
    """
    if isinstance(value, str):
        text = value.strip()
        if text[:1] not in ("[", "{"):
            return _asserts(text, None)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return _asserts(text, None)
    if isinstance(value, Mapping):
        return _from_mapping(value)
    if isinstance(value, Sequence) and value:
        if all(isinstance(item, str) for item in value):
            return _asserts("\n".join(value), None)
        if all(isinstance(item, Mapping) for item in value):
            return _from_rows(value, None)
    raise DataError(f"no tests: {value!r:.80}; a list of tests, or Python asserts, is needed")


def _asserts(source: Any, entry_point: Any) -> AssertTests:
    if not isinstance(source, str) or not source.strip():
        raise DataError("no tests: the asserts are empty")
    return AssertTests(source, entry_point if isinstance(entry_point, str) else None)


def _from_mapping(value: Mapping[str, Any]) -> Tests:
    for key in ("asserts", "test"):
        if key in value:
            source = value[key]
            listed = "\n".join(map(str, source)) if isinstance(source, list) else source
            return _asserts(listed, value.get("entry_point"))
    if "inputs" in value and "outputs" in value:
        return _from_columns(value)
    if isinstance(value.get("tests"), list) and value["tests"]:
        return _from_rows(value["tests"], value.get("function", value.get("fn_name")))
    return _from_rows([value], None)


def _from_columns(value: Mapping[str, Any]) -> Tests:
    inputs, outputs = value["inputs"], value["outputs"]
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
        raise DataError("`inputs` and `outputs` must be lists of one length, and not empty")
    name = value.get("fn_name", value.get("function"))
    if name:
        odd = next((args for args in inputs if not isinstance(args, list)), None)
        if odd is not None:
            raise DataError(f"`inputs` of a function are lists of arguments, not {odd!r:.60}")
        return [FunctionTest(str(name), list(args), right) for args, right in zip(inputs, outputs, strict=True)]
    return [StdioTest(_text(given), _text(right)) for given, right in zip(inputs, outputs, strict=True)]


def _from_rows(rows: Sequence[Any], function: Any) -> Tests:
    functions: list[FunctionTest] = []
    stdio: list[StdioTest] = []
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise DataError(f"test {number} is {row!r:.60}; an object with keys is needed")
        name = row.get("name", row.get("function", function))
        args, kwargs = row.get("args", []), row.get("kwargs", {})
        if "expected" in row and isinstance(name, str) and isinstance(args, list) and isinstance(kwargs, Mapping):
            functions.append(FunctionTest(name, args, row["expected"], kwargs))
        elif ("stdout" in row) or ("output" in row):
            stdio.append(
                StdioTest(_text(row.get("stdin", row.get("input", ""))), _text(row.get("stdout", row.get("output"))))
            )
        else:
            raise DataError(
                f"test {number} has the keys {', '.join(row)}; `stdin` and `stdout`, or `name`, `args` and `expected`, "
                "are needed"
            )
    if functions and stdio:
        raise DataError("tests of functions and of standard input are mixed in one row")
    return functions or stdio


def _text(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise DataError(f"standard input and output are text, not {value!r:.60}")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise DataError(f"standard input or output holds half of a surrogate pair: {value!r:.60}")
    return value


def same_output(expected: str, got: str) -> bool:
    r"""Whether two outputs are the same, line by line.

    >>> same_output("1 2\n3\n", "1 2 \r\n3"), same_output("1 2\n3\n", "1 2\n\n3")
    (True, False)
    """
    return _lines(expected) == _lines(got)


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


NOTHING: Final = object()
"""Stands for a result that equals no expected one."""


def plain_result(value: Any) -> Any:
    """A result as a program wrote it (by the rules of `inside.wire`), as JSON values; `NOTHING` for what JSON has not.

    Unlike `wire.decode` it computes no number and hashes nothing but text: a program can write a fraction with a
    billion digits, or keys that all collide. Raises `ValueError` or `TypeError` for what is no such text.

    >>> plain_result({"dict": [[1, {"tuple": [2, 3]}]]}), plain_result({"Fraction": "1e999999999"}) is NOTHING
    ({'1': [2, 3]}, True)
    """
    if isinstance(value, list):
        return [plain_result(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, body),) = value.items()
    if kind == "int":
        return int(body, 16)
    if kind == "float":
        return float(body)
    if kind == "tuple":
        return [plain_result(item) for item in body]
    if kind != "dict":
        return NOTHING
    named = {_json_key(_key(key)): plain_result(item) for key, item in body}
    return named if len(named) == len(body) else NOTHING  # 1 and "1" are one key in JSON, and two here


def _key(value: Any) -> Any:
    """A mapping's key: a plain value, or a tuple of such."""
    if isinstance(value, dict) and "tuple" in value:
        return tuple(_key(item) for item in value["tuple"])
    return plain_result(value)


def same_result(expected: Any, got: Any) -> bool:
    """Whether a function's decoded result is the right one.

    >>> same_result([1, 2.0], (1, 2)), same_result(1, True), same_result({"1": 2}, {1: 2})
    (True, False, True)
    """
    if isinstance(expected, bool) or isinstance(got, bool) or expected is None or got is None:
        return expected is got
    if isinstance(expected, int) and isinstance(got, int):
        return expected == got
    if isinstance(expected, int | float) and isinstance(got, int | float):
        return _close(expected, got)
    if isinstance(expected, str) or isinstance(got, str):
        return expected == got
    if isinstance(expected, list) and isinstance(got, list | tuple):
        return len(expected) == len(got) and all(map(same_result, expected, got))
    if isinstance(expected, dict) and isinstance(got, dict):
        named = {_json_key(key): value for key, value in got.items()}
        same_keys = named.keys() == expected.keys() and len(named) == len(got)
        return same_keys and all(same_result(expected[key], named[key]) for key in expected)
    return False


def _close(expected: float, got: float) -> bool:
    try:
        return math.isclose(expected, got, rel_tol=1e-9, abs_tol=1e-12)
    except OverflowError:
        return False


def _json_key(key: Any) -> str:
    if isinstance(key, bool) or key is None:
        return json.dumps(key)
    return str(key)
