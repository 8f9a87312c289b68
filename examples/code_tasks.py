"""Writes `code_tasks.jsonl`: small functions asked for in words, each family with many constants, so that held-out
questions are of the kinds that were trained and none of them was.

    python examples/code_tasks.py > examples/code_tasks.jsonl

Every row holds the question, the tests (`function` and what it returns for `args`) and a solution that passes them. The
expected values come from running the solutions of this file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple


class Family(NamedTuple):
    """Functions that differ in constants: `name`, `words` and `body` may say {k} and {j}; `calls` are their tests."""

    name: str
    arguments: str
    words: str
    body: str
    calls: tuple[tuple[Any, ...], ...]
    constants: tuple[dict[str, Any], ...] = ({},)


def _each(*values: Any) -> tuple[dict[str, Any], ...]:
    return tuple({"k": value} for value in values)


def _pairs(*values: tuple[Any, Any]) -> tuple[dict[str, Any], ...]:
    return tuple({"k": k, "j": j} for k, j in values)


NUMBERS = ((0,), (7,), (-5,), (24,), (61,))
LISTS = (([4, 1, 9, 30, 6, 12, 7, 2],), ([-3, 8, 5, 40, 11, 0, 13, 25],), ([3, 15, -1, 5, 2, 5, 10],))
TEXTS = (("banana",), ("statement",), ("puzzle box",), ("elephants",))
SOME = (2, 3, 4, 5, 6, 7, 8, 9, 11, 15)
FEW = (2, 3, 4, 5, 6)
LETTERS = ("a", "e", "n", "t", "s", "o", "l", "p")

FAMILIES = (
    Family("add_{k}", "x", "returns x plus {k}", "x + {k}", NUMBERS, _each(*SOME)),
    Family("minus_{k}", "x", "returns x minus {k}", "x - {k}", NUMBERS, _each(*SOME)),
    Family("times_{k}", "x", "returns x times {k}", "x * {k}", NUMBERS, _each(*SOME)),
    Family("from_{k}", "x", "returns {k} minus x", "{k} - x", NUMBERS, _each(*SOME)),
    Family("divide_by_{k}", "x", "returns x divided by {k}, rounded down", "x // {k}", NUMBERS, _each(*SOME)),
    Family("remainder_{k}", "x", "returns the remainder of x divided by {k}", "x % {k}", NUMBERS, _each(*SOME)),
    Family("power_{k}", "x", "returns x to the power of {k}", "x ** {k}", NUMBERS, _each(*FEW)),
    Family("at_least_{k}", "x", "returns the larger of x and {k}", "max(x, {k})", NUMBERS, _each(*SOME)),
    Family("at_most_{k}", "x", "returns the smaller of x and {k}", "min(x, {k})", NUMBERS, _each(*SOME)),
    Family("above_{k}", "x", "returns True if x is greater than {k}", "x > {k}", NUMBERS, _each(*SOME)),
    Family("below_{k}", "x", "returns True if x is less than {k}", "x < {k}", NUMBERS, _each(*SOME)),
    Family("multiple_{k}", "x", "returns True if x is divisible by {k}", "x % {k} == 0", NUMBERS, _each(*SOME)),
    Family("apart_{k}", "x", "returns the distance between x and {k}", "abs(x - {k})", NUMBERS, _each(*FEW)),
    Family(
        "scale_{k}_{j}",
        "x",
        "returns x times {k} plus {j}",
        "x * {k} + {j}",
        NUMBERS,
        _pairs((2, 1), (3, 2), (4, 5), (5, 3), (6, 1), (7, 4), (8, 9), (9, 7)),
    ),
    Family("first_{k}", "items", "returns the first {k} items of a list", "items[:{k}]", LISTS, _each(*FEW)),
    Family("last_{k}", "items", "returns the last {k} items of a list", "items[-{k}:]", LISTS, _each(*FEW)),
    Family("skip_{k}", "items", "returns a list without its first {k} items", "items[{k}:]", LISTS, _each(*FEW)),
    Family("item_{k}", "items", "returns the item at index {k} of a list", "items[{k}]", LISTS, _each(*FEW)),
    Family(
        "all_times_{k}",
        "items",
        "returns a list with every item times {k}",
        "[x * {k} for x in items]",
        LISTS,
        _each(*FEW),
    ),
    Family(
        "keep_above_{k}",
        "items",
        "returns the items of a list that are greater than {k}",
        "[x for x in items if x > {k}]",
        LISTS,
        _each(*FEW),
    ),
    Family(
        "count_above_{k}",
        "items",
        "returns how many items of a list are greater than {k}",
        "sum(x > {k} for x in items)",
        LISTS,
        _each(*FEW),
    ),
    Family("contains_{k}", "items", "returns True if {k} is in a list", "{k} in items", LISTS, _each(*SOME)),
    Family("repeat_{k}", "text", "returns a text repeated {k} times", "text * {k}", TEXTS, _each(*FEW)),
    Family("start_{k}", "text", "returns the first {k} letters of a text", "text[:{k}]", TEXTS, _each(*FEW)),
    Family("end_{k}", "text", "returns the last {k} letters of a text", "text[-{k}:]", TEXTS, _each(*FEW)),
    Family(
        "longer_than_{k}",
        "text",
        "returns True if a text has more than {k} letters",
        "len(text) > {k}",
        TEXTS,
        _each(6, 7, 8, 9),
    ),
    Family(
        "count_{k}",
        "text",
        "returns how often the letter {k} is in a text",
        "text.count('{k}')",
        TEXTS,
        _each(*LETTERS),
    ),
    Family("has_{k}", "text", "returns True if the letter {k} is in a text", "'{k}' in text", TEXTS, _each(*LETTERS)),
    Family(
        "starts_with_{k}",
        "text",
        "returns True if a text starts with the letter {k}",
        "text.startswith('{k}')",
        TEXTS,
        _each("b", "s", "p", "e"),
    ),
    Family(
        "swap_{k}_{j}",
        "text",
        "returns a text with every letter {k} replaced by {j}",
        "text.replace('{k}', '{j}')",
        TEXTS,
        _pairs(("a", "o"), ("e", "i"), ("n", "m"), ("t", "d"), ("s", "z"), ("l", "r")),
    ),
    Family("add", "a, b", "returns the sum of two numbers", "a + b", ((2, 3), (-1, 1), (10, -4))),
    Family("is_even", "n", "returns True for even numbers and False for odd ones", "n % 2 == 0", NUMBERS),
    Family("largest", "items", "returns the largest item of a list", "max(items)", LISTS),
    Family("total", "items", "returns the sum of a list of numbers", "sum(items)", LISTS),
    Family("reverse", "text", "returns the text written backwards", "text[::-1]", TEXTS),
    Family("first_word", "text", "returns the first word of a text", "text.split()[0]", TEXTS),
    Family(
        "is_palindrome",
        "text",
        "returns True when a text reads the same backwards",
        "text == text[::-1]",
        (("level",), ("lever",), ("noon",)),
    ),
    Family(
        "join_words",
        "words",
        "joins a list of words with single spaces",
        "' '.join(words)",
        ((["good", "day"],), (["one"],), (["a", "b", "c"],)),
    ),
)


def rows() -> Iterator[dict[str, Any]]:
    """Every family with each of its constants, as a line of the file."""
    for family in FAMILIES:
        for constants in family.constants:
            name, words, body = (text.format(**constants) for text in (family.name, family.words, family.body))
            head = f"{name}({family.arguments})"
            solution = f"def {head}:\n    return {body}"
            scope: dict[str, Any] = {}
            exec(solution, scope)  # noqa: S102  written above, nobody else's
            tests = [{"args": list(call), "expected": scope[name](*call)} for call in family.calls]
            yield {
                "prompt": f"Write a Python function {head} that {words}.",
                "answer": {"function": name, "tests": tests},
                "solution": solution,
            }


def main() -> None:
    """One JSON object a line on standard output, the same ones every time."""
    for row in rows():
        print(json.dumps(row))


if __name__ == "__main__":
    main()
