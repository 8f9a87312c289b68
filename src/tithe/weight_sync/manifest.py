"""The manifest of a published version, and its strict JSON form.

Every key must be there, no other key may be, and types are exact: a manifest that does not parse is a version that
does not load.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tithe.errors import AdapterError
from tithe.types import PolicyVersion
from tithe.weight_sync.probe import Probe

MANIFEST_FILE = "manifest.json"
FORMAT = 1

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PUBLISHED = re.compile(r"(?P<run>.+)-(?P<lineage>\d+)-v(?P<serial>\d+)-(?P<sha8>[0-9a-f]{8})")


@dataclass(frozen=True)
class FileRecord:
    """Size and SHA-256 (hexadecimal) of one file of a version."""

    n_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a published version is.

    `name` is ``<run>-<lineage>-v<serial>-<sha8>``; `parent` the published name of the version it was trained from
    (None for a run's first); `optimizer_step` counts optimizer steps; `base_checksum` is the base's SHA-256;
    `numeric_mode` names the arithmetic (kernel, dtype, attention) under which the probe holds; `files` has one record
    per file beside the manifest.

    >>> manifest = Manifest("sums-0-v3-00c0ffee", PolicyVersion(0, 3), "sums-0-v2-1234abcd", 3, "ab12", "packed/bf16",
    ...                     {"adapter_config.json": FileRecord(412, "9f2c")}, Probe((1, 5), 1, (-0.5,), 0.0))
    >>> Manifest.from_json(manifest.to_json()) == manifest
    True
    """

    name: str
    version: PolicyVersion
    parent: str | None
    optimizer_step: int
    base_checksum: str
    numeric_mode: str
    files: Mapping[str, FileRecord]
    probe: Probe

    def to_json(self) -> str:
        """The content of ``manifest.json``. Floats are written so that they read back to the same bits."""
        content = {
            "format": FORMAT,
            "name": self.name,
            "version": {"lineage": self.version.lineage, "serial": self.version.serial},
            "parent": self.parent,
            "optimizer_step": self.optimizer_step,
            "base_checksum": self.base_checksum,
            "numeric_mode": self.numeric_mode,
            "files": {n: {"n_bytes": f.n_bytes, "sha256": f.sha256} for n, f in self.files.items()},
            "probe": {
                "token_ids": list(self.probe.token_ids),
                "prompt_len": self.probe.prompt_len,
                "logp": list(self.probe.logp),
                "parent_logp": None if self.probe.parent_logp is None else list(self.probe.parent_logp),
                "noise_floor": self.probe.noise_floor,
            },
        }
        return json.dumps(content, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = MANIFEST_FILE) -> Manifest:
        """Parse strictly. Raises `AdapterError` naming the first key that is wrong."""
        try:
            content = json.loads(text)
        except ValueError as error:
            raise AdapterError(f"{where}: not JSON ({error})") from error
        top = _Object(content, where)
        if top.take("format", int) != FORMAT:
            raise AdapterError(f"{where}: format is {content['format']}, this program reads {FORMAT}")
        version = _Object(top.take("version", dict), f"{where}: version")
        files = top.take("files", dict)
        manifest = cls(
            name=top.take("name", str),
            version=PolicyVersion(version.take("lineage", int), version.take("serial", int)),
            parent=top.take("parent", str, optional=True),
            optimizer_step=top.take("optimizer_step", int),
            base_checksum=top.take("base_checksum", str),
            numeric_mode=top.take("numeric_mode", str),
            files={name: _file_record(record, f"{where}: files: {name}") for name, record in files.items()},
            probe=_probe(top.take("probe", dict), f"{where}: probe"),
        )
        version.finish()
        top.finish()
        return manifest


def published_name(run_name: str, version: PolicyVersion, tensors_sha256: str) -> str:
    """Name of a version on disk and in engines.

    >>> published_name("sums", PolicyVersion(0, 3), "00c0ffee5a" * 6)
    'sums-0-v3-00c0ffee'
    """
    return f"{run_name}-{version.lineage}-v{version.serial}-{tensors_sha256[:8]}"


def check_run_name(run_name: str) -> None:
    """Raise `AdapterError` for a run name that cannot be part of a published name."""
    if not _RUN_NAME.fullmatch(run_name):
        raise AdapterError(
            f"run name {run_name!r}: use letters, digits, '.', '_', '-', and begin with a letter or digit"
        )


def parse_name(name: str) -> tuple[str, PolicyVersion, str] | None:
    """Run name, version and sha8 of a published name; None when it is not one.

    >>> parse_name("sums-2-0-v3-00c0ffee")
    ('sums-2', PolicyVersion(lineage=0, serial=3), '00c0ffee')
    """
    found = _PUBLISHED.fullmatch(name)
    if found is None:
        return None
    return found["run"], PolicyVersion(int(found["lineage"]), int(found["serial"])), found["sha8"]


def _probe(content: Any, where: str) -> Probe:
    fields = _Object(content, where)
    parent_logp = fields.take("parent_logp", list, optional=True)
    try:
        probe = Probe(
            token_ids=_items(fields.take("token_ids", list), int, f"{where}: token_ids"),
            prompt_len=fields.take("prompt_len", int),
            logp=_items(fields.take("logp", list), float, f"{where}: logp"),
            noise_floor=fields.take("noise_floor", float),
            parent_logp=None if parent_logp is None else _items(parent_logp, float, f"{where}: parent_logp"),
        )
    except ValueError as error:
        raise AdapterError(f"{where}: {error}") from error
    fields.finish()
    return probe


def _file_record(content: Any, where: str) -> FileRecord:
    fields = _Object(content, where)
    record = FileRecord(fields.take("n_bytes", int), fields.take("sha256", str))
    fields.finish()
    return record


def _items(values: list[Any], kind: type, where: str) -> tuple[Any, ...]:
    return tuple(_exact(value, kind, where) for value in values)


def _exact(value: Any, kind: type, where: str) -> Any:
    """The value, if it has the JSON type; a whole number counts as a float, a boolean never as a number."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise AdapterError(f"{where} is {value!r}, not {kind.__name__}")
    return value


class _Object:
    """A JSON object of which every key must be taken exactly once."""

    def __init__(self, content: Any, where: str) -> None:
        if not isinstance(content, dict):
            raise AdapterError(f"{where}: not a JSON object")
        self._left: dict[str, Any] = dict(content)
        self._where = where

    def take(self, key: str, kind: type, *, optional: bool = False) -> Any:
        if key not in self._left:
            raise AdapterError(f"{self._where}: {key} is missing")
        value = self._left.pop(key)
        return None if optional and value is None else _exact(value, kind, f"{self._where}: {key}")

    def finish(self) -> None:
        if self._left:
            raise AdapterError(f"{self._where}: unknown keys {sorted(self._left)}")
