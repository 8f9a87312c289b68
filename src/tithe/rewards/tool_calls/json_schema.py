"""Validates arguments against a tool's JSON schema (draft 2020-12, the keywords that tool definitions use).

A keyword that restricts values and is not known here is an error of the definition and never ignored: a check that is
silently weaker would pay for wrong calls. `pattern` runs Python's `re` on text of the model, so validate where a time
limit holds (a reward worker).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from tithe.errors import DataError

_MAX_DEPTH: Final = 100
_ANNOTATIONS: Final = frozenset(
    ("title", "description", "default", "examples", "example", "format", "$schema", "$id", "$comment", "$defs",
     "definitions", "deprecated", "readOnly", "writeOnly", "strict")
)  # fmt: skip


def problems(value: object, schema: Mapping[str, Any]) -> list[str]:
    """What is wrong with a value, most general first; empty when it is valid. Raises `DataError` for a schema that uses
    a keyword or type not known here.

    >>> problems({"a": "1"}, {"type": "object", "properties": {"a": {"type": "integer"}}})
    ['a: not of type integer']
    """
    return list(dict.fromkeys(_check(value, schema, schema, "", 0)))


def with_defaults(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with every missing property that has a default filled in."""
    properties = schema.get("properties", {})
    defaults = {name: p["default"] for name, p in properties.items() if isinstance(p, Mapping) and "default" in p}
    return {**defaults, **arguments}


def same_json(one: object, other: object) -> bool:
    """Whether two JSON values are equal: 1 and 1.0 are, 1 and true are not, 3 and "3" are not; keys have no order.

    >>> same_json({"a": 1, "b": [2]}, {"b": [2.0], "a": 1}), same_json(1, True)
    (True, False)
    """
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, int | float) and isinstance(other, int | float):
        return one == other
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_json(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same_json, one, other))
    return type(one) is type(other) and one == other


def _is_integer(value: object) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_TYPES: Final[dict[str, Callable[[object], bool]]] = {
    "object": lambda value: isinstance(value, Mapping),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "integer": _is_integer,
    "number": _is_number,
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
}


def _check(value: object, schema: object, root: Mapping[str, Any], where: str, depth: int) -> Iterator[str]:
    if depth > _MAX_DEPTH:
        raise DataError("a tool's JSON schema refers to itself without end")
    if schema is True or schema == {}:
        return
    if schema is False:
        yield _at(where, "not allowed")
        return
    if not isinstance(schema, Mapping):
        raise DataError(f"a tool's JSON schema holds {schema!r:.60} where a schema belongs")
    unknown = sorted(key for key in schema if key not in _ANNOTATIONS and key not in _KEYWORDS)
    if unknown:
        raise DataError(f"a tool's JSON schema uses {unknown[0]!r}, which is not supported; leave it out")
    for keyword, rule in _KEYWORDS.items():
        if keyword in schema:
            try:
                yield from rule(value, schema, root, where, depth)
            except (TypeError, AttributeError, re.error, ArithmeticError, ValueError) as error:
                raise DataError(f"a tool's JSON schema has {keyword} = {schema[keyword]!r:.60}: {error}") from error


def _at(where: str, message: str) -> str:
    return f"{where}: {message}" if where else message


Rule = Callable[[Any, Mapping[str, Any], Mapping[str, Any], str, int], Iterator[str]]


def _type(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], where: str, depth: int) -> Iterator[str]:
    del root, depth
    names = [schema["type"]] if isinstance(schema["type"], str) else list(schema["type"])
    for name in names:
        if name not in _TYPES:
            raise DataError(f"a tool's JSON schema has the type {name!r}; types are {', '.join(_TYPES)}")
    if not any(_TYPES[name](value) for name in names):
        yield _at(where, f"not of type {' or '.join(names)}")


def _enum(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], where: str, depth: int) -> Iterator[str]:
    del root, depth
    allowed = schema.get("enum", [schema.get("const")])
    if not any(same_json(value, one) for one in allowed):
        yield _at(where, "not one of the allowed values")


def _object(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], where: str, depth: int) -> Iterator[str]:
    if not isinstance(value, Mapping):
        return
    properties = schema.get("properties", {})
    for name, part in value.items():
        if name in properties:
            yield from _check(part, properties[name], root, f"{where}.{name}" if where else name, depth + 1)


