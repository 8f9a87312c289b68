"""YAML in and out under the scalar rules of YAML 1.2, with which a run file means what it looks like.

`2e-5` and `2E-5` are numbers; only `true` and `false` are booleans, so `on`, `off`, `yes` and `no` stay text; `010`
is ten and `12:30` text. A key given twice, an alias, a second document, or more than `MAX_BYTES` is refused with line
and column.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from tithe.errors import ConfigError

MAX_BYTES = 1 << 20
"""Largest run file. One with every key set has about 4 KiB."""

MAX_DEPTH = 16
"""Deepest nesting; the schema needs four levels."""

MAX_DIGITS = 100
"""Longest whole number."""

_NULL, _BOOL, _INT, _FLOAT = (f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float"))
_NULL_TEXT = re.compile(r"~|null|Null|NULL|")
_BOOL_TEXT = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT_TEXT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT_TEXT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """PyYAML's table: first character → (tag, pattern) in order. It matches from the start only, hence the ``$``."""
    rules = (
        (_NULL, _NULL_TEXT, "~nN"),
        (_BOOL, _BOOL_TEXT, "tTfF"),
        (_INT, _INT_TEXT, "-+0123456789"),
        (_FLOAT, _FLOAT_TEXT, "-+.0123456789"),
    )
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {"": [(_NULL, re.compile(r"$"))]}
    for tag, pattern, first in rules:
        whole = re.compile(f"(?:{pattern.pattern})$")
        for character in first:
            table.setdefault(character, []).append((tag, whole))
    return table


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader without aliases, without repeated keys, of bounded depth."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse what could make a small file a large or endless value."""
        if self.check_event(yaml.AliasEvent):
            raise _refusal("an alias is not allowed here; write the value out", self.peek_event())
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _refusal(f"nested deeper than {MAX_DEPTH} levels", self.peek_event())
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Refuse a key that is no text or comes twice; PyYAML would keep the last."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise _refusal(f"key {key!r} is not text", key_node)
            if key in seen:
                raise _refusal(f"key '{key}' is given twice", key_node)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _refusal(problem: str, place: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=place.start_mark)


def _construct_int(_: _Loader, node: yaml.ScalarNode) -> int:
    text = node.value
    if not _INT_TEXT.fullmatch(text) or len(text) > MAX_DIGITS:
        raise _refusal(f"'{text[:20]}' is no whole number of at most {MAX_DIGITS} digits", node)
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


def _construct_bool(_: _Loader, node: yaml.ScalarNode) -> bool:
    if not _BOOL_TEXT.fullmatch(node.value):
        raise _refusal(f"'{node.value}' is neither true nor false", node)
    return node.value.lower() == "true"


def _construct_float(_: _Loader, node: yaml.ScalarNode) -> float:
    text = node.value
    if not _FLOAT_TEXT.fullmatch(text):
        raise _refusal(f"'{text}' is no number", node)
    return float(text.replace(".", "", 1) if text[-1].isalpha() else text)  # YAML writes .inf and .nan


_Loader.yaml_implicit_resolvers = _resolvers()
_Loader.add_constructor(_INT, _construct_int)
_Loader.add_constructor(_BOOL, _construct_bool)
_Loader.add_constructor(_FLOAT, _construct_float)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that these rules *or* YAML 1.1 would read as something else, so that any reader agrees."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002 (PyYAML's signature)
        """Indent lists under their key."""
        super().increase_indent(flow, indentless=False)


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Only double quotes escape: every other style of PyYAML loses NEL and turns some line breaks into others."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _represent_text)
_Dumper.yaml_implicit_resolvers = {
    first: [*_Loader.yaml_implicit_resolvers.get(first, []), *yaml.SafeDumper.yaml_implicit_resolvers.get(first, [])]
    for first in {*_Loader.yaml_implicit_resolvers, *yaml.SafeDumper.yaml_implicit_resolvers}
}


def parse_yaml(text: str, where: str) -> Any:
    """The one document in `text` as plain Python values. Raises `ConfigError` with `where`, line and column."""
    try:
        loader = _Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}{_explain(error)}") from error


def read_yaml(path: Path) -> Any:
    """The document in a file. Raises `ConfigError` for a missing, unreadable, oversized or malformed one."""
    try:
        if path.is_dir():
            raise ConfigError(f"{path} is a folder; name the run file in it")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"run file {path} cannot be read: {error.strerror or error}") from error
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{path} has more than {MAX_BYTES} bytes; that is no run file")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    return parse_yaml(text, where=str(path))


def parse_value(text: str, where: str) -> Any:
    """The value of an override. Text that opens with ``[``, ``{`` or a quote is YAML; all else is one scalar taken
    whole, so that ``Answer: a number`` stays text.

    >>> parse_value("2e-5", "x"), parse_value("off", "x"), parse_value("[a, b]", "x"), parse_value("a: b", "x")
    (2e-05, 'off', ['a', 'b'], 'a: b')
    """
    stripped = text.strip()
    if stripped[:1] in ("[", "{", '"', "'"):
        return parse_yaml(stripped, where)
    loader = _Loader("")
    try:
        tag = loader.resolve(yaml.ScalarNode, stripped, (True, False))
        value = loader.construct_object(yaml.ScalarNode(tag, stripped))
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}{_explain(error)}") from error
    finally:
        loader.dispose()
    return text if isinstance(value, str) else value


def dump_yaml(value: Any) -> str:
    """Block-style YAML that `parse_yaml` reads back to an equal value, floats as floats."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110, default_flow_style=False)


def _explain(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        return f"{place}: {error.problem or error.context}"
    return f": {' '.join(str(error).split())}"
