"""Configs of released models by name, so that they can be planned for without a download. Sizes only.

Each file beside this module holds the fields of the release's own config.json that Tithe reads, and no other.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Final

from tithe.arch.files import quote, read_json
from tithe.errors import ModelError

_DIRECTORY: Final = Path(__file__).parent / "known"


def known_names() -> tuple[str, ...]:
    """Names that `known_config` takes, in order."""
    return tuple(sorted(path.stem for path in _DIRECTORY.glob("*.json")))


def known_config(name: str) -> dict[str, Any]:
    """The config of a known model, by its name in any case, with or without its owner ("moonshotai/Kimi-K2-Thinking").

    `ModelError` names the nearest known one.
    """
    wanted = name.rsplit("/", 1)[-1].lower()
    names = known_names()
    if wanted in names:
        return read_json(_DIRECTORY / f"{wanted}.json")
    near = difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ModelError(
        f"{quote(name)} is no file or directory here, and no known model.{hint} Known: {', '.join(names)}; "
        f"or give a config.json, a checkpoint directory or a GGUF file"
    )