def _additional(
    value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], where: str, depth: int
) -> Iterator[str]:
    if not isinstance(value, Mapping):
        return
    rule = schema["additionalProperties"]
    for name in value.keys() - schema.get("properties", {}).keys():
        yield from _check(value[name], rule, root, f"{where}.{name}" if where else name, depth + 1)


def _required(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], where: str, depth: int) -> Iterator[str]:
    del root, depth
    if isinstance(value, Mapping):
        yield from (_at(where, f"{name} is missing") for name in schema["required"] if name not in value)


def _items(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], where: str, depth: int) -> Iterator[str]:
    if isinstance(value, list):
        for number, part in enumerate(value):
            yield from _check(part, schema["items"], root, f"{where}[{number}]", depth + 1)


def _unique(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], where: str, depth: int) -> Iterator[str]:
    del root, depth
    items = value[:500] if schema["uniqueItems"] and isinstance(value, list) else []
    if any(same_json(one, other) for i, one in enumerate(items) for other in items[:i]):
        yield _at(where, "has equal items")


def _bounds(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], where: str, depth: int) -> Iterator[str]:
    """All bounds at once, for each of them: `problems` tells each breach once."""
    del root, depth
    if _is_number(value):
        tests = {
            "minimum": lambda bound: value >= bound,
            "maximum": lambda bound: value <= bound,
            "exclusiveMinimum": lambda bound: value > bound,
            "exclusiveMaximum": lambda bound: value < bound,
            "multipleOf": lambda bound: _is_multiple(value, bound),
        }
    elif isinstance(value, str | list):
        kind = "Length" if isinstance(value, str) else "Items"
        tests = {f"min{kind}": lambda bound: len(value) >= bound, f"max{kind}": lambda bound: len(value) <= bound}
    else:
        return
    for name, test in tests.items():
        if name in schema and not test(schema[name]):
            yield _at(where, f"breaks {name} = {schema[name]}")


def _is_multiple(value: float, step: float) -> bool:
    if isinstance(value, int) and isinstance(step, int):
        return value % step == 0
    return abs(value) < 1e300 and math.isclose(math.remainder(value, step), 0.0, abs_tol=1e-9)


def _pattern(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], where: str, depth: int) -> Iterator[str]:
    del root, depth
    if isinstance(value, str) and re.search(schema["pattern"], value) is None:
        yield _at(where, "does not match its pattern")


def _some(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], where: str, depth: int) -> Iterator[str]:
    if not any(_is_valid(value, one, root, depth) for one in schema["anyOf"]):
        yield _at(where, "fits none of its alternatives")


def _one(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], where: str, depth: int) -> Iterator[str]:
    if sum(_is_valid(value, one, root, depth) for one in schema["oneOf"]) != 1:
        yield _at(where, "does not fit exactly one of its alternatives")


def _all(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], where: str, depth: int) -> Iterator[str]:
    for one in schema["allOf"]:
        yield from _check(value, one, root, where, depth + 1)


def _reference(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], where: str, depth: int) -> Iterator[str]:
    target: Any = root
    path: Sequence[str] = str(schema["$ref"]).split("/")
    for step in path[1:]:
        target = target.get(step) if isinstance(target, Mapping) else None
    if path[0] != "#" or target is None:
        raise DataError(f"a tool's JSON schema refers to {schema['$ref']!r}, which it does not hold")
    yield from _check(value, target, root, where, depth + 1)


def _is_valid(value: Any, schema: object, root: Mapping[str, Any], depth: int) -> bool:
    return next(_check(value, schema, root, "", depth + 1), None) is None


_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_KEYWORDS: Final[dict[str, Rule]] = {
    "type": _type,
    "enum": _enum,
    "const": _enum,
    "required": _required,
    "properties": _object,
    "additionalProperties": _additional,
    "items": _items,
    "uniqueItems": _unique,
    "pattern": _pattern,
    "anyOf": _some,
    "oneOf": _one,
    "allOf": _all,
    "$ref": _reference,
    **dict.fromkeys((*_BOUNDS, "minLength", "maxLength", "minItems", "maxItems"), _bounds),
}
