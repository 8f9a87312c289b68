"""Run file + overrides → `RunConfig`, and back to text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tithe.config.fields import allowed, find_field, nearest_key, sections
from tithe.config.schema import RunConfig
from tithe.config.yaml_text import dump_yaml, parse_value, read_yaml
from tithe.errors import ConfigError

_UNSAFE_IN_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_SHOWN = 80
"""Longest piece of a given value that a message repeats, in characters."""


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file and apply ``section.key=value`` overrides, of which later ones win.

    Without a file (None) everything is at its default, which is the demo's model and task. Raises `ConfigError`: one
    line per problem with the key, what was given and what is allowed. Reads nothing but the run file, so a missing
    model or data file shows later, when it is opened.
    """
    values = _as_sections(read_yaml(Path(path)), Path(path)) if path is not None else {}
    for override in overrides:
        _apply(values, override)
    if path is not None:
        _name_after(values, Path(path))
    return build_config(values)


def build_config(values: Mapping[str, Any]) -> RunConfig:
    """A `RunConfig` from plain nested values. Raises `ConfigError` as `load_config` does."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        problems = _problems(error, values)
    raise ConfigError("\n".join(problems.values()), key=next(iter(problems)))


def dump_resolved(cfg: RunConfig) -> str:
    """The whole configuration as YAML, defaults included; `load_config` reads it back to an equal `RunConfig`. Without
    an adapter there is no section `lora`, whose keys would be refused as given."""
    without = {"lora"} if cfg.model.train == "full" else None
    return dump_yaml(cfg.model_dump(mode="json", exclude=without))


def _as_sections(document: Any, path: Path) -> dict[str, Any]:
    """A mapping of mappings that may be changed; `section:` with nothing after it is an empty section."""
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path} must hold sections such as `model:` and `rl:`, not {_show(document)}")
    values: dict[str, Any] = {}
    for name, section in document.items():
        if isinstance(section, dict):
            values[name] = dict(section)
        else:
            values[name] = {} if section is None and name in sections() else section
    return values


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"override {override!r} must look like section.key=value, for instance optimizer.lr=2e-5")
    if find_field(key) is None and key not in sections():
        raise ConfigError(_unknown(key), key=key)
    value = parse_value(text, where=f"override {key}")
    section, _, leaf = key.partition(".")
    if leaf:
        target = values.setdefault(section, {})
        if isinstance(target, dict):  # else the section itself is wrong, which validation reports
            target[leaf] = value
    elif isinstance(value, dict):
        values.setdefault(section, {}).update(value)
    else:
        raise ConfigError(f"{key} = {_show(value)} is not allowed: it is a section, give {key}.KEY=value", key=key)


def _name_after(values: dict[str, Any], path: Path) -> None:
    """`run.name` defaults to the run file's own name."""
    name = _UNSAFE_IN_NAME.sub("-", path.stem).strip("-._")[:64]
    section = values.setdefault("run", {})
    if isinstance(section, dict) and name:
        section.setdefault("name", name)


def _problems(error: ValidationError, values: Mapping[str, Any]) -> dict[str, str]:
    """Key → one line, the most telling problem of each key.

    A default that could not be derived only follows from another problem, and of a union's branches the one whose own
    rule failed says more than the ones of another type.
    """
    rank = {"value_error": 0, "extra_forbidden": 1}
    items = [item for item in error.errors(include_url=False) if item["type"] != "default_factory_not_called"]
    problems: dict[str, str] = {}
    best: dict[str, int] = {}
    for item in items:
        key = _key(item["loc"])
        order = rank.get(item["type"], 2)
        if order >= best.get(key, 3):
            continue
        best[key] = order
        unknown = item["type"] == "extra_forbidden" and find_field(key) is None
        problems[key] = _unknown(key) if unknown else _wrong(key, item, values)
    return problems


def _key(location: tuple[int | str, ...]) -> str:
    """The dotted name of a location, without pydantic's own branch labels behind a list index or a union."""
    section, *rest = location
    return f"{section}.{rest[0]}" if rest else str(section)


def _unknown(key: str) -> str:
    near = nearest_key(key)
    kind = "section" if near in sections() else "key"
    return f"{key}: there is no such key; " + (
        f"did you mean the {kind} {near}?" if near else "docs/configuration.md lists them all"
    )


def _wrong(key: str, item: Any, values: Mapping[str, Any]) -> str:
    section, _, leaf = key.partition(".")
    given = values[section][leaf] if leaf else values[section]
    info = find_field(key)
    if info is None:
        return f"{key} = {_show(given)} is not allowed: it is a section, give its keys"
    inner = _place_inside(item["loc"][2:])
    if item["type"] == "value_error":
        reason = f"{item['ctx']['error']}{f' ({inner})' if inner else ''}"
    elif inner:
        what = {"extra_forbidden": "no such key", "missing": "missing"}.get(item["type"], "not allowed there")
        reason = f"is not allowed ({inner}: {what})"
    else:
        reason = "is not allowed"
    return f"{key} = {_show(given)} {reason}: give {allowed(info)}"


def _place_inside(location: tuple[int | str, ...]) -> str:
    """Where in a list the problem sits, counted from 1: `entry 2, weight`. Empty for a problem of the whole value."""
    if not location or not isinstance(location[0], int):
        return ""
    return ", ".join([f"entry {location[0] + 1}", *(str(part) for part in location[1:])])


def _show(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
