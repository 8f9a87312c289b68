"""Reading the schema itself: dotted names, what a field allows in words, the nearest name of a wrong one."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tithe.config.sections import RunSections


def sections() -> dict[str, type[BaseModel]]:
    """Section name → its class, in the order of the schema."""
    found: dict[str, type[BaseModel]] = {}
    for name, info in RunSections.model_fields.items():
        assert isinstance(info.annotation, type)
        found[name] = info.annotation
    return found


def iter_fields() -> Iterator[tuple[str, FieldInfo]]:
    """Every key by its dotted name, in the order of the schema."""
    for section, model in sections().items():
        for name, info in model.model_fields.items():
            yield f"{section}.{name}", info


def find_field(key: str) -> FieldInfo | None:
    """The field of a dotted name, or None when there is none."""
    return dict(iter_fields()).get(key)


def nearest_key(key: str) -> str | None:
    """The key that was probably meant by an unknown one: first within its section, then by last part anywhere.

    >>> nearest_key("rl.clip_rnage"), nearest_key("lr"), nearest_key("model.lora_rank_of_everything")
    ('rl.clip_range', 'optimizer.lr', None)
    """
    section, _, leaf = key.rpartition(".")
    known = sections()
    if section in known:
        near = difflib.get_close_matches(leaf, known[section].model_fields, n=1, cutoff=0.6)
        if near:
            return f"{section}.{near[0]}"
    elif not section:
        near = difflib.get_close_matches(leaf, known, n=1, cutoff=0.7)
        if near:
            return near[0]
    else:
        near = difflib.get_close_matches(section, known, n=1, cutoff=0.6)
        if near and leaf in known[near[0]].model_fields:
            return f"{near[0]}.{leaf}"
    by_leaf: dict[str, str] = {}
    for name, _ in iter_fields():
        by_leaf.setdefault(name.partition(".")[2], name)
    near = difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.75)
    return by_leaf[near[0]] if near else None


def extra_text(info: FieldInfo, name: str) -> str | None:
    """A text that the schema attaches to a field, its own or its annotation's."""
    extra = info.json_schema_extra
    if isinstance(extra, dict) and name in extra:
        return str(extra[name])
    for argument in (info.annotation, *get_args(info.annotation)):
        for metadata in getattr(argument, "__metadata__", ()):
            if isinstance(metadata, FieldInfo):
                found = extra_text(metadata, name)
                if found:
                    return found
    return None


def allowed(info: FieldInfo) -> str:
    """What a field allows, in words, such as `a number > 0 and <= 1` or `a whole number >= 1, or null`."""
    options = _options(info.annotation)
    nullable = type(None) in options
    text = extra_text(info, "allowed")
    if text is None:
        text = " or ".join(_kind(option) for option in options if option is not type(None))
        limits = " and ".join(_limits(info.metadata))
        text = f"{text} {limits}" if limits else text
    return f"{text}, or null" if nullable else text


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _bare(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _options(annotation: Any) -> tuple[Any, ...]:
    annotation = _bare(annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(_bare(option) for option in get_args(annotation))
    return (annotation,)


def _kind(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        values = get_args(annotation)
        return values[0] if len(values) == 1 else f"one of: {', '.join(values)}"
    if origin is tuple:
        item = _bare(get_args(annotation)[0])
        return f"a list of {_mapping(item) if _is_section(item) else 'texts'}"
    if _is_section(annotation):
        return _mapping(annotation)
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}.get(
        annotation, str(annotation)
    )


def _mapping(model: type[BaseModel]) -> str:
    return "{" + ", ".join(model.model_fields) + "}"


def _limits(metadata: list[Any]) -> Iterator[str]:
    for item in metadata:
        if isinstance(item, annotated_types.Ge):
            yield f">= {item.ge}"
        elif isinstance(item, annotated_types.Gt):
            yield f"> {item.gt}"
        elif isinstance(item, annotated_types.Le):
            yield f"<= {item.le}"
        elif isinstance(item, annotated_types.Lt):
            yield f"< {item.lt}"
        elif isinstance(item, annotated_types.MinLen) and item.min_length == 1:
            yield "that is not empty"
        elif pattern := getattr(item, "pattern", None):
            yield f"that matches {pattern}"
