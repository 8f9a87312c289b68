"""`python -m tithe.config.docs` prints docs/configuration.md, made from the schema and nothing else."""

from __future__ import annotations

import sys

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tithe.config.fields import allowed, extra_text, sections
from tithe.config.resuming import RESUME_MUTABLE
from tithe.config.yaml_text import dump_yaml

_HEAD = """\
# Configuration

Made from the schema by `python -m tithe.config.docs`; change the docstrings in `src/tithe/config`, not this page.

A run file is YAML with the sections below; every key has a default, and a run file without `model.path` and `task`
trains the demo's model on the demo's task. On the command line `section.key=value` overrides the file, the last one
wins, and `--dry-run` prints the result. Relative paths start at the current directory.

- Numbers are numbers in any spelling (`2e-5`, `2E-5`, `2.0e-5`); a number in quotes is text and refused where a number
  is wanted. Only `true` and `false` are booleans: `on`, `off`, `yes`, `no` stay text.
- An unknown key is an error with the nearest name; so are a key given twice, a YAML alias, and a value out of range.
- Sizes named `batch` or `buffer` count rollouts. Lags, ages and rhythms count batches.
- Keys marked *resume* may be changed by `tithe resume RUN_DIR key=value`; all others belong to the run.
"""


def render() -> str:
    """The whole page as Markdown."""
    parts = [_HEAD]
    for section, model in sections().items():
        parts.append(f"## {section}\n\n{_flow(model.__doc__)}\n")
        parts.extend(_entry(f"{section}.{name}", info) for name, info in model.model_fields.items())
    return "\n".join(parts)


def _entry(key: str, info: FieldInfo) -> str:
    mark = ", *resume*" if key in RESUME_MUTABLE else ""
    return f"**`{key}`**: {allowed(info)}; default {_default(info)}{mark}  \n{_flow(info.description)}\n"


def _default(info: FieldInfo) -> str:
    text = extra_text(info, "default_text")
    if text is not None:
        return text
    if info.default is PydanticUndefined:
        raise TypeError(f"a derived default needs a text: {info}")
    if isinstance(info.default, tuple):
        return f"`[{', '.join(_text(value) for value in info.default)}]`"
    return f"`{_text(info.default)}`"


def _text(value: object) -> str:
    return dump_yaml([value]).strip().removeprefix("- ")


def _flow(text: str | None) -> str:
    return " ".join((text or "").split())


if __name__ == "__main__":
    sys.stdout.write(render())
