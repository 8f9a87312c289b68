"""Tests as rows of data, and the comparison of outputs."""

from __future__ import annotations

import json

import pytest

from tithe.errors import DataError
from tithe.sandbox import AssertTests, FunctionTest, StdioTest, parse_tests, same_output, same_result
from tithe.sandbox.cases import NOTHING, plain_result
from tithe.sandbox.inside import wire


@pytest.mark.parametrize(
    ("got", "is_same"),
    [
        ("1 2 \n3", True),
        ("1 2\n\n3", False),
        ("12\n3", False),
        ("1 2\r\n3\r\n", True),
        ("1 2\n3\n\n\n", True),
        ("", False),
    ],
)
def test_white_space_at_the_end_of_lines_and_of_the_text_does_not_count(got, is_same):
    assert same_output("1 2\n3\n", got) is is_same


@pytest.mark.parametrize(
    ("row", "tests"),
    [
        ([{"stdin": "1", "stdout": "2"}], [StdioTest("1", "2")]),
        ([{"input": ["1", "2"], "output": "3"}], [StdioTest("1\n2", "3")]),
        ([{"name": "f", "args": [1], "expected": None}], [FunctionTest("f", [1], None)]),
        ({"function": "f", "tests": [{"args": [], "expected": 1}]}, [FunctionTest("f", [], 1)]),
        (
            {"fn_name": "f", "inputs": [[1], [2]], "outputs": [3, 4]},
            [FunctionTest("f", [1], 3), FunctionTest("f", [2], 4)],
        ),
        ({"inputs": ["1"], "outputs": ["2"]}, [StdioTest("1", "2")]),
        (["assert f(1)", "assert f(2)"], AssertTests("assert f(1)\nassert f(2)")),
        ({"test": "def check(c): pass", "entry_point": "f"}, AssertTests("def check(c): pass", "f")),
        ("assert f(1)", AssertTests("assert f(1)")),
    ],
)
def test_every_form_is_read_as_values_and_as_text(row, tests):
    assert parse_tests(row) == tests
    assert parse_tests(json.dumps(row) if not isinstance(row, str) else row) == tests


@pytest.mark.parametrize(
    "row",
    [
        [],
        {},
        "",
        [{"args": [1], "expected": 2}],
        {"inputs": ["1"], "outputs": []},
        [{"stdin": 1, "stdout": 2}],
        [{"stdin": "\ud800", "stdout": "2"}],
        {"fn_name": "f", "inputs": [1], "outputs": [2]},
        {"function": "f", "tests": [1]},
        [{"name": "f", "args": [1], "kwargs": [2], "expected": 3}],
        [{"stdin": "1", "stdout": "2"}, {"name": "f", "expected": 1}],
        7,
    ],
)
def test_what_is_no_test_is_an_error_that_says_so(row):
    with pytest.raises(DataError, match=r"test|inputs|input"):
        parse_tests(row)


def test_a_result_equals_nothing_by_accident():
    assert not same_result(0, None)
    assert not same_result([], {})
    assert not same_result({"1": 1, "2": 2}, {1: 1, "1": 2})
    assert not same_result(float("nan"), float("nan"))
    assert not same_result(10**400, 1.0)


@pytest.mark.parametrize(
    "value",
    [None, True, 7, -(2**70), 0.5, "x", [1, [2]], (1, (2, 3)), {"a": {1: (2,)}}, {(1, 2): 3, None: 4, 2.5: 5}],
)
def test_a_result_crosses_as_json_values(value):
    def as_json(inner):
        if isinstance(inner, dict):
            return {json.dumps(k) if k is None else str(k): as_json(item) for k, item in inner.items()}
        return [as_json(item) for item in inner] if isinstance(inner, list | tuple) else inner

    assert plain_result(json.loads(json.dumps(wire.encode(value)))) == as_json(value)


@pytest.mark.parametrize(
    "body",
    [
        {"Fraction": "1e999999999"},
        {"Decimal": "1"},
        {"set": [n * (2**61 - 1) for n in range(50_000)]},
        {"dict": [[1, 2], ["1", 2]]},
        {"unheard of": 1},
    ],
)
def test_what_json_has_not_equals_nothing_and_is_not_computed(body):
    """The first took all memory and never ended; 380,000 numbers of one hash took minutes."""
    assert plain_result(body) is NOTHING
    assert not same_result(1, plain_result(body))
