"""Under which base and numeric mode an adapter was trained: a small file beside the PEFT ones, which PEFT ignores."""

from __future__ import annotations

import json
from pathlib import Path

from tithe.errors import AdapterError
from tithe.models import Decoder
from tithe.utils.durable import write_text

ORIGIN_FILE = "tithe.json"


def write_origin(directory: Path, decoder: Decoder) -> None:
    """Write the file into an adapter's directory."""
    origin = {"base_checksum": decoder.checksum, "numeric_mode": decoder.options.numeric_mode}
    write_text(directory / ORIGIN_FILE, json.dumps(origin, indent=1))


def origin_problem(directory: Path, decoder: Decoder) -> str | None:
    """Why an adapter is another policy on this decoder than where it was trained; None when it is not, or nothing
    is known.

    Raises `AdapterError` for a damaged file.
    """
    path = directory / ORIGIN_FILE
    if not path.is_file():
        return None
    try:
        origin = json.loads(path.read_text(encoding="utf-8"))
        checksum, mode = str(origin["base_checksum"]), str(origin["numeric_mode"])
    except (ValueError, KeyError, TypeError) as error:
        raise AdapterError(f"{path} is damaged ({error}); remove it to load the adapter without this check") from error
    if checksum != decoder.checksum:
        return "it was trained on another base; set model.path to that one"
    if mode != decoder.options.numeric_mode:
        return (
            f"it was trained under {mode} and would compute under {decoder.options.numeric_mode}; set model.base_dtype "
            f"and model.compute_dtype as in training"
        )
    return None
